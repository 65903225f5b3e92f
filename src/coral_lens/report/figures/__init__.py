"""Figures of runs, confidence, choices, analyses and features, all in the one `style`."""
