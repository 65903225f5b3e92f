"""The parts of the paper: what each calls, and the record that it leaves. Each can be run alone, and goes on where it was.

A record is JSON: what the page and the claims read. Everything else a part makes lies in its folders, as the command that it
stands for would have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.analysis.dimensions import analyse_dimensions
from coral_lens.analysis.files import write_analysis
from coral_lens.analysis.folds import divide_into_folds
from coral_lens.analysis.heads import HeadTraining, analyse_heads
from coral_lens.analysis.held_out import tasks_of
from coral_lens.analysis.layers import LayerWork, analyse_layers
from coral_lens.analysis.probes import analyse_probes
from coral_lens.data.splits import sample
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.planned import Extraction, all_blocks, head_outputs
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import prompts_digest
from coral_lens.records import Question
from coral_lens.report.figures.analysis import write_analysis_pictures
from coral_lens.sae.ablate import ablate_features
from coral_lens.sae.folder import FeatureStudy
from coral_lens.sae.select import select_features
from coral_lens.sae.settings import Sampling, Selecting
from coral_lens.sae.steer import SteerQuestions, steer_by_features
from coral_lens.sae.train import TokenTraining, train_on_tokens
from coral_lens.storage.files import digest, file_name
from coral_lens.storage.progress import Bar, silent
from coral_lens.study.config import Source, Study
from coral_lens.study.folders import Folders
from coral_lens.study.plan import Load
from coral_lens.study.reproduce.claim import most_chosen
from coral_lens.study.reproduce.scale import Scale
from coral_lens.study.run import prepare_study, run_prepared
from coral_lens.study.states import Helpers, OpenModel, StudyStates, Surroundings

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

SEED = 0
"""Of the questions that are drawn of a source."""


@dataclass(frozen=True)
class Workplace:
    """Where the parts of one model are done, and with what."""

    scale: Scale
    name: str
    """The model's."""
    folders: Folders
    """Of all parts together; `out` has a folder for each."""
    open_model: OpenModel
    load: Load
    """Gives the questions of a source, as all parts of all models ask them."""
    bar: Bar = silent
    device: str = "cpu"
    helpers: Helpers | None = None
    """Who computes states and fits of studies in place of this process."""
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The records of the parts that are done, by name; filled as they end, so that what is cached here stays."""

    @property
    def work(self) -> Path:
        """The folder for what this model makes."""
        return self.folders.of_model(self.name)

    def out(self, part: str) -> Path:
        """Return the folder for the results of a part."""
        return self.folders.out / file_name(self.name) / part

    def study(self, part: str) -> Study:
        """Return the study of a part."""
        return self.scale.study(part, self.name)

    @cached_property
    def _states(self) -> StudyStates:
        around = Surroundings(self.folders, self.open_model, self.bar, self.device, self.helpers)
        return StudyStates(self.study("probe1"), self.load, self.name, around)

    def store(self, source: Source) -> ActivationStore:
        """Return what the model makes of a source: the store of the studies, if they have one."""
        return self._states.store(source)

    def model(self) -> Model:
        """Return the model, loaded when it is first needed, in the precision of the states that are there."""
        return self._states.model()

    @property
    def layer(self) -> int:
        """The layer that autoencoders are trained at: the best of the layer analysis, or else three fifths up."""
        if "layers" in self.done:
            return most_chosen(self.done["layers"]["single_layers"])
        return round(0.6 * self.model().n_layers)


# -------------------------------------------------------------------------------------------------------------- studies


def run_study_part(place: Workplace, part: str) -> dict[str, Any]:
    """Run the study of a part, and return where its tables are."""
    return run_study_of(place, place.study(part), part)


def run_study_of(place: Workplace, study: Study, part: str) -> dict[str, Any]:
    """Run a study of one model and one mixture."""
    prepared = prepare_study(study, place.folders.data)
    folders = replace(place.folders, out=place.out(part) / "study")
    run_prepared(
        prepared, folders, open_model=place.open_model, bar=place.bar, device=place.device, helpers=place.helpers
    )
    record, (mixture,) = prepared.record(), study.mixture
    run = folders.runs_of(place.name) / file_name(mixture.name)
    return {
        "model": place.name,
        "mixture": mixture.name,
        "run": str(run.relative_to(place.folders.out)),
        "report": str((folders.out / "report.html").relative_to(place.folders.out)),
        "tests": record["tests"],
        "training": record["mixtures"][mixture.name],
    }


def run_corrsteer(place: Workplace) -> dict[str, Any]:
    """Run CorrSteer with the autoencoder that was trained here."""
    folder = Path(place.done["sae"]["autoencoder"])
    study = place.study("corrsteer")
    entries = tuple(
        MethodEntry.model_validate({"kind": m.kind, "name": m.name, **m.options, "sae": str(folder)})
        if m.kind == "corrsteer"
        else m
        for m in study.method
    )
    return run_study_of(place, study.model_copy(update={"method": entries}), "corrsteer")


# ------------------------------------------------------------------------------------------------------------- analyses


def run_layers(place: Workplace) -> dict[str, Any]:
    """Analyse every layer with the paper's own probe."""
    store = place.store(place.scale.home)
    work = LayerWork(place.work / "layers", place.bar, place.device)
    return written(place, "layers", analyse_layers(store, divide_into_folds(store), place.scale.layers, work=work))


