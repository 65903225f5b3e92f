"""Every method of a study: lenses, baselines and controls. Each ends in `Predictions`."""
