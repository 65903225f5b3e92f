"""ITI (the paper's B.1): probes of attention heads, and a push along their directions; `engine.edits` makes the push."""
