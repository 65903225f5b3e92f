"""HTML pages that load nothing from outside: of a run, of two runs side by side, of a study and of features.

`templates` fills in the HTML files beside it; `glance`, `examples`, `explorer` and `contents` make parts of a page.
"""
