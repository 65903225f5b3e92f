"""The lm-eval plugin: the model `coral`, metrics of calibration, and lm-eval's logs as predictions."""
