"""Figures of runs, analyses and features, in one style."""
