"""The lm-eval plugin: the model `coral`, metrics of calibration, data from our sources, and lm-eval's logs as predictions.

`command` is `coral lm-eval`; `model` is lm-eval's model class, which reads `requests` and has them scored by `scoring`;
`metrics` and `data` change lm-eval's tasks while a run lasts; `logs` reads what lm-eval wrote.
"""
