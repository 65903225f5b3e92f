"""The probes of the table of lenses: ridge, MLP, listwise; how each is fitted."""
