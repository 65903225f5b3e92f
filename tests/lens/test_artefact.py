"""A lens on the disk is the lens that was fitted, bit for bit, and it works with its own model only."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import make_llama, make_model, make_tokenizer, rewrapped
from support.planted import PlantedStore, one_network
from support.questions import toy_questions

from coral_lens.data.leaks import question_keys
from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import Extraction, extract
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.precision import set_precision
from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.rules import base_probs, steer, tilt
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.shift import ShiftModel
from coral_lens.records import UNKNOWN, Rendered
from coral_lens.storage.files import digest, write_json

TRAINING = 40

METHODS = {
    "ridge": ("base", "temperature", "coral"),
    "listwise": ("base", "temperature", "listwise", "listwise tempered"),
}


@pytest.fixture(scope="module", params=list(METHODS))
def lens(tiny: Model, request: pytest.FixtureRequest) -> Lens:
    """A lens that does something: on a random model, choosing gamma would mostly choose 0."""
    return replace(fit(tiny, toy_questions(TRAINING), FitSettings(lens=request.param, layers=(1, 2))), gamma=1.5)


@pytest.fixture(scope="module")
def saved(lens: Lens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lens") / "mine"
    lens.save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def fresh(tiny: Model, lens: Lens, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The states of questions that the lens has not seen."""
    folder = tmp_path_factory.mktemp("fresh")
    return extract(tiny, toy_questions(12, seed=5), folder, extraction=Extraction(layers=(1, 2), style=lens.style))


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------ on the disk


def test_a_saved_lens_gives_the_same_predictions_to_the_bit(lens: Lens, saved: Path, fresh: ActivationStore) -> None:
    before, after = lens.apply(fresh), load_lens(saved).apply(fresh)
    assert tuple(before) == tuple(after) == METHODS[lens.kind]
    assert all(before[method].tobytes() == after[method].tobytes() for method in METHODS[lens.kind])
    assert not np.allclose(before[lens.plain_method], before["base"])


def test_an_mlp_lens_gives_the_same_predictions_to_the_bit(tiny: Model, fresh: ActivationStore, tmp_path: Path) -> None:
    settings = FitSettings(lens="mlp", layers=(1,), network=one_network())
    fitted = replace(fit(tiny, toy_questions(TRAINING), settings), gamma=2.0)
    fitted.save(tmp_path / "lens")
    again = load_lens(str(tmp_path / "lens"))
    assert again.name == fitted.name == "mlp probe, layer 1, gamma 2"
    assert again.apply(fresh)["coral"].tobytes() == fitted.apply(fresh)["coral"].tobytes()


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"lens": "ridge", "temper": True}, "ridge probe, layer 1, gamma 0.5, tempered by shift"),
        ({"lens": "ensemble"}, "ensemble lens, layers 1, 2, gamma 0.5, tempered by shift"),
        ({"top_layers": 2, "inputs": ("rank",), "temper": False}, "listwise lens, layers 1, 2, gamma 0.5"),
    ],
    ids=str,
)
def test_lenses_of_several_layers_and_inputs_give_the_same_predictions_to_the_bit(
    tiny: Model, fresh: ActivationStore, tmp_path: Path, wanted: dict[str, Any], name: str
) -> None:
    layers = (1,) if wanted.get("lens") == "ridge" else (1, 2)
    fitted = replace(fit(tiny, toy_questions(TRAINING), FitSettings(layers=layers, **wanted)), gamma=0.5)
    fitted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.name == fitted.name == name
    before, after = fitted.apply(fresh), again.apply(fresh)
    assert {method: p.tobytes() for method, p in before.items()} == {m: p.tobytes() for m, p in after.items()}


def test_a_saved_lens_keeps_all_it_knows(lens: Lens, saved: Path, fresh: ActivationStore) -> None:
    again = load_lens(saved)
    assert json.loads(json.dumps(again.record())) == json.loads(json.dumps(lens.record()))
    assert again.seen.tolist() == lens.seen.tolist()
    assert again.style == lens.style
    assert again.control_temperature == lens.control_temperature
    assert again.tempering == lens.tempering
    assert (again.tempering is None) == (lens.correction.rule == "residual")
    assert again.shifts(fresh).tobytes() == lens.shifts(fresh).tobytes()