def run_depth(place: Workplace) -> dict[str, Any]:
    """Compare probes of different depth, at home and away."""
    stores = [place.store(source) for source in (place.scale.home, place.scale.away)]
    train, settings = tasks_of(stores)[0], FitSettings(lens="ridge", temper=False)
    plan, journal = place.scale.probes, place.work / "probes.jsonl"
    analysis = analyse_probes(stores, train, settings, plan=plan, journal=journal, bar=place.bar, device=place.device)
    return written(place, "probes", analysis, "depth")


def run_heads(place: Workplace) -> dict[str, Any]:
    """Train a network on every head."""
    questions, model = head_questions(place), place.model()
    extraction = Extraction((), readings=head_outputs(model, all_blocks(model)), mixed=place.folders.mixed)
    # other questions, of another scale or limit: another store
    folder = place.work / f"heads-store-{prompts_digest(questions)[:8]}"
    with place.bar("heads", len(questions), "questions") as advance:
        store = extract(model, questions, folder, extraction=extraction, progress=advance)
    training = HeadTraining(device=place.device)
    analysis = analyse_heads(
        store, divide_into_folds(store), training=training, work=place.work / "heads", bar=place.bar
    )
    return written(place, "heads", analysis)


def head_questions(place: Workplace) -> list[Question]:
    """Return the questions at home that heads are read on: drawn, because MMLU's come subject by subject."""
    return sample(place.load(place.scale.home), place.scale.n_heads, seed=SEED)


def run_dimensions(place: Workplace) -> dict[str, Any]:
    """Ask how many directions the signal needs."""
    store, settings = place.store(place.scale.home), place.scale.dimensions
    work = place.work / "dimensions"
    analysis = analyse_dimensions(store, divide_into_folds(store), settings, work=work, bar=place.bar)
    return written(place, "dimensions", analysis)


def written(place: Workplace, name: str, analysis: Any, part: str | None = None) -> dict[str, Any]:
    """Write an analysis with its figures, as `coral analyse` does, and return its record."""
    folder = place.out(part or name)
    record = write_analysis(name, analysis, folder)
    write_analysis_pictures(record, folder)
    return record


# --------------------------------------------------------------------------------------------------------- autoencoders


def run_sae(place: Workplace) -> dict[str, Any]:
    """Train autoencoders, select features, ablate them one by one, and steer by those whose removal harms."""
    scale, model = place.scale.sae, place.model()
    sampling = Sampling(layer=place.layer, tokens=scale.tokens)
    # another layer, or other questions: another folder
    folder = place.work / f"sae-{sampling.layer}-{digest([s.model_dump(mode='json') for s in scale.sources])[:8]}"
    states = [q for source in scale.sources for q in place.load(source)]
    quality = train_on_tokens(model, states, folder, TokenTraining(sampling, scale.training), bar=place.bar)
    parts = sae_questions(place)
    sae = folder / f"{scale.expansion}x"
    selecting = Selecting(sae=sae, k=scale.features, num_fewshot=scale.asked.shots)
    # other questions, of another scale or limit: another selection by the same autoencoder
    features = folder / f"features-{prompts_digest([q for part in parts.values() for q in part])[:8]}"
    select_features(model, parts["selecting"], features, selecting, bar=place.bar)
    study = FeatureStudy(features)
    ablation = ablate_features(model, parts["ablating"], study, scale.ablation, bar=place.bar)
    questions = SteerQuestions(parts["choosing"], parts["testing"])
    try:
        steering = steer_by_features(model, questions, FeatureStudy(features), scale.steering, bar=place.bar)
    except CoralError as error:  # there may be nothing to steer by: what ablation found stands all the same
        steering = {"failed": str(error)}
    return {
        "model": place.name,
        "layer": sampling.layer,
        "autoencoder": str(sae),
        "quality": quality,
        "ablation": ablation,
        "steering": steering,
    }


