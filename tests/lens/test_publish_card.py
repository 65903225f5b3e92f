"""The card of a lens says what it learned from, under which terms, how good it is, and what was overridden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.planted import PlantedStore

from coral_lens.data.settings import Style
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.publish import card
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.tempering import Tempering


@pytest.fixture(scope="module")
def lens() -> Lens:
    store = PlantedStore(40, signal={1: 2.0}, tasks={"arc_easy": 1.0, "mine": 1.0})
    store.questions = [replace(q, split="train") if q.task == "arc_easy" else q for q in store.questions]
    return fit_store(store, FitSettings(layers=(1,)))


def card_of(lens: Lens, **changes: Any) -> str:
    return card(replace(lens, **changes))


def front_matter(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_the_front_matter_is_yaml(lens: Lens) -> None:
    assert front_matter(card_of(lens)) == {
        "library_name": "coral-lens",
        "tags": ["calibration", "multiple-choice", "interpretability"],
        "base_model": "planted",
    }


@pytest.mark.parametrize(
    "name", ["org/model-1B", "my models: the #2", "@odd", "- dash", "yes", "1.0", 'quo"te', "ünï", "C:\\models\\mine"]
)
def test_any_name_of_a_model_comes_back_from_the_front_matter(lens: Lens, name: str) -> None:
    assert front_matter(card_of(lens, model={**lens.model, "name": name}))["base_model"] == name


def test_each_source_of_questions_has_its_number_and_terms(lens: Lens) -> None:
    text = card_of(lens)
    assert "| arc_easy:train | 40 | CC BY-SA 4.0 |" in text
    assert "| mine | 40 | not known |" in text
    assert "Fitted on 64 questions, chosen on 16 others." in text


def test_every_score_has_its_interval(lens: Lens) -> None:
    text = card_of(lens)
    for method in ("base", "temperature", "listwise", "listwise tempered"):
        accuracy = lens.trace.validation[method]["accuracy"]
        low, high = 100 * accuracy.low, 100 * accuracy.high
        assert accuracy.low <= accuracy.value <= accuracy.high
        assert f"| {method} | {100 * accuracy.value:.1f} ({low:.1f} to {high:.1f}) |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert {line.count("|") for line in rows} == {4, 6}  # two tables, and no cell is lost


def test_overrides_are_shown_only_where_there_are_any(lens: Lens) -> None:
    assert "Overridden" not in card_of(lens)
    text = card_of(lens, training=replace(lens.training, overrides=("fitted on a, used on b", "and again")))
    assert "- **Overridden**: fitted on a, used on b\n- **Overridden**: and again\n\n| training data" in text


def test_a_local_model_is_named_without_its_path(lens: Lens) -> None:
    shown = {"org/model": "org/model", "smollm2": "smollm2", "/home/me/org/tiny": "tiny", "~/tiny": "tiny", "./tiny": "tiny",
             "models/tiny.gguf": "tiny.gguf", "my/own/models/tiny": "tiny"}  # fmt: skip
    for name, public in shown.items():
        text = card_of(lens, model={**lens.model, "name": name})
        assert f"# A CORAL lens for {public}\n" in text
        assert f'base_model: "{public}"' in text
    note = "fitted on /home/me/a, used on /home/me/b in spite of other weights"
    text = card_of(lens, training=replace(lens.training, overrides=(note,)))
    assert "fitted on a, used on b in spite of other weights" in text


def test_prompts_and_temperatures_are_said_in_words(lens: Lens) -> None:
    text = card_of(lens, style=Style("letters", chat=True), base_temperature=1.5, steered_temperature=0.8)
    assert "Prompts: `letters+chat`." in text
    assert "`token` score, scaled by temperature 1.5; the result is scaled by 0.8." in text
    assert "scaled by" not in card_of(lens)
    assert "Prompts: `text`." in card_of(lens)


def test_it_says_whether_the_lens_weakens_itself_afar(lens: Lens) -> None:
    assert lens.trust is not None
    assert "It goes back to the model's own answers there by itself." in card_of(lens)
    doubted = card_of(lens, trust=replace(lens.trust, elsewhere=0.37, temperature=1.4))
    assert "a weight of 0.37 and less sure of itself by a temperature of 1.4" in doubted
    assert "It does not weaken them there by itself." in card_of(lens, trust=None)
    assert "It weakens them there by itself." in card_of(lens, trust=None, tempering=Tempering(0.0, 0.0, 0.0, -1.0))


def test_folds_are_not_called_other_questions(lens: Lens) -> None:
    text = card_of(lens, training=replace(lens.training, n_train=80, n_validation=80))
    assert "Fitted on 80 questions, chosen by folds on 80, each predicted by a fit that had not seen it." in text


def test_inputs_beyond_the_states_are_named(lens: Lens) -> None:
    assert "Inputs of the probe: pooled states, centred." in card_of(lens)
    assert "Inputs of the probe: pooled states." in card_of(lens, correction=replace(lens.correction, inputs=()))


def test_a_saved_lens_has_its_card(lens: Lens, tmp_path: Path) -> None:
    lens.save(tmp_path / "lens")
    assert (tmp_path / "lens" / "README.md").read_text("utf-8") == card_of(lens)
