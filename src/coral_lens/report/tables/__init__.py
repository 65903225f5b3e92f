"""Tables of runs and studies, as Markdown, LaTeX, CSV and JSON."""
