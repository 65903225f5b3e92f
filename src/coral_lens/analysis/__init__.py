"""Where correctness lives: by layer, by head, by dimension, by probe and by training data. Reads stores, runs no model.

Every analysis returns a frozen record, which `files` writes as a table; `report.analysis_figures` draws it.
"""
