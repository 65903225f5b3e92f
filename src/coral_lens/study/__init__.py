"""A whole study, from a TOML file to runs and a report; and the one road from questions to a run."""