def test_saving_again_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    load_lens(saved).save(tmp_path / "again")
    assert content(tmp_path / "again") == content(saved)


def test_the_folder_holds_json_safetensors_and_a_card_and_nothing_else(saved: Path, lens: Lens) -> None:
    assert sorted(content(saved)) == ["README.md", "layers.safetensors", "lens.json", "lens.safetensors"]
    header = (saved / "lens.safetensors").read_bytes()[8:9]
    assert header == b"{"  # safetensors, not a pickle
    card = (saved / "README.md").read_text("utf-8")
    assert lens.name in card
    assert "tiny-llama" in card
    assert "| questions | 40 | not known |" in card
    for method, kept in lens.trace.validation.items():
        brier = kept["brier"]
        shown = f"{100 * brier.value:.1f} ({100 * brier.low:.1f} to {100 * brier.high:.1f})"
        assert any(line.startswith(f"| {method} |") and shown in line for line in card.splitlines())
    assert ("It weakens them there by itself" in card) == (lens.tempering is not None)


def test_an_older_lens_is_replaced_and_all_else_in_its_folder_stays(lens: Lens, copy: Path) -> None:
    (copy / "notes.txt").write_text("x")
    (copy / ".git").mkdir()
    replace(lens, gamma=0.25).save(copy)
    assert load_lens(copy).gamma == 0.25
    assert "gamma 0.25" in (copy / "README.md").read_text("utf-8")
    names = [".git", "README.md", "layers.safetensors", "lens.json", "lens.safetensors", "notes.txt"]
    assert sorted(p.name for p in copy.iterdir()) == names


def test_a_card_that_somebody_has_edited_is_kept_with_a_word(lens: Lens, copy: Path) -> None:
    (copy / "README.md").write_text("mine", "utf-8")
    for gamma in (0.25, 0.5):
        with pytest.warns(UserWarning, match="README.md was edited, so it is kept"):
            replace(lens, gamma=gamma).save(copy)
    assert load_lens(copy).gamma == 0.5
    assert (copy / "README.md").read_text("utf-8") == "mine"


