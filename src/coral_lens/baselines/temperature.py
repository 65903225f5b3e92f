"""The two controls that stand in every table: the model as it is, and its probabilities scaled by one temperature."""

from __future__ import annotations

from coral_lens.fitting import temperature_on
from coral_lens.jobs import Job, Method, Predict, QuestionSet, no_options
from coral_lens.joined import predictions_of
from coral_lens.records import Predictions
from coral_lens.steering import base_probs
from coral_lens.temperature import apply_temperature


def fit_nothing(job: Job, _: None) -> Predict:
    """Leave the model as it is: the row that papers call few-shot."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        return {"": predictions_of("base", test.states, base_probs(test.states.table, job.common.base))}

    return predict


def fit_temperature(job: Job, _: None) -> Predict:
    """Scale the base probabilities by one temperature, fitted on the validation questions."""
    data = job.data
    temperature = temperature_on(data.p, data.table.offsets, data.table.answers, data.covered)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_temperature(base_probs(table, job.common.base), table.offsets, temperature=temperature)
        return {"": predictions_of("temperature", test.states, probs)}

    return predict


BASE = Method(no_options, fit_nothing)
TEMPERATURE = Method(no_options, fit_temperature)
