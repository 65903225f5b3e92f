"""CCPS: an option's confidence from how its tokens' predictions bear small pushes of the state behind them.

As in the paper's appendix B.2, B.4 and B.5: features of each option (`perturbation`), a contrastive embedding and a classifier
(`contrastive`) trained on the training questions. Features, radii and sizes are chosen by AUROC over the options of the
validation questions. The confidences of a question's options are divided by their sum, and are then a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from coral_lens.data.task_index import is_task, leaves
from coral_lens.engine.planned import Extraction, Readings
from coral_lens.errors import CoralError, nearest
from coral_lens.lens.probes.standardise import Standardiser, fit_standardiser
from coral_lens.lens.rules import correct_rows
from coral_lens.methods.ccps.contrastive import (
    Activation,
    Confidence,
    Examples,
    NetworkSettings,
    OnStep,
    adapt_classifier,
    fit_classifier,
    fit_embedding,
)
from coral_lens.methods.ccps.perturbation import (
    DIVERGENCES,
    RADII,
    RADIUS_SETS,
    SENSITIVITY,
    STATE,
    PerturbationFeatures,
    Push,
    head_of,
    option_features,
    radii_of,
)
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, options_of
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.storage.files import digest, digest_bytes, file_name, kept_record, write_atomic, write_record
from coral_lens.storage.settings import LATER, Count, Counts, NotEmpty, Range, Settings

FEWEST_OPTIONS = 10
"""Fewer right or wrong options than this are refused."""
EMBEDDINGS = (8, 16, 32)
CLASSIFIERS = ((48, 24, 12), (48, 24), (64, 32, 16))


@dataclass(frozen=True)
class CcpsSettings(Settings):
    """How features are made and what is tried; the defaults are those of the paper's list of hyper-parameters."""

    radii: Annotated[tuple[float, ...], NotEmpty()] = RADII
    """How far states are pushed, in rising order."""
    push: Push = "down"
    """`down`: towards a lower probability, as the original pushes. `up`: the paper's sign."""
    search: bool = True
    """Whether features and sizes are chosen on validation questions; otherwise all features and the sizes below are taken."""
    activation: Activation = "elu"
    """`elu` with dropout 0.05, or as the description of the method says `relu` with 0.1."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.05
    """Dropout of both networks."""
    embedding: Count = 8
    """Dimensions of the embedding."""
    classifier: Counts = (48, 24, 12)
    """Hidden layers of the classifier."""
    steps: Count = 5000
    """Training steps of each of the two networks."""
    tune_embedding: bool = False
    """Whether the classifier's training moves the embedding network too."""
    train_on: Annotated[tuple[str, ...], LATER] = ()
    """Tasks or groups of the mixture whose questions it is trained and chosen on; by default all. The paper's table of transfer
    names CommonsenseQA alone."""
    adapt: bool = False
    """Whether a row ` adapted` is added for tests that say what may be adapted on: there the classifier goes on training for
    as many steps on those questions, while the embedding stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.radii) <= 0 or list(self.radii) != sorted(set(self.radii)):
            raise CoralError(f"CCPS's radii must be above 0 and rise. Got {list(self.radii)} instead.")

    @property
    def network(self) -> NetworkSettings:
        return NetworkSettings(
            activation=self.activation,
            dropout=self.dropout,
            embedding=self.embedding,
            classifier=self.classifier,
            steps=self.steps,
            tune_embedding=self.tune_embedding,
        )


# ----------------------------------------------------------------------------------------------------------- features


@dataclass(frozen=True)
class FeatureSet:
    """Which features the networks see."""

    types: str
    """`all`, or `steady`: without the divergences."""
    radii: str
    """A set of radii (`perturbation.RADIUS_SETS`): of PEI and of the divergences."""


FEATURE_SETS = (*(FeatureSet("all", radii) for radii in RADIUS_SETS), FeatureSet("steady", "all"))


def columns_of(features: FeatureSet, radii: Sequence[float]) -> Int[np.ndarray, " column"]:
    """Return the columns of the features that a set holds."""
    names = {*STATE, *SENSITIVITY, f"pei.{features.radii}"}
    if features.types == "all":
        names |= {f"{name}.{k}" for name in DIVERGENCES for k in radii_of(features.radii, radii)}
    return np.array([i for i, name in enumerate(option_features(radii)) if name.split()[0] in names])


def varying(
    features: Float[np.ndarray, "row feature"], columns: Int[np.ndarray, " column"]
) -> Int[np.ndarray, " kept"]:
    """Return those columns that differ between options.

    The spread over the tokens of an option is 0 for every option of one token: nothing is learned of such a column, and what
    it holds for longer options would reach the networks unscaled, through weights that were never trained.
    """
    values = features[:, columns]
    return columns[np.ptp(values, axis=0) > 1e-6 * np.abs(values).max(axis=0)]


def read_features(
    context: FitContext, name: str, questions: Sequence[Question], settings: CcpsSettings
) -> Float[np.ndarray, "row feature"]:
    """Score questions and return the features of their options; what is finished is kept in the method's folder."""
    model = context.model()
    reader = PerturbationFeatures(head_of(model), settings.radii, settings.push)
    about = {"method": "ccps", "radii": list(settings.radii), "push": settings.push}
    readings = Readings((reader,), about, row_bytes=8 * len(option_features(settings.radii)))
    extraction = Extraction((), context.common.style, readings=readings)
    return context.extract(model, questions, file_name(name), extraction=extraction).reading("features")


