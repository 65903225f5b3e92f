"""Decisions through the whole line: kinds change no bit, soft answers are fitted, options judged one by one, states shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.planted import PlantedStore
from support.questions import toy_questions

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style
from coral_lens.data.shots import with_shots
from coral_lens.data.wording import as_statements
from coral_lens.engine.extract import score_in_memory
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import Extraction, plan_questions
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.probes.listwise import ListwiseMlpSettings, fit_listwise_mlp, fit_listwise_path
from coral_lens.lens.rules import apply_temperature, base_probs, fit_temperature
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.lens.training_data import Sample
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, targets_of
from coral_lens.study.evaluate import evaluate

SETTINGS = FitSettings(layers=(1, 2))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def statements(n: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": f"s{i}",
            "state": f"Parcel {i // 3} is {'late' if i % 2 else 'here'}.",
            "question": f"It is late, case {i}.",
        }
        | more
        | {"answer": bool(i % 2)}
        for i in range(n)
    ]


def numbers_of(lens: Lens) -> dict[str, Any]:
    """Everything that a lens computes with."""
    tensors = {name: t.numpy().tobytes() for name, t in (lens.correction.tensors() | lens.shift.tensors()).items()}
    return tensors | {"gamma": lens.gamma, "tempering": lens.tempering, "temperature": lens.control_temperature}


# -------------------------------------------------------------------------------------------------- kinds change no bit


def test_a_yes_no_question_equals_a_choice_of_two_to_the_bit(tiny: Model) -> None:
    kinds = load_questions(statements(40, kind="yes-no"))
    choices = load_questions([{**row, "options": ["no", "yes"]} for row in statements(40)])
    assert {q.kind for q in kinds} == {"yes-no"}
    one, other = fit(tiny, kinds, SETTINGS, bar=False), fit(tiny, choices, SETTINGS, bar=False)
    assert numbers_of(one) == numbers_of(other)
    for a, b in zip(one.predict(tiny, kinds), other.predict(tiny, choices), strict=True):
        assert (a.answer, a.probs, a.base_probs, a.shift) == (b.answer, b.probs, b.base_probs, b.shift)
        assert a.p_true == a.probs[1]
        assert b.p_true is None


def test_a_score_of_two_levels_equals_a_choice_to_the_bit(tiny: Model) -> None:
    rows = [{**row, "options": ["low", "high"], "answer": "high" if row["answer"] else "low"} for row in statements(40)]
    scores, choices = load_questions([{**row, "kind": "score"} for row in rows]), load_questions(rows)
    one, other = fit(tiny, scores, SETTINGS, bar=False), fit(tiny, choices, SETTINGS, bar=False)
    assert numbers_of(one) == numbers_of(other)
    for a, b in zip(one.predict(tiny, scores), other.predict(tiny, choices), strict=True):
        assert (a.probs, a.answer) == (b.probs, b.answer)
        assert a.expected_level == pytest.approx(a.probs[1])


def test_soft_labels_of_one_equal_hard_ones_to_the_bit(tiny: Model) -> None:
    hard = toy_questions(40)
    soft = [
        Question(q.id, q.group, q.text, q.options, soft=tuple(float(j == q.answer) for j in range(len(q.options))))
        for q in hard
    ]
    assert soft == hard
    one, other = fit(tiny, soft, SETTINGS, bar=False), fit(tiny, hard, SETTINGS, bar=False)
    assert numbers_of(one) == numbers_of(other)


def sample(n: int = 80, *, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, n)
    options = Options.of_sizes(sizes)
    answers = rng.integers(0, sizes)
    p = options.softmax(rng.normal(size=options.n_rows))
    z = rng.normal(size=(options.n_rows, 5)).astype(np.float32)
    z[:, 0] += options.one_hot(answers)
    return Sample(z, p, options.one_hot(answers) - p, options, answers)


def test_the_arithmetic_of_soft_answers_is_that_of_hard_ones_to_the_bit() -> None:
    """Also where the targets are given: no second path."""
    s = sample()
    targets = s.options.one_hot(s.answers)
    hard = fit_listwise_path(s.z, s.p, s.options, s.answers)
    soft = fit_listwise_path(s.z, s.p, s.options, s.answers, targets=targets)
    assert [f.probe.weight.tobytes() for f in hard] == [f.probe.weight.tobytes() for f in soft]
    assert fit_temperature(s.p, s.options, s.answers) == fit_temperature(s.p, s.options, s.answers, targets=targets)
    settings = ListwiseMlpSettings(hidden=(4,), max_epochs=3)
    networks = [fit_listwise_mlp(one, one, settings, seed=0) for one in (s, replace(s, targets=targets))]
    assert [n.base_weight for n in networks] == [networks[0].base_weight] * 2
    assert networks[0].probe.predict(s.z).tobytes() == networks[1].probe.predict(s.z).tobytes()


# --------------------------------------------------------------------------------------------------------- soft answers


def test_cross_entropy_of_soft_answers_is_what_is_minimised() -> None:
    """Two options whose shares depend on one number: the fitted curve is the logistic curve of the shares."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    share = 1 / (1 + np.exp(-2.0 * x))
    options = Options.of_sizes([2] * 400)
    z = np.column_stack([np.zeros(400), x]).reshape(-1, 1)
    targets = np.column_stack([1 - share, share]).reshape(-1)
    p = np.full(800, 0.5)
    (fitted,) = fit_listwise_path(z, p, options, options.top(targets), (1e-6,), targets=targets)
    assert fitted.probe.weight[0] == pytest.approx(2.0, abs=0.01)