def test_a_card_that_is_a_link_is_neither_followed_nor_replaced(lens: Lens, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("mine", "utf-8")
    (copy / "README.md").unlink()
    (copy / "README.md").symlink_to(tmp_path / "diary")
    with pytest.warns(UserWarning, match="is kept"):
        replace(lens, gamma=0.25).save(copy)
    assert (copy / "README.md").is_symlink()
    assert (tmp_path / "diary").read_text("utf-8") == "mine"


@pytest.mark.parametrize("n_renames", range(8))
def test_a_lens_is_under_its_name_whenever_a_second_save_is_killed(
    lens: Lens, copy: Path, monkeypatch: pytest.MonkeyPatch, n_renames: int
) -> None:
    other = replace(lens, gamma=0.25, view=None if n_renames % 2 else lens.view)
    real, left = Path.replace, [n_renames]

    def killed(self: Path, target: Path) -> Path:
        if not left[0]:
            raise SystemExit
        left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(Path, "replace", killed)
        other.save(copy)
    assert load_lens(copy).gamma in (lens.gamma, 0.25)
    other.save(copy)
    assert load_lens(copy).gamma == 0.25
    assert "gamma 0.25" in (copy / "README.md").read_text("utf-8")
    expected = {"README.md", "lens.json", "lens.safetensors"} | ({"layers.safetensors"} if other.view else set())
    assert {p.name for p in copy.iterdir()} == expected


def test_a_folder_that_is_not_a_lens_is_never_deleted(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CoralError, match="not a lens"):
        lens.save(tmp_path)
    with pytest.raises(CoralError, match="not a lens"):
        lens.save(tmp_path / "thesis.tex")
    assert content(tmp_path) == {"thesis.tex": b"years of work"}


def test_an_empty_folder_may_become_a_lens(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    lens.save(tmp_path / "empty")
    assert load_lens(tmp_path / "empty").gamma == lens.gamma


def test_a_full_disk_keeps_the_older_lens(lens: Lens, copy: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CoralError, match="no space left"):
        replace(lens, gamma=0.25).save(copy)
    assert content(copy) == content(saved)
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


# ------------------------------------------------------------------------------------------------------------ damaged


def test_a_changed_number_in_the_record_is_refused(copy: Path) -> None:
    record = json.loads((copy / "lens.json").read_text("utf-8"))
    record["gamma"] = 3.0
    (copy / "lens.json").write_text(json.dumps(record))
    with pytest.raises(CoralError, match="damaged"):
        load_lens(copy)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_refused_or_harmless(saved: Path, tmp_path: Path, lens: Lens, data: st.DataObject) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    path = folder / data.draw(st.sampled_from(["lens.json", "lens.safetensors", "layers.safetensors"]))
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    record, complaint = None, ""
    try:
        record = load_lens(folder).record()
    except CoralError as error:
        complaint = str(error)
    assert str(folder) in complaint or json.dumps(record) == json.dumps(load_lens(saved).record())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("lens.json", b'{"a":' * 100_000),
        ("lens.json", b'{"format": ' + b"9" * 5000 + b"}"),
        ("lens.json", b"{}"),
        ("lens.json", b"[1]"),
        ("lens.json", b'{"format": 1}'),
        ("lens.json", b'{"format": 7}'),
        ("lens.json", b'{"format": 2}'),
        ("lens.json", b'{"format": 2, "gamma": NaN, "digest": ""}'),
        ("lens.json", b"\xff\xfe"),
        ("lens.json", None),
        ("lens.safetensors", b""),
        ("lens.safetensors", None),
    ],
)
def test_a_lens_that_cannot_be_read_is_one_sentence_with_its_folder(
    copy: Path, name: str, damage: bytes | None
) -> None:
    if damage is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(damage)
    with pytest.raises(CoralError) as error:
        load_lens(copy)
    assert str(copy) in str(error.value)


def test_a_folder_without_a_lens_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="coral fit --out"):
        load_lens(tmp_path)


# --------------------------------------------------------------------------------------------------------- its model


def test_another_model_is_refused_with_both_fingerprints(lens: Lens, tiny: Model) -> None:
    other = make_model("llama", seed=1)
    with pytest.raises(CoralError, match="weights") as error:
        lens.predict(other, toy_questions(2))
    assert tiny.fingerprint["weights"][:12] in str(error.value)
    assert other.fingerprint["weights"][:12] in str(error.value)


def test_another_tokenizer_is_refused_with_both_fingerprints(lens: Lens, tiny: Model) -> None:
    other = wrap(tiny.hf, make_tokenizer(bos=True), name="with BOS")
    with pytest.raises(CoralError, match="tokenizer") as error:
        lens.predict(other, toy_questions(2))
    assert tiny.fingerprint["tokenizer"][:12] in str(error.value)
    assert other.fingerprint["tokenizer"][:12] in str(error.value)


def with_config(model: Model, **values: object) -> Model:
    """The same weights and tokenizer under another configuration."""
    hf = deepcopy(model.hf)
    config = deepcopy(hf.config)
    for name, value in values.items():
        setattr(config, name, value)
    other = type(hf)(config).eval().requires_grad_(False)
    other.load_state_dict(hf.state_dict())
    return wrap(other, model.tokenizer, name="other config")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_parameters", {"rope_theta": 5.0, "rope_type": "default"}), ("rms_norm_eps", 0.1), ("hidden_act", "relu")],
)
def test_a_model_of_another_configuration_is_refused(lens: Lens, tiny: Model, name: str, value: object) -> None:
    other = with_config(tiny, **{name: value})
    assert other.fingerprint == tiny.fingerprint
    with pytest.raises(CoralError, match=rf"'other config' is another model \({name}.* against "):
        lens.predict(other, toy_questions(2))
    adopted = lens.adopted(other)
    assert len(adopted.predict(other, toy_questions(2))) == 2
    assert "in spite of other config" in adopted.training.overrides[-1]


