"""Anyone's probabilities: read them from tables and logs, measure them, calibrate them, and say when to trust them. No model."""
