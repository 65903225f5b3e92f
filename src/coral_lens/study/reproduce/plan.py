"""What reproducing will take: questions, passes, time and bytes of each part, reckoned without a model.

Questions are counted; tokens are reckoned from characters, operations from tokens and from the shape of the networks, and time
from how fast this machine multiplies matrices when it has nothing else to do. It is an order of magnitude, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coral_lens.data.splits import sample
from coral_lens.engine.loading import Outline, load_outline
from coral_lens.engine.reckoning import EFFICIENCY, machine_speed, tokens_of
from coral_lens.lens.probes.grid import grid_of
from coral_lens.lens.probes.search import BUDGETS, planned_epochs
from coral_lens.lens.settings import NetworkSearch
from coral_lens.records import Question
from coral_lens.study.config import Study
from coral_lens.study.plan import selected
from coral_lens.study.reproduce.parts import SEED, Workplace, drawn_apart, head_questions
from coral_lens.study.reproduce.scale import Scale
from coral_lens.study.run import Prepared, prepare_study

EXTRA = {"iti": 1.3, "ccps": 1.5, "corrsteer": 1.5}
"""Passes of a method that must run the model again, in units of scoring every question once."""
WRITTEN = 0.5
"""Of the tokens that an answer may have, how many are written, about."""
STOPPED = 0.15
"""Networks stop so early, on average: the share of the epochs that they might train."""


@dataclass(frozen=True)
class PartPlan:
    """What a part will take."""

    name: str
    questions: int
    passes: float
    """How often they go through the model."""
    seconds: float
    n_bytes: int


def plan_parts(place: Workplace, parts: Sequence[str]) -> list[PartPlan]:
    """Reckon what each part takes; what two parts share is counted with the first of them. Unknown models are refused."""
    outline, speed = load_outline(place.name), machine_speed(place.device)
    seen: set[str] = set()
    plans = []
    for part in parts:
        load = LOADS[part](place)
        fresh = replace(load, questions=[q for q in load.questions if q.id not in seen])
        if load.own_bytes is None:
            seen |= {q.id for q in load.questions}
        tokens = fresh.tokens * load.passes + load.tokens * load.again
        seconds = reckoned_seconds(load, tokens, outline, speed)
        n_bytes = (load.own_bytes or fresh.all_layers)(outline)
        plans.append(PartPlan(part, len(load.questions), tokens / max(1.0, load.tokens), seconds, n_bytes))
    return plans


# ------------------------------------------------------------------------------------------------- what each part loads


@dataclass(frozen=True)
class Load:
    """What a part asks of the machine."""

    questions: Sequence[Question]
    passes: float
    """Over those that no part before has scored."""
    again: float = 0.0
    """Over all of them."""
    networks: float = 0.0
    """Epochs of the paper's network, times the rows of each."""
    other: float = 0.0
    """Operations beside these, per squared column of the states."""
    own_bytes: Callable[[Outline], int] | None = None
    """What it keeps in a store of its own, which no other part reads; otherwise it keeps all layers of its questions."""

    @property
    def rows(self) -> int:
        """Options of all questions."""
        return sum(len(q.options) for q in self.questions)

    def all_layers(self, outline: Outline) -> int:
        """Return the bytes of every layer's state of every option, in half precision."""
        return self.rows * (outline.n_layers + 1) * outline.width * 2

    @property
    def tokens(self) -> float:
        """Tokens of the questions, about."""
        return tokens_of(self.questions)


def reckoned_seconds(load: Load, tokens: float, outline: Outline, speed: float) -> float:
    """Return the time of a part: of its passes, of its networks, and of the rest."""
    passes = 2 * outline.n_layers * outline.block_parameters * tokens
    network = 6 * (outline.width * 1024 + 1024 * 512 + 512 * 256 + 256 * 128)
    return (passes + network * load.networks + load.other * outline.width**2) / (EFFICIENCY * speed)


def study_load(place: Workplace, study: Study) -> Load:
    """Return the load of a study: its questions, what its methods score again, and the search for its network."""
    prepared = prepare_study(study, place.folders.data)
    asked = asked_questions(prepared)
    train = sum(len(part.ids) for m in prepared.plan.mixtures for part in m.parts)
    extra = sum(EXTRA.get(entry.kind, 0.0) for entry, _ in prepared.methods)
    n_tests = len(asked) - train
    written = sum(
        tokens_written(settings, n_tests) for entry, settings in prepared.methods if entry.kind == "steerconf"
    )
    extra += written / max(1.0, tokens_of(asked))
    searches = [settings.network for entry, settings in prepared.methods if entry.kind == "mlp"]
    rows = 4 * 0.8 * train
    networks = sum((rows * epochs(search, layers_of(place)) for search in searches), start=0.0)
    return Load(asked, 1.0 + extra, networks=networks)


