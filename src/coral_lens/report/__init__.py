"""From a run to tables, figures and self-contained pages. Needs predictions and their metrics alone.

`runs` is a run's folder; `confidence` has the numbers about confidence, `findings` tables with figures as files; `tables/`
computes and writes tables, `figures/` draws, `pages/` puts both into HTML.
"""