def sae_questions(place: Workplace) -> dict[str, Sequence[Question]]:
    """Return the questions that select features, those they are ablated on, and those a steering is chosen and tested on.

    They are drawn before they are divided, because MMLU's come subject by subject. A group is never divided: questions on one
    article would select a feature and then test it.
    """
    scale = place.scale.sae
    asked, sizes = place.load(scale.asked), (scale.selecting, scale.ablating, scale.choosing)
    if len(asked) < sum(sizes):
        raise CoralError(
            f"Autoencoders want {sum(sizes):,} questions of {scale.asked.label}, and there are {len(asked):,}; give more with "
            "--data."
        )
    selecting, ablating, choosing = drawn_apart(asked, sizes)
    testing = sample(place.load(scale.tested), scale.testing, seed=SEED)
    return {"selecting": selecting, "ablating": ablating, "choosing": choosing, "testing": testing}


def drawn_apart(questions: Sequence[Question], sizes: Sequence[int]) -> list[list[Question]]:
    """Return sets of about these sizes, drawn by whole groups and in their old order; no group is in two of them."""
    members: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        members.setdefault(question.group, []).append(i)
    order, groups = np.random.default_rng(SEED).permutation(len(members)), list(members.values())
    left, sets = iter(order.tolist()), []
    for size in sizes:
        drawn: list[int] = []
        while len(drawn) < size and (group := next(left, None)) is not None:
            drawn += groups[group]
        sets.append([questions[i] for i in sorted(drawn)])
    return sets


# ---------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Part:
    """One part of the paper."""

    title: str
    where: str
    """Where in the paper it stands."""
    run: Callable[[Workplace], dict[str, Any]]
    needs: tuple[str, ...] = ()
    """Parts that must be done before it."""
    files: Callable[[Path, Mapping[str, Any]], tuple[Path, ...]] = lambda out, record: ()
    """What its record points at, below the folder of results: without these the part is not done."""
    sources: Callable[[Scale, str], tuple[Source, ...]] = lambda scale, model: (scale.home,)
    """The questions that it asks."""


def study_part(part: str, title: str, where: str) -> Part:
    """Return the part that is a study of the same name."""
    return Part(title, where, lambda place: run_study_part(place, part), files=tables_of, sources=sources_of(part))


def tables_of(out: Path, record: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that the tables of a study are read from."""
    return tuple(out / record["run"] / name for name in ("results.json", "seeds.json"))


def sources_of(part: str) -> Callable[[Scale, str], tuple[Source, ...]]:
    """Return what gives the sources of a study, those of its tests and of its guard too."""

    def sources(scale: Scale, model: str) -> tuple[Source, ...]:
        study = scale.study(part, model)
        return (*study.sources, *study.guard)

    return sources


def sae_sources(scale: Scale, model: str) -> tuple[Source, ...]:
    """Return the sources of autoencoders."""
    return (*scale.sae.sources, scale.sae.asked, scale.sae.tested)


PARTS: dict[str, Part] = {
    "probe1": study_part("probe1", "Probe 1: CommonsenseQA and RACE", "4.1, Table 1"),
    "probe2": study_part("probe2", "Probe 2: MMLU", "4.1, Table 1"),
    "layers": Part("Layers, several of them side by side, and gamma", "4.1, 4.2, figure of layers", run_layers),
    "depth": Part("Depth of the probe", "4.1", run_depth, sources=lambda scale, model: (scale.home, scale.away)),
    "transfer": study_part("transfer", "Transfer", "4.3, Table 2"),
    "sae": Part(
        "Sparse autoencoders: ablation and steering",
        "5, figure of ablations",
        run_sae,
        files=lambda out, record: (Path(record["autoencoder"]),),
        sources=sae_sources,
    ),
    "corrsteer": Part(
        "CorrSteer", "5.2", run_corrsteer, needs=("sae",), files=tables_of, sources=sources_of("corrsteer")
    ),
    "heads": Part("Attention heads", "A.2, figure of heads", run_heads),
    "dimensions": Part("Dimensions", "A.3, figure of dimensions", run_dimensions),
}
"""In the order of the paper; the names are those of `settings.PARTS`."""
