"""SteerConf (the paper's B.3): verbalised confidence under steering prompts."""
