"""ITI (the paper's B.1): probes of attention heads, and an edit along their directions."""
