"""A log that Inspect wrote gives the probabilities that its model said, in both formats; `logs/inspect.eval` is Inspect's own."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral_lens.audit.inspect_logs import HEADER, content_of, is_inspect_log, letter_probs, read_inspect
from coral_lens.errors import CoralError
from coral_lens.metrics.scores import score

LOG = Path(__file__).parent / "logs" / "inspect.eval"
Sample = dict[str, Any]


def as_document() -> dict[str, Any]:
    """The same log as one document, as Inspect writes it with --log-format json."""
    with zipfile.ZipFile(LOG) as archive:
        parts = {part.filename: json.loads(content_of(archive, part)) for part in archive.infolist()}
    samples = [part for name, part in parts.items() if name.startswith("samples/")]
    return {**parts[HEADER[0]], "samples": samples}


def written(folder: Path, document: Any) -> Path:
    path = folder / "log.json"
    path.write_text(json.dumps(document), "utf-8")
    return path


def test_a_log_of_inspect_has_inspects_own_accuracy() -> None:
    found = read_inspect(LOG)
    (said,) = found.systems.values()
    (inspects,) = [
        m["value"] for s in as_document()["results"]["scores"] for n, m in s["metrics"].items() if n == "accuracy"
    ]
    assert (found.name, list(found.systems)) == ("sums", ["mockllm/model"])
    assert len(found.questions) == 12
    assert score(said, "accuracy") == pytest.approx(inspects)
    assert found.questions[0].text == "What is 0 + 0?"
    assert found.questions[0].options == ("1", "0", "2", "3")
    assert found.questions[0].id == "sums/q0"
    assert set(found.column("topic")) == {"even", "odd"}


def test_probabilities_are_those_of_the_logged_letters() -> None:
    (said,) = read_inspect(LOG).systems.values()
    samples = {s["id"]: s for s in as_document()["samples"]}
    last = samples["q1"]["output"]["choices"][0]["logprobs"]["content"][-1]
    mass = {t["token"].strip(): math.exp(t["logprob"]) for t in last["top_logprobs"]}
    expected = np.array([mass[letter] for letter in "ABCD"]) / sum(mass.values())
    assert said.probs[said.options.of(said.ids.index("sums/q1"))] == pytest.approx(expected)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, as_document())
    assert is_inspect_log(path)
    one, other = read_inspect(LOG), read_inspect(path)
    assert one.questions == other.questions
    assert [p.probs.tolist() for p in one.systems.values()] == [p.probs.tolist() for p in other.systems.values()]


def token(text: str, prob: float, **tops: float) -> dict[str, Any]:
    top = [{"token": t, "logprob": math.log(p)} for t, p in tops.items()]
    return {"token": text, "logprob": math.log(prob), "top_logprobs": top}


def sample(*tokens: dict[str, Any], n: int = 3) -> Sample:
    return {
        "id": "s",
        "choices": list("xyz")[:n],
        "target": "B",
        "output": {"choices": [{"logprobs": {"content": list(tokens)}}]},
    }


def test_a_letter_that_was_not_logged_counts_as_the_least_likely_token() -> None:
    # B has both its spellings; C was not among the top tokens, of which the least likely has 0.05
    found = letter_probs(sample(token(" B", 0.5, **{" B": 0.5, "B": 0.2, "A": 0.2, "The": 0.05})), 3)
    assert found == pytest.approx(np.array([0.2, 0.7, 0.05]) / 0.95)


def test_the_last_letter_counts_and_words_are_none() -> None:
    reasoned = sample(
        token("A", 0.9, B=0.1), token("Because", 0.9, A=0.1), token("C", 0.6, A=0.3, B=0.1), token(".", 0.9)
    )
    assert letter_probs(reasoned, 3) == pytest.approx([0.3, 0.1, 0.6])
    assert letter_probs(sample(token("Because", 0.9, A=0.1)), 3) is None
    assert letter_probs(sample({"token": "A", "logprob": -0.1}), 3) is None


def test_options_that_the_solver_shuffled_are_refused(tmp_path: Path) -> None:
    """Inspect then scores the letter that the model would have said, while the log keeps the one that it said."""
    document = as_document()
    for one in document["samples"]:
        one["scores"]["choice"]["answer"] = {"A": "B", "B": "C", "C": "D", "D": "A"}[one["scores"]["choice"]["answer"]]
    with pytest.raises(CoralError, match=r"in 12 of 12 samples .*shuffle_choices"):
        read_inspect(written(tmp_path, document))


def test_a_few_letters_that_were_scored_otherwise_are_left_out(tmp_path: Path) -> None:
    document = as_document()
    scored = document["samples"][0]["scores"]["choice"]
    scored["answer"] = "A" if scored["answer"] != "A" else "B"
    assert len(read_inspect(written(tmp_path, document)).questions) == 11


def test_a_stated_confidence_is_audited_where_there_are_no_tokens(tmp_path: Path) -> None:
    document = as_document()
    for i, one in enumerate(document["samples"]):
        one["output"] = {"choices": []}
        one["scores"]["choice"] |= {"value": "C" if i < 9 else "I", "metadata": {"confidence": 0.8}}
    found = read_inspect(written(tmp_path, document))
    (said,) = found.systems.values()
    assert found.top_only
    assert score(said, "accuracy") == 9 / 12
    assert score(said, "ece") == pytest.approx(0.05)


def test_a_score_between_right_and_wrong_says_neither(tmp_path: Path) -> None:
    document = as_document()
    values = [0.2, math.nan, 1, 1.0, True, 0, 0.0, False, "C", "P", 0.5, 1]
    for one, value in zip(document["samples"], values, strict=True):
        one["output"] = {"choices": []}
        one["scores"]["choice"] |= {"value": value, "metadata": {"confidence": 0.8}}
    (said,) = read_inspect(written(tmp_path, document)).systems.values()
    assert len(said) == 9
    assert score(said, "accuracy") == 5 / 9


def test_epochs_are_answers_to_one_question(tmp_path: Path) -> None:
    document = as_document()
    document["samples"] += [{**one, "epoch": 2} for one in document["samples"]]
    found = read_inspect(written(tmp_path, document))
    assert len(found.questions) == 24
    assert len({q.group for q in found.questions}) == 12


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"samples": None}, "one without samples"),
        ({"samples": []}, "no sample with probabilities.*top_logprobs=20"),
        ({"samples": [{"id": 1, "choices": ["a", "b"], "target": "A"}]}, "no sample with probabilities"),
    ],
)
def test_a_log_without_probabilities_says_how_to_get_them(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CoralError, match=complaint):
        read_inspect(written(tmp_path, as_document() | change))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, LOG.stat().st_size - 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_log_is_one_sentence_or_still_readable(tmp_path: Path, place: int, value: int, cut: bool) -> None:
    data = bytearray(LOG.read_bytes())
    data[place] = value
    (tmp_path / "a.eval").write_bytes(bytes(data[:place] if cut else data))
    try:
        read_inspect(tmp_path / "a.eval")
    except CoralError as error:
        assert "a.eval" in str(error)  # noqa: PT017
