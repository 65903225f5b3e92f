"""How much of the paper is done: the questions, shares and settings of every part at a scale.

Studies are the ready-made ones of the paper, with its own rows alone; the paper's scale takes its own way wherever there is an
option for it, which ready-made studies leave aside where it takes days. The small scale asks fewer questions of them, asks for
texts instead of letters, which a small model cannot answer by, and tries less. What it leaves out it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coral_lens.analysis.settings import DimensionSettings, LayerPlan, ProbePlan
from coral_lens.lens.settings import NetworkSearch
from coral_lens.methods.entry import MethodEntry
from coral_lens.sae.settings import AblationPlan, SteerPlan, TrainingSettings
from coral_lens.study.config import Mixture, Source, Study, Test, load_study

ROWS = ("mlp", "iti", "ccps", "steerconf")
"""The methods of the paper's tables; the unsteered model and temperature scaling stand beside them in every study."""


@dataclass(frozen=True)
class SaeScale:
    """What is done with autoencoders."""

    sources: tuple[Source, ...]
    """Whose token states they are trained on."""
    asked: Source
    """Whose questions select features, are ablated on, choose a steering; no question serves twice."""
    tested: Source
    """Whose questions a steering is measured on."""
    tokens: int
    selecting: int
    """Questions that features are selected on."""
    ablating: int
    choosing: int
    """Questions that a steering is chosen on."""
    testing: int
    training: TrainingSettings = TrainingSettings()  # noqa: RUF009  (frozen)
    ablation: AblationPlan = AblationPlan()  # noqa: RUF009  (frozen)
    steering: SteerPlan = SteerPlan()  # noqa: RUF009  (frozen)
    features: int = 300
    """Features that are selected."""
    expansion: int = 16
    """The autoencoder whose features are looked at."""


@dataclass(frozen=True)
class Scale:
    """How much is done."""

    name: str
    about: str
    """In a sentence."""
    weights: tuple[int, int]
    """The fewest and the most weights in the blocks of a model that it is meant for; embeddings are not counted."""
    study: Callable[[str, str], Study]
    """Gives the study of a part (`probe1`, `probe2`, `transfer`, `corrsteer`) for a model."""
    home: Source
    """The questions whose states are looked into: layers, depth, dimensions."""
    away: Source
    """Questions of another task, to which probes of different depth are carried."""
    n_heads: int
    """So many of the questions at home have the states of all heads kept."""
    sae: SaeScale
    layers: LayerPlan = LayerPlan(lens="mlp")  # noqa: RUF009  (frozen)
    probes: ProbePlan = ProbePlan()  # noqa: RUF009  (frozen)
    dimensions: DimensionSettings = DimensionSettings(embedding=False)  # noqa: RUF009  (frozen)
    larger: str = ""
    """What a model that is too large can be given to; nothing where there is no larger scale."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What of the paper is left out at this scale, and why."""


# -------------------------------------------------------------------------------------------------------------- studies


def papers_study(part: str, model: str) -> Study:
    """Return a ready-made study for one model, with the rows of the paper's tables alone."""
    study = load_study(part)
    rows = study.method if part == "corrsteer" else tuple(m for m in study.method if m.kind in ROWS)
    return study.model_copy(update={"models": (model,), "method": rows})


TO_THE_LETTER: dict[str, dict[str, Any]] = {
    "mlp": {"search": "grid", "grid": "paper"},
    "iti": {"questions": 5000, "balanced": False},
    "ccps": {"push": "up"},
    "steerconf": {"crossed": True, "questions": 2000, "max_new_tokens": 512, "ask_again": True},
}
"""The paper's own way of each method, where another is the default (docs/method.md)."""


def letter_study(part: str, model: str) -> Study:
    """Return a ready-made study with its methods in the paper's own way."""
    study = papers_study(part, model)
    mixtures = tuple(m.model_copy(update={"stratified": False}) for m in study.mixture)
    return study.model_copy(update={"mixture": mixtures, "method": tuple(map(to_the_letter, study.method))})


