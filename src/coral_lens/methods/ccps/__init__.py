"""CCPS (the paper's B.2): confidence from how stable a model's answer is under perturbation."""