def test_values_of_a_configuration_that_change_no_pass_do_not_count(lens: Lens, tiny: Model) -> None:
    lens.check(with_config(tiny, attention_dropout=0.3, use_cache=False, eos_token_id=7, initializer_range=1.0))


def test_a_lens_that_does_not_know_the_configuration_says_so(lens: Lens, tiny: Model) -> None:
    old = replace(lens, model={k: v for k, v in lens.model.items() if k != "config"})
    with pytest.warns(UserWarning, match="an earlier version, which did not record the model's configuration"):
        assert len(old.predict(tiny, toy_questions(2))) == 2


def test_the_same_weights_under_another_name_are_accepted(lens: Lens, tiny: Model) -> None:
    assert len(lens.predict(replace(tiny, name="elsewhere"), toy_questions(2))) == 2


def test_questions_rendered_with_a_chat_template_are_refused_by_a_lens_without(lens: Lens, tiny: Model) -> None:
    question = toy_questions(1)[0]
    n = len(question.options)
    rendered = Rendered(("<user>ask",) * n, question.options, question.options, chat=True)
    with pytest.raises(CoralError, match="with the chat template, but the lens was fitted without"):
        lens.predict(tiny, [replace(question, rendered=rendered)])


def test_a_model_that_computes_in_another_arithmetic_is_taken_with_a_warning(lens: Lens, tiny: Model) -> None:
    hf = deepcopy(tiny.hf)
    set_precision(hf, "mixed", [])
    mixed = rewrapped(Model(**{**vars(tiny), "hf": hf, "name": "mixed one"}))
    with pytest.warns(UserWarning, match="fitted on states computed in float32, and 'mixed one' computes in mixed"):
        found = lens.predict(mixed, toy_questions(2))
    assert len(found) == 2


def test_an_override_uses_the_lens_on_another_model_and_is_on_record(lens: Lens, tmp_path: Path) -> None:
    other = make_model("llama", seed=1)
    adopted = lens.adopted(other)
    assert len(adopted.predict(other, toy_questions(2))) == 2
    (note,) = adopted.training.overrides
    assert "fitted on tiny-llama" in note
    assert "other weights" in note
    adopted.save(tmp_path / "lens")
    assert load_lens(tmp_path / "lens").training.overrides == (note,)
    assert f"**Overridden**: {note}" in (tmp_path / "lens" / "README.md").read_text("utf-8")
    assert lens.training.overrides == ()
    assert "overrides" not in lens.record()["training"]


def test_its_own_model_needs_no_override(lens: Lens, tiny: Model) -> None:
    assert lens.adopted(tiny) is lens


def test_no_override_makes_a_model_of_another_width_fit(lens: Lens) -> None:
    wide = make_llama()
    wide.config.hidden_size = 64
    with pytest.raises(CoralError, match=r"of width 32, but 'wide' has 3 layers of width 64"):
        lens.adopted(wrap(wide, make_tokenizer(), name="wide"))


def test_no_override_gives_a_model_a_layer_that_it_has_not(lens: Lens, tiny: Model) -> None:
    other = make_model("llama", seed=1)
    with pytest.raises(CoralError, match="The lens reads layer 4"):
        replace(lens, correction=replace(lens.correction, layers=(4,))).adopted(other)


# --------------------------------------------------------------------------------------------------------- predicting


