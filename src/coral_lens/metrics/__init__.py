"""Predictions in, numbers with intervals out. Knows nothing of the method that made them.

`scores` has the metrics and their intervals, `comparisons` tests between methods, `curves` what diagrams draw, `conformal`
sets of options and abstention with a guarantee, `display` how results print.
"""