def tokens_written(settings: Any, n_tests: int) -> float:
    """Return the tokens of the answers that SteerConf has written: to choose, in every way or in two stages, and of tests."""
    most, ways = max(settings.samples), len(settings.prompts) * len(settings.thinking)
    staged = ways * settings.screening + 3 * most - min(settings.screening, most)
    tried = ways * len(settings.temperatures) * most if settings.crossed else staged
    return (settings.questions * tried + n_tests * most) * settings.max_new_tokens * WRITTEN


def asked_questions(prepared: Prepared) -> list[Question]:
    """Return the questions that a study trains and tests on."""
    parts = [part for m in prepared.plan.mixtures for part in m.parts] + [t.part for t in prepared.plan.tests]
    return [q for part in parts for q in selected(part, prepared.load)]


def layers_of(place: Workplace) -> int:
    """Return how many layers of states a model has, with its embeddings."""
    return load_outline(place.name).n_layers + 1


def epochs(search: NetworkSearch, n_layers: int) -> float:
    """Return how many epochs a search is likely to train."""
    return STOPPED * planned_epochs(n_layers, grid_of(search), BUDGETS[search.search])


def home_load(place: Workplace, *, networks: float = 0.0, other: float = 0.0) -> Load:
    """Return the load of a part that looks into the states of the questions at home."""
    return Load(place.load(place.scale.home), 1.0, networks=networks, other=other)


def layers_load(place: Workplace) -> Load:
    """Return the load of the layer analysis."""
    plan, rows = place.scale.layers, 4 * len(place.load(place.scale.home))
    return home_load(place, networks=0.6 * rows * plan.tested_folds * epochs(plan.network, layers_of(place)))


def depth_load(place: Workplace) -> Load:
    """Return the load of probes of different depth."""
    scale = place.scale
    networks = (len(scale.probes.depths) + 30) * scale.probes.seeds * STOPPED * 100
    home = home_load(place, networks=0.56 * 4 * len(place.load(scale.home)) * networks)
    return Load([*home.questions, *place.load(scale.away)], 1.0, networks=home.networks)


def heads_load(place: Workplace) -> Load:
    """Return the load of networks on heads: 15 epochs in five folds of a network of 60,000 weights for 64 columns each."""
    rows = 4 * place.scale.n_heads
    other = layers_of(place) * 5 * 15 * rows * 6 * 60_000 / 64 / 600
    load = Load(head_questions(place), 0.0, again=1.0, other=other)
    # the heads of a block are together about as wide as the block
    return replace(load, own_bytes=lambda outline: load.rows * outline.n_layers * outline.width * 2)


def sae_load(place: Workplace) -> Load:
    """Return the load of autoencoders: training, and the passes of ablation and steering."""
    scale: Scale = place.scale
    sae = scale.sae
    asked, tested = place.load(sae.asked), sample(place.load(sae.tested), sae.testing, seed=SEED)
    used = [q for drawn in drawn_apart(asked, (sae.selecting, sae.ablating, sae.choosing)) for q in drawn]
    n_features = sae.ablation.features + sae.ablation.random
    settings = 1 + len(sae.steering.top) * (len(sae.steering.gammas) - 1)
    again = (0.05 * n_features * sae.ablating + settings * sae.choosing + 7 * len(tested)) / max(1, len(used))
    load = Load([*used, *tested], 0.0, again=2.0 + again, other=12.0 * sae.tokens * sum(sae.training.expansions))
    collected = tokens_of([q for source in sae.sources for q in place.load(source)])
    n_tokens = float(min(sae.tokens or collected, collected))
    return replace(load, own_bytes=lambda outline: sae_bytes(outline.width, n_tokens, sae.training.expansions))


def sae_bytes(width: int, n_tokens: float, expansions: Sequence[int]) -> int:
    """Return the bytes of token states in half precision, and of autoencoders, each once and three times in a checkpoint."""
    weights = sum(2 * width * (expansion * width) for expansion in expansions)
    return round(2 * n_tokens * width) + 4 * 4 * weights


def corrsteer_load(place: Workplace) -> Load:
    """Return the load of CorrSteer; its autoencoder is not looked for."""
    study = place.study("corrsteer")
    rows = tuple(m for m in study.method if m.kind != "corrsteer")
    n = len(study.method) - len(rows)
    load = study_load(place, study.model_copy(update={"method": rows}))
    return replace(load, again=n * EXTRA["corrsteer"])


LOADS: dict[str, Callable[[Workplace], Load]] = {
    "probe1": lambda place: study_load(place, place.study("probe1")),
    "probe2": lambda place: study_load(place, place.study("probe2")),
    "layers": layers_load,
    "depth": depth_load,
    "transfer": lambda place: study_load(place, place.study("transfer")),
    "sae": sae_load,
    "corrsteer": corrsteer_load,
    "heads": heads_load,
    "dimensions": lambda place: home_load(place, other=5.0 * 10 * layers_of(place) * 600),
}
"""What each part loads, by its name."""
