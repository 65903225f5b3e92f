"""Many machines on one piece of work, by Ray: a driver hands out pieces and keeps the journal, workers compute."""