def to_the_letter(entry: MethodEntry) -> MethodEntry:
    """Return a method in the paper's own way; the original CorrSteer is so already."""
    options = entry.options | TO_THE_LETTER.get(entry.kind, {})
    return MethodEntry.model_validate({"kind": entry.kind, "name": entry.name, **options})


SMALLER = {
    "commonsense_qa:train": 300,
    "race_question:train": 300,
    "commonsense_qa:validation": None,
    "race_question:test": 300,
    "mmlu:test": 1200,
    "arc_challenge:test": 500,
    "hellaswag:validation": 300,
    "openbookqa:test": None,
}
"""How many questions of each source are asked at the small scale; None: all."""
CLOZE = {"commonsense_qa": "commonsense_qa_cloze"}
"""Tasks that are asked for the texts of their options at the small scale."""
LESS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "iti": {"heads": (24, 48), "alphas": (1.0, 3.0), "questions": 40},
    "ccps": {"search": False, "steps": 2000},
    "corrsteer": {"features": (10,), "alphas": (0.0, 1.0), "questions": 40},
}
"""What methods try at the small scale, where they try less."""


def smaller_study(part: str, model: str) -> Study:
    """Return the same study with fewer questions, fewer shots and fewer things tried."""
    study = papers_study(part, model)
    if part == "corrsteer":  # on the model's home ground, not on MMLU, which a small model answers by chance
        study = study.model_copy(update={"mixture": home_mixture(), "test": home_tests()})
    tests = tuple(smaller_test(t) for t in study.test if t.rest or smaller_source(t.source))
    mixtures = tuple(
        m.model_copy(update={"sources": tuple(s for s in map(smaller_source, m.sources) if s)}) for m in study.mixture
    )
    guard = tuple(s for s in map(smaller_source, study.guard) if s)
    rows = tuple(smaller_method(m) for m in study.method if m.kind in LESS)
    return study.model_copy(
        update={"mixture": mixtures, "test": tests, "guard": guard, "method": rows, "name": f"{part}-small"}
    )


def home_mixture() -> tuple[Mixture, ...]:
    """Return CommonsenseQA's training questions."""
    source = Source(task="commonsense_qa", split="train", n=300, shots=0)
    return (Mixture(name="home", sources=(source,), validation=0.2),)


def home_tests() -> tuple[Test, ...]:
    """Return CommonsenseQA's validation split."""
    return (Test(task="commonsense_qa", split="validation", shots=0),)


def smaller_source(source: Source) -> Source | None:
    """Return a source with fewer questions and, but for MMLU, without shots; None for one that is left out."""
    if source.label not in SMALLER:
        return None
    n = SMALLER[source.label]
    shots = source.shots if source.task == "mmlu" else 0
    return source.model_copy(update={"task": CLOZE.get(source.task, source.task), "n": n, "shots": shots})


def smaller_test(test: Test) -> Test:
    """Return a test of a smaller source; nothing adapts to it."""
    if test.rest:
        return test
    source = smaller_source(test.source)
    assert source is not None, "those that are left out are not asked for"
    about = {"task": source.task, "n": source.n, "shots": source.shots, "adapt": ""}
    return test.model_copy(update=about)


def smaller_method(entry: MethodEntry) -> MethodEntry:
    """Return a method that tries less; what it says of itself stays, or `corrsteer (original)` would be another one."""
    own = {k: v for k, v in entry.options.items() if k not in ("adapt", "train_on")}
    options = LESS[entry.kind] | own
    return MethodEntry.model_validate({"kind": entry.kind, "name": entry.name, **options})


# --------------------------------------------------------------------------------------------------------------- scales

SMALL_HOME = Source(task="commonsense_qa_cloze", split="train", n=1000, shots=0)
MMLU = Source(task="mmlu", split="test", shots=5)

