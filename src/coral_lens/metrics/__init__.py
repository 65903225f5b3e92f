"""Predictions in, numbers with intervals out. Knows nothing of the method that made them."""
