"""Where correctness lives: by layer, by head, by dimension, by probe and by training data. Reads stores, runs no model.

`layers`, `heads`, `dimensions`, `probes` and `data` each return a frozen record, which `files` writes as JSON and CSV and
`report.figures.analysis` draws. They share `folds` (questions divided, ridge out of fold), `held_out` (parts of stores),
`stacked` (many small networks as one) and `scores` (intervals).
"""
