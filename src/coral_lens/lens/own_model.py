"""The model that a lens belongs to: whether one is it, and whether questions are put to it as they were when the lens was fitted.

What does not belong together is refused in one sentence; `adopt` is the way around that, and goes on record.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coral_lens.data.shots import n_shots
from coral_lens.data.wording import refuse_without_options
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.errors import CoralError
from coral_lens.records import Question

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.lens.artefact import Lens


def check_model(lens: Lens, model: Model, questions: Sequence[Question] = ()) -> None:
    """Refuse a model other than the one that a lens was fitted on, and prompts of another chat setting."""
    if difference := identity_difference(lens.model, model.identity):
        raise CoralError(
            f"This lens was fitted on {lens.model['name']!r}, and {model.name!r} is another model ({difference}). Use the "
            "model it was fitted on, fit a lens on this one, or, if you know that they are alike, override the check "
            "(--other-model), which is recorded."
        )
    if "config" not in lens.model:
        warnings.warn(
            "This lens was fitted by an earlier version, which did not record the model's configuration: only weights and "
            "tokenizer are known to be the same.",
            stacklevel=4,
        )
    refuse_without_options(questions)
    for is_open in {q.is_open for q in questions}:
        check_kind(lens, is_open=is_open)
    fitted_in, computes_in = str(lens.model.get("dtype", "")).removeprefix("torch."), model.precision
    if fitted_in and fitted_in != computes_in:
        warnings.warn(
            f"The lens was fitted on states computed in {fitted_in}, and {model.name!r} computes in {computes_in}: answers "
            f"differ a little from those that it was measured with; load the model with dtype={fitted_in!r} for the same.",
            stacklevel=4,
        )
    for question in questions:
        if question.rendered is not None and question.rendered.chat != lens.style.chat:
            have, want = ("with" if c else "without" for c in (question.rendered.chat, lens.style.chat))
            raise CoralError(
                f"Question {question.id!r} was rendered {have} the chat template, but the lens was fitted {want} it."
            )
        if question.rendered is None and n_shots(question) != lens.training.shots:
            raise CoralError(
                f"Question {question.id!r} is asked with {n_shots(question)} worked examples, but the lens was fitted with "
                f"{lens.training.shots}; give --num-fewshot {lens.training.shots} and --fewshot-from FILE."
            )


def check_kind(lens: Lens, *, is_open: bool) -> None:
    """Refuse open questions where the lens was fitted on questions with options, and the reverse."""
    if is_open and lens.open is None:
        raise CoralError(
            "This lens was fitted on questions with options, and cannot weigh what the model writes; use it with `coral "
            "predict`, or fit one with `coral fit --open FILE`."
        )
    if not is_open and lens.open is not None:
        raise CoralError(
            "This lens was fitted on open questions, and these questions come with options; ask them without (`coral ask`), "
            "or fit a lens on such questions with `coral fit --train FILE`."
        )


def check_shapes(lens: Lens, model: Model) -> None:
    """Refuse a model that has not the layers, or not the width, that it reads."""
    width = int(model.hf.config.get_text_config().hidden_size)
    wanted = len(lens.shift.standardiser.mean) - (1 if lens.open else 0)  # of open questions there is an intercept
    if max(lens.layers) > model.n_layers or width != wanted:
        raise CoralError(
            f"The lens reads layer {max(lens.layers)} of width {wanted}, but {model.name!r} has {model.n_layers} layers of "
            f"width {width}: it cannot be used there."
        )


def adopt(lens: Lens, model: Model) -> Lens:
    """Return the lens for a model whose fingerprints differ, with the override on record; the shapes must fit."""
    check_shapes(lens, model)
    given = model.identity
    changed = [key for key, value in given.items() if identity_difference({key: lens.model.get(key, value)}, given)]
    if not changed:
        return lens
    note = f"fitted on {lens.model['name']}, used on {model.name} in spite of other {' and '.join(changed)}"
    training = replace(lens.training, overrides=(*lens.training.overrides, note))
    return replace(lens, model={**lens.model, "name": model.name, **given}, training=training)
