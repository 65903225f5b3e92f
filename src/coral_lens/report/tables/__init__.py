"""Tables: numbers first (`run`, `study`, `pairing`, `paper`), then their texts (`formats`, `exports`, `study_formats`)."""
