"""A lens works with its own model only, asked as it was when the lens was fitted; an override is on record."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import make_llama, make_model, make_tokenizer, rewrapped
from support.questions import toy_questions

from coral_lens.engine.model import Model, wrap
from coral_lens.engine.precision import set_precision
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.folder import load_lens
from coral_lens.records import Rendered


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


def test_a_lens_of_a_model_that_scales_its_logits_works_with_it(tmp_path: Path) -> None:
    model = make_model("granite")
    questions = [replace(question, answer=i % 2) for i, question in enumerate(toy_questions(60))]
    fit(model, questions).save(tmp_path / "lens")
    assert len(load_lens(tmp_path / "lens").predict(model, questions[:2])) == 2


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
