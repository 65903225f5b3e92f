"""How autoencoders are trained, and their features selected, ablated and steered by, as settings.

Light: they are also the options of `coral sae train`, `select`, `ablate` and `steer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from coral_lens.data.settings import Style
from coral_lens.engine.settings import TokenPlace
from coral_lens.errors import CoralError
from coral_lens.lens.settings import Criterion
from coral_lens.storage.settings import NO_OPTION, Count, CountOrZero, Counts, NotEmpty, Option, Range, Seed, Settings

SHARD_TOKENS = 16_384
"""Aimed-at tokens of a shard."""
STEERING_SIZES = (50, 100, 128, 200, 300)
"""Numbers of features that steering tries."""
STEERING_GAMMAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Strengths that steering tries. Weights sum to 1: at gamma = n, a feature of n with equal weights is doubled."""

AblationPlace = Literal["all", "answer"]
"""Every position, as the paper reads (the layer's output is replaced); or the answer tokens alone."""
ShareOfSteps = Annotated[float, Range(0, 1), NO_OPTION]


@dataclass(frozen=True)
class Sampling(Settings):
    """Which states are collected."""

    layer: CountOrZero
    """Layer whose residual stream is taken apart."""
    tokens: CountOrZero = 500_000
    """Collect at least this many states, if the questions have them; 0: all. Ten thousand would be too few for thousands of
    features."""
    where: TokenPlace = "all"
    """Tokens whose states are used: an autoencoder should see what it will be patched into."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    shard_tokens: Annotated[Count, NO_OPTION] = SHARD_TOKENS
    """Aimed-at tokens of a shard."""
    seed: Seed = 0
    """Seed of the draw of questions."""


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """How autoencoders are trained."""

    expansions: Annotated[Counts, Option("--expansion")] = (4, 8, 16)
    """Features per dimension of the states, trained side by side in one pass; by default the paper's three."""
    penalty: Annotated[float, Range(0)] = 4.0
    """The paper's lambda, for z-scored states and a squared error summed over dimensions."""
    k: Annotated[CountOrZero, Option("--top-k")] = 0
    """Above 0: keep this many features of a state (TopK), which needs no penalty."""
    learning_rate: Annotated[float, Range(above=0)] = 3e-3
    """Learning rate after warm-up."""
    warm_up: ShareOfSteps = 0.05
    """Share of the steps over which the learning rate grows from 0."""
    penalty_warm_up: ShareOfSteps = 0.1
    """Share of the steps over which lambda grows from 0."""
    decay: ShareOfSteps = 0.2
    """Share of the steps, at the end, over which the learning rate falls to 0."""
    batch_size: Count = 512
    """States in a step."""
    epochs: Count = 1
    """Passes over the states."""
    massive: float = 10.0
    """Leave states that are this many times as long as the median (attention sinks) out of training; 0 keeps them in."""
    resample: Annotated[Count, NO_OPTION] = 250
    """After so many steps, features that none of them has activated start anew; never in the last third."""
    checkpoint: Annotated[Count, NO_OPTION] = 200
    """Steps between checkpoints."""
    seed: Seed = 0
    """Seed of the draw of questions, of the first weights and of the order of states."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.expansions)) < len(self.expansions):
            raise CoralError(f"Expansions must be different numbers. Got {list(self.expansions)} instead.")
        if self.massive and not 1 < self.massive < math.inf:
            raise CoralError(f"massive must be 0, which keeps all states, or above 1. Got {self.massive} instead.")

    def rate_at(self, step: int, n_steps: int) -> float:
        """Return the learning rate of a step."""
        up = min(1.0, (step + 1) / max(1.0, self.warm_up * n_steps))
        down = min(1.0, (n_steps - step) / max(1.0, self.decay * n_steps))
        return self.learning_rate * min(up, down)

    def penalty_at(self, step: int, n_steps: int) -> float:
        """Return lambda of a step."""
        if self.k:
            return 0.0
        return self.penalty * min(1.0, (step + 1) / max(1.0, self.penalty_warm_up * n_steps))


@dataclass(frozen=True)
class Selecting(Settings):
    """How features are selected."""

    sae: Path
    """Folder of an autoencoder, such as SAE/16x; SAELens' own will do."""
    k: Count = 300
    """Features to choose by each criterion."""
    base: Literal["sum", "token", "char"] = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char` (lm-eval's acc_norm)."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    layer: CountOrZero | None = None
    """Layer of an autoencoder whose configuration does not say it."""
    num_fewshot: CountOrZero | None = None
    """Worked examples before each question; ablation and steering ask theirs after as many."""
    fixed_shots: bool = False
    """Whether all questions have the same worked examples; those of ablation and steering then do too."""


@dataclass(frozen=True)
class AblationPlan(Settings):
    """Which features are ablated, and how."""

    by: Literal["correlation", "impact", "both"] = "correlation"
    """Criterion whose selected features are ablated; `both` takes the best of each in turns."""
    features: Count = 300
    """Number of the selected features that are ablated, the best first."""
    random: CountOrZero = 100
    """Further features, drawn at random from those active often enough: they show what chance does."""
    where: AblationPlace = "all"
    """Patch `all` positions, as in the paper, or the `answer` tokens."""
    keep_error: bool = False
    """Keep what the reconstruction misses."""
    seed: Annotated[Seed, NO_OPTION] = 0
    """Seed of the random features."""

    @property
    def name(self) -> str:
        return f"{self.by}-{self.where}{'-error' if self.keep_error else ''}"


@dataclass(frozen=True)
class Weighing(Settings):
    """What an ablation's changes are worth."""

    accuracy: Annotated[float, Range(), Option("--alpha-acc")] = 1.0
    """Weight of the change of accuracy, the paper's alpha_acc."""
    calibration: Annotated[float, Range(), Option("--alpha-cal")] = 1.0
    """Weight of the change of ECE, the paper's alpha_cal."""


@dataclass(frozen=True)
class SteerPlan(Settings):
    """Which steering is tried, and what chooses it."""

    ablation: str = "correlation-all"
    """Ablation whose effects are the weights: criterion and place, such as `impact-all`."""
    weighing: Weighing = Weighing()
    """What its changes are worth."""
    top: Annotated[Counts, NO_OPTION] = STEERING_SIZES
    """Numbers of features that are tried."""
    gammas: Annotated[tuple[float, ...], NotEmpty(), NO_OPTION] = STEERING_GAMMAS
    """Strengths that are tried."""
    criterion: Criterion = "brier"
    """Validation metric that chooses features and gamma."""
