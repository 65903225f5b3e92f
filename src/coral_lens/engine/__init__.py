"""Questions in, log-probabilities and hidden states out: the one scoring path that every method uses."""
