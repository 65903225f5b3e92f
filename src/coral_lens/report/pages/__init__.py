"""Self-contained HTML pages, with their templates."""
