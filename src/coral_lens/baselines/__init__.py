"""Methods that CORAL is compared with; each ends in probabilities over the same options."""
