"""Questions: from files and from lm-eval tasks, their splits, and the guard against leaks between them."""
