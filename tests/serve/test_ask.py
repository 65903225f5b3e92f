"""`POST /v1/ask` answers what `lens.ask` does; a lens of the other kind, and each mistake, is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import Running, Shop, running

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.engine.settings import Sampling
from coral_lens.lens.asking import fit_open
from coral_lens.lens.settings import FitSettings
from coral_lens.serve.ask import MOST_WAITING
from coral_lens.serve.lenses import open_lenses

pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")


@pytest.fixture(scope="module")
def asker(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a lens for open questions, and of one for questions with options."""
    folder: Path = tmp_path_factory.mktemp("open")
    questions = [OpenQuestion(f"q{i}", f"Toy {i}?", ("x",)) for i in range(40)]
    sampling = Sampling(candidates=8, temperature=1.0, max_tokens=64, examples=0)
    fit_open(shop.model, questions, FitSettings(layers=(1,)), sampling=sampling, bar=False).save(folder / "open")
    with running(shop.model, open_lenses([str(folder / "open"), f"first={shop.folder / 'first'}"])) as server:
        yield server


def test_questions_get_what_the_lens_answers_in_their_order(asker: Running, shop: Shop) -> None:
    lens = asker.service.lenses.find("open")
    asked = ["Who?", "Which one?", "Why?", "When was it?"]
    wanted = {a.id: a for a in lens.lens.ask(shop.model, asked)}
    assert len(wanted) >= 2
    with asker.client() as client:
        found = client.post("/v1/ask", json={"lens": "open", "questions": asked}).json()
    assert (found["lens"], found["digest"]) == ("open", lens.digest)
    assert [a["id"] for a in found["answers"]] == ["1", "2", "3", "4"]
    for given in found["answers"]:
        if given["id"] not in wanted:
            assert "wrote no answer" in given["refusal"]
            continue
        answer = wanted[given["id"]]
        assert (given["answer"], given["refusal"]) == (answer.answer, None)
        assert given["confidence"] == pytest.approx(answer.confidence, abs=1e-4)
        assert [(c["text"], c["count"]) for c in given["candidates"]] == list(
            zip(answer.candidates, answer.counts, strict=True)
        )
        assert sum(c["probability"] for c in given["candidates"]) + given["none"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("route", "body", "status", "sentence"),
    [
        ("ask", {"lens": "first", "questions": "Who?"}, 422, "fitted on questions with options"),
        ("ask", {"lens": "open", "questions": " "}, 422, "is empty"),
        ("ask", {"lens": "open", "questions": []}, 422, "questions"),
        ("ask", {"lens": "open", "questions": [{"question": "Who?", "options": ["a", "b"]}]}, 422, "options"),
        (
            "ask",
            {"lens": "open", "questions": [{"question": "A?", "id": 1}, {"question": "B?", "id": 1}]},
            422,
            "same id",
        ),
        ("ask", {"lens": "open", "questions": ["Who?"] * 2000}, 413, "2000 questions"),
        ("ask", {"lens": "other", "questions": "Who?"}, 404, "no lens of that name"),
        (
            "predict",
            {"lens": "open", "questions": {"question": "A?", "options": ["a", "b"]}},
            422,
            "fitted on open questions",
        ),
    ],
)
def test_each_mistake_is_one_sentence(
    asker: Running, route: str, body: dict[str, object], status: int, sentence: str
) -> None:
    with asker.client() as client:
        reply = client.post(f"/v1/{route}", json=body)
    assert reply.status_code == status
    assert sentence in reply.text


def test_who_comes_when_too_many_wait_is_asked_to_come_again(asker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral_lens.serve.ask.MOST_WAITING", 0)
    with asker.client() as client:
        reply = client.post("/v1/ask", json={"lens": "open", "questions": "Who?"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "5"
    assert MOST_WAITING > 0