# ----------------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Ccps:
    """The fitted method: the columns of the features that it sees, their standardiser, and the two networks."""

    columns: Int[np.ndarray, " column"]
    standardiser: Standardiser
    confidence: Confidence

    def __call__(self, features: Float[np.ndarray, "row feature"]) -> Float[np.ndarray, " row"]:
        """Return p(right) of each option."""
        return self.confidence(self.standardiser(features[:, self.columns]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        mean, scale = (torch.from_numpy(a) for a in (self.standardiser.mean, self.standardiser.scale))
        return {"columns": torch.from_numpy(self.columns), "mean": mean, "scale": scale, **self.confidence.tensors()}


@dataclass(frozen=True)
class SplitOptions:
    """The options of the training questions and of the validation questions."""

    train: Examples
    """With features that are not standardised yet, as those of the validation questions."""
    held_out: Examples

    def auroc(self, fitted: Ccps) -> float:
        """Return how well right options are told from wrong ones on the validation questions."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(self.held_out.y, fitted(self.held_out.z)))


@dataclass(frozen=True)
class Design:
    """One way to build CCPS: its features and its networks."""

    features: FeatureSet
    network: NetworkSettings

    def record(self) -> dict[str, Any]:
        """Return what distinguishes it, as JSON."""
        sizes = {"embedding": self.network.embedding, "classifier": list(self.network.classifier)}
        return {"features": self.features.types, "radii": self.features.radii, **sizes}


class Trainer:
    """Trains designs, each embedding network once, and remembers how each did on the validation questions."""

    def __init__(self, split: SplitOptions, radii: Sequence[float], *, seed: int, on_step: OnStep) -> None:
        self.split, self.radii, self.seed, self.on_step = split, radii, seed, on_step
        self._embeddings: dict[tuple[FeatureSet, int], nn.Sequential] = {}
        self.fits: dict[Design, tuple[float, Ccps]] = {}
        """The AUROC of every design that was trained, and its fit."""

    def best(self, designs: Sequence[Design]) -> Design:
        """Return the design with the highest AUROC, the first of equals."""
        for design in designs:
            if design not in self.fits:
                fitted = self.fit(design)
                self.fits[design] = self.split.auroc(fitted), fitted
        return max(designs, key=lambda design: self.fits[design][0])

    def fit(self, design: Design) -> Ccps:
        """Train the networks of a design."""
        train, network, seed, on_step = self.split.train, design.network, self.seed, self.on_step
        columns = varying(train.z, columns_of(design.features, self.radii))
        standardiser = fit_standardiser(train.z[:, columns])
        examples = Examples(standardiser(train.z[:, columns]), train.y)
        key = design.features, network.embedding
        if key not in self._embeddings:
            self._embeddings[key] = fit_embedding(examples, network, seed=seed, on_step=on_step)
        confidence = fit_classifier(self._embeddings[key], examples, network, seed=seed, on_step=on_step)
        return Ccps(columns, standardiser, confidence)


def choose_design(trainer: Trainer, settings: CcpsSettings) -> Design:
    """Choose features and radii with the sizes that were asked for, then sizes with those features."""
    designs = [Design(features, settings.network) for features in FEATURE_SETS]
    if not settings.search:
        return trainer.best(designs[:1])
    first = trainer.best(designs)
    sizes = [(e, c) for e in EMBEDDINGS for c in CLASSIFIERS]
    return trainer.best(
        [first, *(replace(first, network=replace(first.network, embedding=e, classifier=c)) for e, c in sizes)]
    )


def n_steps(settings: CcpsSettings) -> int:
    """Return how many steps all trainings take together; what was asked for is trained once, also where the search has it."""
    if not settings.search:
        return 2 * settings.steps
    sizes = (settings.network.embedding, settings.network.classifier)
    embeddings = set(EMBEDDINGS) - {sizes[0]}
    classifiers = {(e, c) for e in EMBEDDINGS for c in CLASSIFIERS} - {sizes}
    return (2 * len(FEATURE_SETS) + len(embeddings) + len(classifiers)) * settings.steps


# ---------------------------------------------------------------------------------------------------------- the method


def trained_on(questions: Sequence[Question], settings: CcpsSettings) -> Bool[np.ndarray, " question"]:
    """Return which questions of the mixture the networks see; a task or a group of which it has none is refused."""
    known = sorted({q.task for q in questions})
    wanted: set[str] = set()
    for task in settings.train_on:
        found = {task} & set(known) or tasks_of(task) & set(known)
        if not found:
            raise CoralError(
                f"CCPS is to be trained on {task}, and the mixture has questions of {', '.join(known)} only; name one of them."
                f"{nearest(task, known)}"
            )
        wanted |= found
    return np.array([not wanted or q.task in wanted for q in questions])


def tasks_of(name: str) -> set[str]:
    """Return the tasks of a group such as mmlu, whose questions have the names of its subjects; none of an unknown name."""
    return {leaf.task for leaf in leaves(name)} if is_task(name) else set()


def refuse_other_tasks(questions: Sequence[Question], settings: CcpsSettings) -> None:
    """Refuse `train_on` that names what the mixture does not have."""
    trained_on(questions, settings)


def split_options(
    context: FitContext, mask: Bool[np.ndarray, " question"], features: Float[np.ndarray, "row feature"]
) -> SplitOptions:
    """Divide the options of the marked questions, whose features are given, as all methods do; refuse too few."""
    options = context.data.table.options
    inside = options.rows(mask)
    held_out = options.rows(context.data.is_validation)[inside]
    y = correct_rows(context.data.table)[inside]
    right, wrong = int(y[~held_out].sum()), int((1 - y[~held_out]).sum())
    if min(right, wrong) < FEWEST_OPTIONS:
        raise CoralError(
            f"CCPS needs at least {FEWEST_OPTIONS} right and {FEWEST_OPTIONS} wrong options among the training questions. "
            f"Got {right} right and {wrong} wrong; give more questions."
        )
    return SplitOptions(Examples(features[~held_out], y[~held_out]), Examples(features[held_out], y[held_out]))


def load_or_fit_ccps(context: FitContext, settings: CcpsSettings) -> Ccps:
    """Return the networks in the method's folder if they were fitted on the same questions, else fit and keep them."""
    mask = trained_on(context.train.states.questions, settings)
    path, tensors = context.folder / "ccps.json", context.folder / "ccps.safetensors"
    key = digest([context.train.states.manifest, *context.division])
    record, data = kept_record(path), tensors.read_bytes() if tensors.exists() else b""
    # earlier versions kept no digest of the networks
    if record and data and record.get("key") == key and record.get("tensors", digest_bytes(data)) == digest_bytes(data):
        context.note("chosen", record["chosen"])
        return load_ccps(load_tensors(data), record["chosen"], settings)
    questions = [q for q, inside in zip(context.train.prompted(), mask, strict=True) if inside]
    split = split_options(context, mask, read_features(context, context.train.name, questions, settings))
    with context.bar("training", n_steps(settings), "steps") as advance:
        trainer = Trainer(split, settings.radii, seed=context.common.seed, on_step=advance)
        chosen = choose_design(trainer, settings)
    fitted = trainer.fits[chosen][1]
    data = save_tensors(fitted.tensors())
    write_atomic(tensors, data)
    tried = [design.record() | {"auroc": auroc} for design, (auroc, _) in trainer.fits.items()]
    write_record(path, {"key": key, "chosen": chosen.record(), "tried": tried, "tensors": digest_bytes(data)})
    context.note("chosen", chosen.record())
    return fitted


def load_ccps(tensors: dict[str, Tensor], chosen: dict[str, Any], settings: CcpsSettings) -> Ccps:
    """Return the method from its saved tensors and the record of its design."""
    sizes = {"embedding": chosen["embedding"], "classifier": tuple(chosen["classifier"])}
    standardiser = Standardiser(tensors["mean"].numpy(), tensors["scale"].numpy())
    confidence = Confidence.from_tensors(tensors, replace(settings.network, **sizes))
    return Ccps(tensors["columns"].numpy(), standardiser, confidence)


def fit_ccps(context: FitContext, settings: CcpsSettings) -> Predict:
    """Fit on the training questions; test questions are scored in a pass of their own, which reads their features."""
    fitted = load_or_fit_ccps(context, settings)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        features, options = read_features(context, test.name, test.prompted(), settings), test.states.table.options
        methods = {"": fitted}
        if settings.adapt and test.adapt:
            methods[" adapted"] = adapt_ccps(context, fitted, test.adapt(), settings)
        return {
            name: predictions_of(f"ccps{name}", test.states, options.normalise(method(features)))
            for name, method in methods.items()
        }

    return predict


def adapt_ccps(context: FitContext, fitted: Ccps, questions: Sequence[Question], settings: CcpsSettings) -> Ccps:
    """Return the method with its classifier trained further on questions of another task."""
    if len(questions) < FEWEST_OPTIONS:
        raise CoralError(
            f"CCPS adapts on at least {FEWEST_OPTIONS} questions. Got {len(questions)}; leave adapt out of the test."
        )
    features = read_features(context, f"{questions[0].task} adaptation", questions, settings)
    y = np.concatenate([np.arange(len(q.options)) == q.answer for q in questions]).astype(np.float64)
    examples = Examples(fitted.standardiser(features[:, fitted.columns]), y)
    with context.bar("adapting", settings.steps, "steps") as advance:
        confidence = adapt_classifier(
            fitted.confidence, examples, settings.network, seed=context.common.seed, on_step=advance
        )
    return replace(fitted, confidence=confidence)


CCPS = Method(options_of(CcpsSettings), fit_ccps, check_training=refuse_other_tasks, from_scores=False)
