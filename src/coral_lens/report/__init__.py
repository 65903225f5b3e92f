"""From a run to tables, figures and self-contained pages. Needs predictions and their metrics alone.

`runs` is a run's folder; `names` has what people call tasks and methods; `confidence` has the numbers about confidence,
`findings` tables with figures as files; `tables/` computes and writes tables, `figures/` draws. `headline` says in sentences
what was found; `terminal` prints it, and `pages/` puts everything into HTML.
"""