SCALES = {
    "small": Scale(
        name="small",
        about="For 2 cores and a model of at most two billion weights: hundreds of questions where the paper has thousands.",
        weights=(50_000_000, 2_500_000_000),
        larger="--scale paper with a GPU",
        study=smaller_study,
        home=SMALL_HOME,
        away=Source(task="arc_challenge", split="validation", shots=0),
        n_heads=400,
        sae=SaeScale(
            sources=(SMALL_HOME, Source(task="race_question", split="train", n=300, shots=0)),
            asked=Source(task="commonsense_qa_cloze", split="train", n=2000, shots=0),
            tested=Source(task="commonsense_qa_cloze", split="validation", shots=0),
            tokens=100_000,
            selecting=1000,
            ablating=150,
            choosing=100,
            testing=300,
            steering=SteerPlan(gammas=(0.0, 1.0, 30.0, 300.0)),
        ),
        layers=LayerPlan(
            lens="mlp",
            network=NetworkSearch(
                search="grid", weight_decay=(1.0, 45.0), output_penalty=(0.0,), learning_rate=(1e-3,)
            ),
        ),
        probes=ProbePlan(seeds=1),
        left_out={
            "SteerConf": "it asks a model to write its answers, and hardly any that a small one writes can be read",
            "Math-MC": "its questions are not in the embedded data",
            "CCPS's search, its training on CommonsenseQA alone and its adaptation": "the small scale trains its networks once",
        },
    ),
    "paper": Scale(
        name="paper",
        about="The paper's sizes, for models of some billion weights on a GPU.",
        weights=(1_000_000_000, 80_000_000_000),
        study=letter_study,
        home=MMLU,
        away=Source(task="arc_challenge", split="validation", shots=0),
        n_heads=2000,
        sae=SaeScale(
            sources=(MMLU,),
            asked=MMLU,
            tested=Source(task="mmlu", split="validation", shots=5),
            tokens=2_000_000,
            selecting=4000,
            ablating=1000,
            choosing=1000,
            testing=1531,
            training=TrainingSettings(massive=0.0),
        ),
        layers=LayerPlan(lens="mlp", tested_folds=1, network=NetworkSearch(search="grid", grid="paper")),
        left_out={
            "tuning on each target": "ITI and SteerConf are chosen on the mixture's validation questions, never on the target's",
            "CommonsenseQA's and HellaSwag's test questions": "their answers are not published; validation questions stand in",
            "the score of an option as a sum": "it is the mean per token, as in the authors' code",
        },
    ),
}


# ---------------------------------------------------------------------------------------------------------------- limits


def limited(scale: Scale, n: int) -> Scale:
    """Return a scale that asks at most `n` questions of each source: a look at everything, with intervals as wide as that is."""

    def cap(source: Source) -> Source:
        return source.model_copy(update={"n": min(source.n or n, n)})

    def study(part: str, model: str) -> Study:
        whole = scale.study(part, model)
        # few questions of many subjects cannot be divided subject by subject: rounded up, the shares would be other ones
        about = {"stratified": False}
        mixtures = tuple(m.model_copy(update={"sources": tuple(map(cap, m.sources)), **about}) for m in whole.mixture)
        tests = tuple(t if t.rest else t.model_copy(update={"n": min(t.n or n, n)}) for t in whole.test)
        return whole.model_copy(update={"mixture": mixtures, "test": tests})

    return replace(
        scale,
        name=f"{scale.name}, limit {n}",
        about=f"{scale.about} Here at most {n:,} questions of each source.",
        study=study,
        home=cap(scale.home),
        away=cap(scale.away),
        n_heads=min(scale.n_heads, n),
        sae=limited_sae(scale.sae, n),
    )


def limited_sae(scale: SaeScale, n: int) -> SaeScale:
    """Return the same for autoencoders, which are asked three sets of questions of one source."""
    sizes = {name: min(getattr(scale, name), n) for name in ("selecting", "ablating", "choosing", "testing")}
    asked = scale.asked.model_copy(update={"n": sum(sizes.values()) - sizes["testing"]})
    sources = tuple(s.model_copy(update={"n": min(s.n or n, n)}) for s in scale.sources)
    return replace(scale, sources=sources, asked=asked, **sizes)