def test_the_temperature_of_soft_answers_brings_back_their_shares() -> None:
    rng = np.random.default_rng(1)
    options = Options.of_sizes([4] * 300)
    truth = options.softmax(rng.normal(size=1200))
    sharp = apply_temperature(truth, options, temperature=0.4)
    fitted = fit_temperature(sharp, options, options.top(truth), targets=truth)
    assert fitted == pytest.approx(2.5, rel=1e-3)


class SoftStore(PlantedStore):
    """A planted store whose annotators agree on the answer in seven of ten cases."""

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__(n, signal={1: 2.0}, seed=seed)
        self.questions = [
            replace(
                q,
                answer=-1,
                soft=tuple(0.7 if j == q.answer else 0.3 / (len(q.options) - 1) for j in range(len(q.options))),
            )
            for q in self.questions
        ]
        self.table = replace(self.table, targets=targets_of(self.questions))


def test_a_lens_fitted_on_soft_answers_learns_their_shares_and_is_measured_against_them() -> None:
    lens = fit_store(SoftStore(400), FitSettings()).at_home()
    test = SoftStore(300, seed=1)
    made = lens.predictions_on(test)
    assert score(made[lens.method], "kl") < 0.5 * score(made["base"], "kl")
    assert score(made[lens.method], "nll") < score(made["temperature"], "nll")
    # seven of ten annotators agree, and it is no surer than they are; fitted on the majority alone, it would be
    hard = fit_store(PlantedStore(400, signal={1: 2.0}), FitSettings()).at_home()
    sure = hard.predictions_on(test)[lens.method]
    mean = {name: p.options.max(p.probs).mean() for name, p in (("soft", made[lens.method]), ("hard", sure))}
    assert mean["soft"] < 0.7 < mean["hard"]


# ------------------------------------------------------------------------------------------------- options one by one


def several(n: int) -> list[Question]:
    """Questions of three options of which one or two are right."""
    rows = [
        {"id": f"q{i}", "question": f"Which are fine, {i}?", "options": [f"red {i}", "green", f"blue {i}"],
         "answers": [0, 2] if i % 2 else [1], "topic": f"t{i % 3}"}
        for i in range(n)
    ]  # fmt: skip
    return load_questions(rows)


def test_options_are_judged_one_by_one_and_several_may_be_right(tiny: Model, tmp_path: Path) -> None:
    questions = several(30)
    lens = fit(tiny, questions, replace(SETTINGS, style=Style("p-true")), bar=False)
    assert lens.training.n_train + lens.training.n_validation == 90
    lens.save(tmp_path / "lens")
    answers = load_lens(tmp_path / "lens").predict(tiny, several(6))
    assert [a.id for a in answers] == [f"q{i}" for i in range(6)]
    for a in answers:
        assert len(a.probs) == 3
        assert a.confidence == max(a.probs)
        assert a.right == tuple(j for j, p in enumerate(a.probs) if p >= 0.5)
    row = answers.rows()[0]
    assert (row["topic"], row["right"]) == ("t0", answers[0].right)
    run = evaluate(lens, tiny, several(60)[40:], bar=False)
    assert len(run.evaluations[0].questions) == 60
    assert {q.kind for q in run.evaluations[0].questions} == {"yes-no"}


def test_a_lens_that_judges_options_recognises_the_questions_that_it_was_fitted_on(tiny: Model) -> None:
    questions = several(30)
    lens = fit(tiny, questions, replace(SETTINGS, style=Style("p-true")), bar=False)
    assert lens.is_seen(questions).all()
    assert lens.is_home(questions).all()
    assert not lens.is_seen(several(60)[30:]).any()
    with pytest.raises(CoralError, match="all 90 questions were used to fit, adapt or calibrate this lens"):
        evaluate(lens, tiny, questions, bar=False)


def test_promises_of_single_statements_are_not_made_of_whole_questions(tiny: Model) -> None:
    lens = fit(tiny, several(30), replace(SETTINGS, style=Style("p-true")), bar=False)
    with pytest.raises(CoralError, match="does not hold for whole questions"):
        calibrate(lens, tiny, several(70)[30:], Guarantees(coverage=0.8, risk=0.4))
    statements = [one for question in several(70)[30:] for one in as_statements(question)]
    calibrated = calibrate(lens, tiny, statements, Guarantees(coverage=0.8, risk=0.4))
    (whole,) = calibrated.predict(tiny, several(71)[70:])
    assert (whole.options_in_set, whole.abstain) == (None, None)
    for statement in calibrated.predict(tiny, as_statements(several(71)[70])):
        assert statement.options_in_set is not None
        assert statement.abstain is not None


