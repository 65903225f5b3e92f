"""From a run to tables, figures and one self-contained page: see `tables`, `figures`, `curves` and `page`."""
