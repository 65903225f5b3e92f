"""Sparse autoencoders of a model's states (the paper's section 5): train, judge, select features, ablate them, steer by them."""