def test_answers_are_the_steered_probabilities_of_the_equation(lens: Lens, tiny: Model, fresh: ActivationStore) -> None:
    questions = toy_questions(12, seed=5)
    untempered = replace(lens, tempering=None).predict(tiny, questions)
    answers = lens.predict(tiny, questions)
    table = fresh.table
    p = base_probs(table, lens.base)
    states = fresh.layer(lens.layers[0])
    by, probe = lens.correction.standardiser, lens.correction.probe
    if lens.correction.rule == "residual":
        z = (states - by.mean) / by.scale
        steered = steer(p, probe.predict(z), table.options, gamma=lens.gamma)
    else:
        z = (table.options.centre(states) - by.mean) / by.scale
        steered = tilt(lens.correction.base_weight * np.log(p), probe.predict(z), table.options, gamma=lens.gamma)
    shifts, last = lens.shift(states, table.options), lens.apply(fresh)[lens.method]
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        rows = table.options.of(i)
        # alone in the store or with another layer, rows are packed alike and differ by rounding at most
        np.testing.assert_allclose(untempered[i].probs, steered[rows], atol=1e-6)
        np.testing.assert_allclose(answer.probs, last[rows], atol=1e-6)
        np.testing.assert_allclose(answer.base_probs, p[rows], atol=1e-6)
        assert answer.shift == pytest.approx(shifts[i], rel=1e-4)
        assert answer.id == question.id
        assert answer.answer == int(np.argmax(answer.probs))
        assert answer.option == question.options[answer.answer]
        assert answer.confidence == max(answer.probs)
        assert (answer.options_in_set, answer.abstain) == (None, None), "it was not calibrated for them"


@pytest.mark.parametrize("kind", ["ridge", "listwise", "ensemble"])
def test_each_layer_is_read_once_and_the_shift_computed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = fit_store(PlantedStore(60, signal={0: 1.0, 1: 2.0}), FitSettings(lens=kind, temper=kind != "ridge"))
    store = PlantedStore(20, signal={0: 1.0, 1: 2.0}, seed=3)
    layers: list[int] = []
    shifts: list[int] = []
    layer, distances = PlantedStore.layer, ShiftModel.distances
    monkeypatch.setattr(PlantedStore, "layer", lambda self, n: layers.append(n) or layer(self, n))
    monkeypatch.setattr(ShiftModel, "distances", lambda self, at, of=None: shifts.append(1) or distances(self, at, of))
    for call in (lens.answers, lens.apply, lens.predictions_on):
        layers.clear()
        shifts.clear()
        call(store)
        assert sorted(layers) == sorted(lens.layers), call
        assert len(shifts) == 1, call
    assert len(lens.layers) == (3 if kind == "ensemble" else 1)


def test_questions_without_answers_are_answered_like_those_with(lens: Lens, tiny: Model) -> None:
    labelled = toy_questions(6, seed=9)
    unlabelled = [replace(q, answer=UNKNOWN) for q in labelled]
    assert lens.predict(tiny, unlabelled) == lens.predict(tiny, labelled)


