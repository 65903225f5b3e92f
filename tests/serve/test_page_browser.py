"""A person's path through the pages, in a real browser: wide and narrow, light and dark, by mouse and by keyboard."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from faults.pages import ask_hostile, hostile_lenses, hostile_text, listening
from playwright.sync_api import expect
from support.browsers import browser
from support.questions import toy_questions
from support.servers import PATIENCE, Running, Shop, running

from coral_lens.lens.calibrate import calibrate
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.serve.lenses import open_lenses
from coral_lens.serve.settings import Address, ServeSettings
from coral_lens.storage.escape import for_csv

expect.set_options(timeout=1000 * PATIENCE)
TOYS = ("Who?", "Which one?", "Why?", "When was it?")
"""To some of them the tiny model writes something."""


@pytest.fixture(scope="module")
def pages(shop: Shop) -> Iterator[Running]:
    """A server whose lens has everything that a page shows: layers, sets and a rule when to abstain."""
    whole = fit(shop.model, toy_questions(60), FitSettings(lens="listwise"), bar=False)
    whole = calibrate(whole, shop.model, toy_questions(160)[60:], Guarantees(coverage=0.9, risk=0.4))
    whole.save(shop.folder / "whole")
    with running(shop.model, open_lenses([str(shop.folder / "whole"), str(shop.folder / "first")])) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture
def visit(chromium: Any, pages: Running) -> Any:
    """Returns a page that is open; whatever it says on its console is an error of ours."""
    said: list[str] = []

    def opened(path: str = "/", *, width: int = 1280, scheme: str = "light", server: Running = pages) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda message: said.append(message.text) if "401" not in message.text else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not is_own(request.url, server) else None)
        page.goto(f"{server.address}{path}")
        return page

    yield opened
    assert said == []


def is_own(url: str, server: Running) -> bool:
    return url.startswith((f"{server.address}/", "blob:"))


def violations(page: Any) -> list[str]:
    """What axe finds that people who do not see a page, or use no mouse, would stumble over."""
    from axe_core_python.sync_playwright import Axe

    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in Axe().run(page)["violations"]]


def as_shown(text: str) -> str:
    """White space as a page shows it: a random model writes carriage returns, for which a browser has one space."""
    return " ".join(text.split())


def answered(page: Any) -> str:
    page.wait_for_selector("#result:not(.waiting) #verdict .said")
    return page.inner_text("#verdict")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_every_kind_of_question_is_answered_and_nobody_is_shut_out(visit: Any, width: int, scheme: str) -> None:
    page = visit(width=width, scheme=scheme)
    assert "sure" in answered(page)  # the first example is asked by itself
    assert page.locator("#bars .option").count() == 4
    assert violations(page) == []
    for kind, sign in (("decision", "#bars .option"), ("yes-no", ".scale svg"), ("score", ".scale svg")):
        page.click(f"#tab-{kind}")
        page.click("#examples button >> nth=0")
        assert "sure" in answered(page)
        assert page.locator(sign).first.is_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "nothing sticks out"


def test_what_is_shown_is_what_the_route_says(visit: Any, pages: Running) -> None:
    asked = {"question": "Which is a colour?", "options": ["red", "seven", "a door"], "context": "Read this."}
    with pages.client() as client:
        reply = client.post("/v1/predict", json={"lens": "whole", "questions": asked, "layers": True}).json()
    answer = reply["answers"][0]
    page = visit()
    answered(page)
    page.fill("#state", asked["context"])
    page.fill("#question", asked["question"])
    page.fill("#options li:nth-child(1) .text", "red")
    page.fill("#options li:nth-child(2) .text", "seven")
    page.fill("#options li:nth-child(3) .text", "a door")
    page.click("#options li:nth-child(4) .remove")
    expect(page.locator("#bars .option")).to_have_count(3)
    assert answered(page).startswith(answer["option"])
    shown = page.locator("#bars .percent").all_inner_texts()
    both = [p for pair in zip(answer["base_probs"], answer["probs"], strict=True) for p in pair]
    assert [int(re.findall(r"\d+", text)[0]) for text in shown] == [round(100 * p) for p in both]
    assert page.locator(".badge").inner_text() == ("Would abstain" if answer["abstain"] else "Sure enough to answer")
    marks = page.locator("#bars .option .in-set-mark").count()
    assert marks == len(answer["options_in_set"])
    assert page.locator(".heat tbody tr").count() == 3
    assert page.locator(".heat tbody tr:first-child td").count() == len(answer["layers"])
    for words in ('"question": "Which is a colour?"', "client.decisions.create", "client.system_one", "lens.predict"):
        assert words in page.inner_text("#code")
        page.focus("#copy-tabs [aria-selected=true]")
        page.keyboard.press("ArrowRight")
    page.select_option("#lens", "first")
    expect(page.locator("#code")).to_contain_text("first")


def test_the_keyboard_is_enough_and_mistakes_are_said_beside_their_field(visit: Any) -> None:
    page = visit()
    answered(page)
    page.focus("#tab-question")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-decision"
    page.focus("#question")
    page.keyboard.press("Control+Enter")
    assert page.inner_text("#question-error") == "Type what is asked."
    assert page.inner_text("#options-error") == "Give at least two."
    assert violations(page) == []
    page.keyboard.type("Which team?")
    page.focus("#options li:nth-child(1) .text")
    page.keyboard.type("billing")
    page.keyboard.press("Enter")
    page.keyboard.type("billing")
    page.keyboard.press("Control+Enter")
    assert "stands there twice" in page.inner_text("#options-error")
    page.keyboard.type(" and more")
    page.keyboard.press("Enter")  # a third option
    page.keyboard.type("support")
    page.keyboard.press("Control+Enter")
    assert "sure" in answered(page)
    assert page.locator("#bars .option").count() == 3
    page.keyboard.press("Control+A")
    page.keyboard.press("Backspace")
    page.keyboard.press("Backspace")  # an empty option is taken away
    expect(page.locator("#options li")).to_have_count(2)


def test_a_question_that_is_refused_is_one_sentence_and_the_page_lives(visit: Any) -> None:
    page = visit()
    answered(page)
    page.fill("#question", "very long " * 300)
    expect(page.locator("#failure")).to_contain_text("longer than")
    page.fill("#question", "short?")
    answered(page)
    expect(page.locator("#failure")).to_be_empty()


def test_a_pasted_table_becomes_a_table_of_answers_to_download(visit: Any, tmp_path: Any) -> None:
    page = visit()
    answered(page)
    page.click("#tab-table")
    rows = [["id", "question", "option_a", "option_b", "option_c", "answer"]]
    rows += [
        [f"q{i}", f'Is "{i}", as it were, even?', "yes; it is", "no", "" if i % 2 else "perhaps", "A"]
        for i in range(45)
    ]
    rows += [["bad", "Too few?", "one", "", "", ""]]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    page.fill("#table", text.getvalue())
    page.click("#go")
    expect(page.locator("#rows-table tbody tr")).to_have_count(45)
    expect(page.locator("#rows-words")).to_contain_text("45 of 45 answered.")
    assert "Row 47: it has fewer than two options." in page.inner_text("#rows-words")
    assert violations(page) == []
    with page.expect_download() as waiting:
        page.click("#download")
    waiting.value.save_as(tmp_path / "answers.csv")
    with open(tmp_path / "answers.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == [f"q{i}" for i in range(45)]
    assert found[0]["question"] == 'Is "0", as it were, even?'
    for row, n in zip(found, [3, 2] * 22, strict=False):
        probs = [float(row[f"coral_p_{letter}"]) for letter in "abc"[:n]]
        assert sum(probs) == pytest.approx(1)
        assert row["coral_answer"] == [row["option_a"], row["option_b"], row["option_c"]][probs.index(max(probs))]
    page.fill("#table", "a,b\n1,2")
    page.click("#go")
    assert "No column is called “question”" in page.inner_text("#table-error")


def test_a_server_with_a_key_asks_for_it(visit: Any, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_KEY", "secret")
    settings = ServeSettings(address=Address(port=0, api_key_env="PAGE_KEY"))
    with running(shop.model, shop.lenses, settings) as server:
        page = visit(server=server)
        expect(page.locator("#key-error")).to_contain_text("wants a key")
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        expect(page.locator("#key-error")).to_contain_text("not the right one")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        assert "sure" in answered(page)
        page.context.close()


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_an_open_question_is_answered_with_what_the_model_wrote(
    visit: Any, asker: Running, width: int, scheme: str
) -> None:
    with asker.client() as client:
        replies = {q: client.post("/v1/ask", json={"lens": "open", "questions": q}).json()["answers"][0] for q in TOYS}
    question, answer = next((q, a) for q, a in replies.items() if not a["refusal"])
    page = visit(server=asker, width=width, scheme=scheme)
    answered(page)
    assert page.locator("#lens option").all_inner_texts() == ["first"]
    page.focus("#tab-score")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-open"
    assert page.locator("#lens option").all_inner_texts() == ["open"]
    page.click("#go")
    assert page.inner_text("#question-error") == "Type what is asked."
    page.fill("#question", question)
    page.keyboard.press("Control+Enter")
    assert as_shown(answered(page)).startswith(as_shown(answer["answer"]))
    labels = [as_shown(text) for text in page.locator("#bars .label").all_inner_texts()]
    assert labels == [*(as_shown(c["text"]) for c in answer["candidates"]), "none of these"]
    shown = page.locator("#bars .percent.after").all_inner_texts()
    wanted = [*(c["probability"] for c in answer["candidates"]), answer["none"]]
    assert [int(re.findall(r"\d+", text)[0]) for text in shown] == [min(99, max(1, round(100 * p))) for p in wanted]
    assert f"{answer['candidates'][0]['count']} of {answer['written']} times" in page.inner_text("#verdict")
    expect(page.locator("#copy-openai")).to_be_hidden()
    assert "/v1/ask" in page.inner_text("#code")
    page.focus("#copy-curl")
    page.keyboard.press("ArrowRight")
    assert "lens.ask(model" in page.inner_text("#code")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "nothing sticks out"
    page.click("#tab-question")
    expect(page.locator("#lens option")).to_have_text(["first"])


def test_where_no_lens_for_open_questions_is_served_it_is_said_how_to_get_one(visit: Any) -> None:
    page = visit()
    answered(page)
    page.click("#tab-open")
    expect(page.locator("#no-lens")).to_contain_text("coral fit --open FILE --out open-lens")
    expect(page.locator("#go")).to_be_hidden()
    assert violations(page) == []
    page.click("#tab-question")
    assert "sure" in answered(page)


def test_a_table_to_download_holds_no_formula_of_those_who_asked(visit: Any, tmp_path: Any) -> None:
    """The same cells get an apostrophe as in the files that commands write."""
    cells = ["=1+1", " =1+1", "-1+1", "+cmd", "@a", "-1.5e3", "+2", ".5", "- a list", "\ttab", "plain"]
    page = visit()
    answered(page)
    page.click("#tab-table")
    text = io.StringIO()
    rows = [[cell, "Which?", "=A1", "two"] for cell in cells]
    csv.writer(text).writerows([["note", "question", "option_a", "option_b"], *rows])
    page.fill("#table", text.getvalue())
    page.click("#go")
    expect(page.locator("#rows-words")).to_contain_text(f"{len(cells)} of {len(cells)} answered.")
    with page.expect_download() as waiting:
        page.click("#download")
    waiting.value.save_as(tmp_path / "answers.csv")
    with open(tmp_path / "answers.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["note"] for row in found] == [for_csv(cell) for cell in cells]
    assert {row["option_a"] for row in found} == {"'=A1"}
    assert {row["coral_answer"] for row in found} <= {"'=A1", "two"}


def test_the_routes_are_described_to_who_has_the_key(visit: Any, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_KEY", "secret")
    settings = ServeSettings(address=Address(port=0, api_key_env="PAGE_KEY"))
    with running(shop.model, shop.lenses, settings) as server:
        page = visit("/docs", server=server)
        expect(page.locator("#key-error")).to_contain_text("wants a key")
        assert violations(page) == []
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_contain_text("not the right one")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#PredictRequest")
        page.click("[aria-label='Look at /v1/models']")
        expect(page.locator("#docs pre >> visible=true")).to_contain_text('"id": "first"')
        assert violations(page) == []
        page.context.close()


def test_hostile_text_in_every_field_stays_text(visit: Any, shop: Shop) -> None:
    with listening() as (url, asked), running(shop.model, hostile_lenses(shop.lenses, hostile_text(url))) as server:
        page = visit(server=server)
        assert ask_hostile(page, hostile_text(url)) == []
        assert "{{ 7 * 7 }}" in page.inner_text("#about"), "of the model and the tasks the last part of a path is shown"
        page.context.close()
        assert asked == []


def test_the_routes_are_described_without_anything_from_elsewhere(visit: Any) -> None:
    page = visit("/docs")
    page.wait_for_selector("#PredictRequest")
    assert "/v1/decisions" in page.inner_text("#docs")
    assert "May be left out where one lens is served." in page.inner_text("#PredictRequest")
    assert violations(page) == []
