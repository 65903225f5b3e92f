"""The lens: a small probe of hidden states that corrects a model's probabilities. Fitting, applying, saving it."""