def test_a_work_folder_keeps_the_states_and_a_second_call_does_not_run_the_model(
    lens: Lens, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(5, seed=9)
    steps: list[int] = []
    first = lens.predict(tiny, questions, work_dir=tmp_path / "work", progress=steps.append)
    assert sum(steps) == 5

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was run")

    for body in ("plain_body", "tree_body", "prefill"):
        monkeypatch.setattr(Model, body, refuses)
    assert lens.predict(tiny, questions, work_dir=tmp_path / "work") == first


def test_predictions_in_memory_are_those_through_a_folder_to_the_bit(
    lens: Lens, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(20, seed=9)
    kept, kept_answers = (
        lens.predictions(tiny, questions, work_dir=tmp_path / "work"),
        lens.predict(tiny, questions, work_dir=tmp_path / "work"),
    )
    assert list((tmp_path / "work").glob("shard-*"))

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file was written")

    monkeypatch.setattr("coral_lens.storage.files.os.fsync", refuses)
    monkeypatch.setattr("tempfile.mkdtemp", refuses)
    assert lens.predict(tiny, questions) == kept_answers
    found = lens.predictions(tiny, questions)
    assert list(found) == list(kept)
    for method, predictions in found.items():
        assert predictions.probs.tobytes() == kept[method].probs.tobytes()


def test_predictions_of_every_method_are_of_the_same_questions(lens: Lens, tiny: Model) -> None:
    questions = [replace(q, task="toys", split="test") for q in toy_questions(7, seed=9)]
    predictions = lens.predictions(tiny, questions)
    assert tuple(predictions) == METHODS[lens.kind]
    for method, p in predictions.items():
        assert (p.method, p.model, p.task, p.split) == (method, "tiny-llama", "toys", "test")
        assert p.ids == tuple(q.id for q in questions)
        assert p.answers.tolist() == [q.answer for q in questions]


def test_no_questions_are_refused(lens: Lens, tiny: Model) -> None:
    with pytest.raises(CoralError, match="no questions"):
        lens.predict(tiny, [])


def test_the_lens_recognises_the_questions_it_was_fitted_or_chosen_on(lens: Lens) -> None:
    known, unknown = toy_questions(TRAINING), toy_questions(10, seed=5)
    disguised = [
        replace(q, id=f"new {q.id}", text=q.text.upper(), options=q.options[::-1], answer=UNKNOWN) for q in known
    ]
    assert lens.is_seen(known).all()
    assert lens.is_seen(disguised).all()
    assert not lens.is_seen(unknown).any()
    assert lens.is_seen([known[3], unknown[0], known[39]]).tolist() == [True, False, True]
    asked = [replace(q, text=f"Question: {q.text}\nAnswer:") for q in known]
    assert lens.is_seen(asked).all()


def test_a_lens_with_keys_of_the_first_version_still_recognises_its_questions(lens: Lens, tmp_path: Path) -> None:
    known = toy_questions(TRAINING)
    replace(lens, seen=np.unique(question_keys(known, version=1)), keys=1).save(tmp_path / "lens")
    record = json.loads((tmp_path / "lens/lens.json").read_text("utf-8"))
    del record["keys"], record["digest"]  # as it was written then
    write_json(tmp_path / "lens/lens.json", record | {"digest": digest(record)})
    old = load_lens(tmp_path / "lens")
    assert old.is_seen(known).all()
    assert not old.is_seen(toy_questions(10, seed=5)).any()


def test_the_style_of_the_questions_is_part_of_the_lens(tiny: Model, tmp_path: Path) -> None:
    fitted = fit(tiny, toy_questions(20), FitSettings(style=Style("letters"), layers=(1,)))
    fitted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.style == Style("letters")
    again.predict(tiny, toy_questions(3, seed=9), work_dir=tmp_path / "work")
    assert ActivationStore(tmp_path / "work").manifest["style"] == "letters"


# ----------------------------------------------------------------------------------------------------------- printing


def test_a_lens_fits_on_a_screen_and_says_how_it_did() -> None:
    lens = load_lens(Path(__file__).parents[1] / "golden" / "lens")
    lines = str(lens).splitlines()
    assert lines[0] == f"Lens for model: {lens.name}"
    assert lines[1].split()[:2] == ["method", "accuracy"]
    assert [line.split()[0] for line in lines[2:-2]] == [m.split()[0] for m in lens.trace.validation]
    assert lines[-2:] == [
        "48 questions of “questions”: fitted on 38, chosen on 10 others.",
        "The scores are fractions, of the questions it was chosen on.",
    ]
    assert len(repr(lens)) < 2000
    assert lens.to_frame()["accuracy"][0] == lens.trace.validation["base"]["accuracy"].value
    assert lens._repr_html_().count("<tr>") == 1 + len(lens.trace.validation)


def test_an_answer_prints_every_option_and_in_a_list_one_line() -> None:
    answer = Answer("q7", 1, "a blue whale", 0.732, (0.268, 0.732), (0.6, 0.4), 1.04, (0, 1), False)
    assert repr([answer]) == "[<q7: a blue whale (73% sure, shift 1.0)>]"
    assert str(answer).splitlines() == [
        "q7: a blue whale (73% sure, shift 1.0)",
        "option  chosen  before  after  in set",
        "     0      no     0.6  0.268     yes",
        "     1     yes     0.4  0.732     yes",
    ]
    assert answer.to_frame()["after"].tolist() == [0.268, 0.732]