# --------------------------------------------------------------------------------------------------- states are shared


def computed_tokens(plan: Plan, model: Model, questions: list[Question]) -> int:
    """The tokens that a plan runs through the model: each prefix once, and what each question adds to it."""
    prompts = plan_questions(model, questions, Extraction((1,))).prepared.prompts
    total, seen = 0, set[tuple[int, ...]]()
    for batch in plan.batches:
        for row, length in zip(batch.rows, batch.prefixes, strict=True):
            if length:
                seen.add(prompts[row[0]].contexts[0][:length])
            total += sum(len(build_tree(prompts[q], skip=length)) for q in row)
    return total + sum(map(len, seen))


def test_questions_about_one_state_share_its_tokens(tiny: Model) -> None:
    state = "The customer wrote a long letter about a parcel. " * 2
    rows = [{"state": state, "question": f"Question number {i}?", "options": ["yes", "no"]} for i in range(12)]
    questions = load_questions(rows)
    planned = plan_questions(tiny, questions, Extraction((1,)))
    whole = [len(build_tree(p)) for p in planned.prepared.prompts]
    assert not any(p.truncated for p in planned.prepared.prompts)
    shared = len(planned.prepared.prompts[0].contexts[0]) - 40
    tokens = computed_tokens(planned.plan(), tiny, questions)
    assert shared > 40
    assert tokens < sum(whole) - 11 * shared
    alone = [score_in_memory(tiny, [q], Extraction((1,))) for q in questions[:3]]
    together = score_in_memory(tiny, questions, Extraction((1,)))
    probs = base_probs(together.table, "token")[: 2 * 3].reshape(3, 2)
    for p, one in zip(probs, alone, strict=True):
        assert p == pytest.approx(base_probs(one.table, "token"), abs=1e-5)


# ------------------------------------------------------------------------------------------------------- the style of a lens


def test_a_template_is_part_of_the_lens(tiny: Model, tmp_path: Path) -> None:
    questions = toy_questions(40)
    style = Style(template="Frage: {{ question }}\nAntwort:", system="Sei kurz.")
    lens = fit(tiny, questions, replace(SETTINGS, style=style), bar=False)
    lens.save(tmp_path / "lens")
    loaded = load_lens(tmp_path / "lens")
    assert loaded.style == style
    assert loaded.predict(tiny, questions[:3]) == lens.predict(tiny, questions[:3])
    plain = fit(tiny, questions, SETTINGS, bar=False)
    assert loaded.predict(tiny, questions[:3])[0].base_probs != plain.predict(tiny, questions[:3])[0].base_probs
    with pytest.raises(CoralError, match="one has style text"):
        evaluate([plain, loaded], tiny, toy_questions(20, seed=3), bar=False)


def test_a_lens_wants_as_many_worked_examples_as_it_was_fitted_with(tiny: Model, tmp_path: Path) -> None:
    pool = [replace(q, text=f"Which, {i}?") for i, q in enumerate(toy_questions(40))]
    shown = with_shots(pool, pool, 2, seed=0)
    lens = fit(tiny, shown, SETTINGS, bar=False)
    assert lens.training.shots == 2
    lens.save(tmp_path / "lens")
    new = [replace(q, text=f"And {i}?") for i, q in enumerate(toy_questions(4, seed=9))]
    with pytest.raises(
        CoralError, match="asked with 0 worked examples, but the lens was fitted with 2; give --num-fewshot 2"
    ):
        load_lens(tmp_path / "lens").predict(tiny, new)
    assert len(load_lens(tmp_path / "lens").predict(tiny, with_shots(new, pool, 2, seed=0))) == 4


def test_predictions_of_decisions_come_back_from_a_run(tiny: Model, tmp_path: Path) -> None:
    from coral_lens.report.runs import load_run, save_run

    rows = [{"question": f"How bad is {i}?", "levels": ["low", "middle", "high"], "kind": "score", "soft": [1, 2, i % 3]}
            for i in range(60)]  # fmt: skip
    questions = load_questions(rows)
    lens = fit(tiny, questions[:40], SETTINGS, bar=False)
    run = evaluate(lens, tiny, questions[40:], bar=False)
    save_run(run, tmp_path)
    loaded = load_run(tmp_path)
    assert loaded.evaluations[0].questions[0].soft == run.evaluations[0].questions[0].soft
    for method, made in run.evaluations[0].predictions.items():
        again: Predictions = loaded.evaluations[0].predictions[method]
        assert score(again, "rps") == score(made, "rps")
        assert score(again, "kl") == score(made, "kl")
