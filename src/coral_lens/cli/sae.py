"""Commands of sparse autoencoders: sae train, select, ablate, steer, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coral_lens.cli.options import Asking, Machine, ModelChoice, flat
from coral_lens.errors import CoralError, need
from coral_lens.sae.settings import AblationPlan, Sampling, Selecting, SteerPlan, TrainingSettings
from coral_lens.storage.settings import Count, Settings

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.sae.folder import FeatureStudy


app = typer.Typer(
    no_args_is_help=True, help="Sparse autoencoders: train them, select features, ablate them, steer by them."
)

# ----------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Training(Settings):
    """Where autoencoders go, and which states they are trained on."""

    out: Path
    """Folder for the autoencoders (OUT/4x ...), states and checkpoints."""
    settings: TrainingSettings
    """How they are trained."""
    sampling: Sampling
    """Which token states are collected."""
    store: str | None = None
    """Train on the pooled answer states of `coral extract` in this folder, or at this address, instead; no model runs."""

    def refuse_mixture(self, source: list[str], model: ModelChoice) -> None:
        """Refuse questions together with a store, neither of them, and options that mean nothing for a store."""
        if bool(source) == bool(self.store):
            raise CoralError("Give questions, whose token states are used, or --store FOLDER, whose pooled states are.")
        plain = Sampling(self.sampling.layer)
        chosen = (model.model, self.sampling.where, self.sampling.tokens)
        if self.store and chosen != (ModelChoice().model, plain.where, plain.tokens):
            raise CoralError(
                "--store brings states of its own, so --model, --where and --tokens mean nothing; leave them out."
            )


@app.command()
@flat
def train(
    source: Annotated[
        list[str] | None, typer.Argument(help="TASK[:SPLIT] or files of questions whose token states are used.")
    ] = None,
    *,
    training: Training,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Train sparse autoencoders on the token states of a layer, and say how good they are on states held out.

    Example: `coral sae train commonsense_qa_cloze:train --data DIR --layer 16 --out sae`
    """
    from coral_lens.cli.printing import print_quality
    from coral_lens.sae.quality import refuse_dead
    from coral_lens.sae.train import refuse_other_folder

    training.refuse_mixture(source or [], model)
    refuse_other_folder(training.out, training.settings)
    quality = train_on_questions(source, training, asking, model) if source else train_on_pooled(training, model)
    print_quality(quality)
    typer.echo(f"Autoencoders in {training.out}, in SAELens' layout.")
    refuse_dead(quality)


def train_on_questions(source: list[str], training: Training, asking: Asking, model: ModelChoice) -> dict[str, Any]:
    """Train on the token states of questions."""
    from coral_lens.sae.train import TokenTraining, train_on_tokens
    from coral_lens.storage.progress import shown

    opened, sampling = model.opener(), training.sampling
    questions = asking.gather(source, chat=opened if sampling.style.chat else None)
    return train_on_tokens(opened(), questions, training.out, TokenTraining(sampling, training.settings), bar=shown)


def train_on_pooled(training: Training, model: ModelChoice) -> dict[str, Any]:
    """Train on the pooled states of a store, on the device that a model would have."""
    from coral_lens.engine.activations import ActivationStore
    from coral_lens.lens.training_data import usable_device
    from coral_lens.sae.train import SaeWork, train_on_store
    from coral_lens.storage.progress import shown

    assert training.store, "there are questions or a store"
    store, layer = ActivationStore(training.store), training.sampling.layer
    work = SaeWork(usable_device(model.machine.device), shown)
    return train_on_store(store, training.out, training.settings, layer=layer, work=work)


# ----------------------------------------------------------------------------------------------------------- features


@app.command()
@flat
def select(
    source: Annotated[list[str], typer.Argument(help="TASK[:SPLIT] or files of labelled questions.")],
    out: Annotated[Path, typer.Option(help="Folder for the selected features, and for their ablation and steering.")],
    *,
    selecting: Selecting,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Choose features by their correlation with the residual, and by what they should do to a ridge probe.

    Example: `coral sae select commonsense_qa_cloze:train --limit 2000 --sae sae/16x --out features --data DIR`
    """
    from coral_lens.cli.printing import print_selection
    from coral_lens.sae.autoencoder import load_autoencoder
    from coral_lens.sae.folder import refuse_other_folder
    from coral_lens.sae.select import select_features
    from coral_lens.storage.progress import shown

    refuse_other_folder(out)
    load_autoencoder(
        selecting.sae, layer=selecting.layer
    )  # one that cannot be read is refused before a model is opened
    opened = model.opener()
    questions = asking.gather(source, chat=opened if selecting.style.chat else None)
    print_selection(select_features(opened(), questions, out, selecting, bar=shown).record["selection"])
    typer.echo(f"Features in {out}; ablate them with `coral sae ablate SOURCE --study {out}`.")


@dataclass(frozen=True)
class SelectedFeatures(Settings):
    """The selected features, and the model that has them."""

    study: Path
    """Folder made by `coral sae select`."""
    questions: Count = 300
    """Measure effects, or choose a steering, on at most this many questions."""
    model: str | None = None
    """By default the model that features were selected of."""
    machine: Machine = Machine()  # noqa: RUF009  (frozen)
    """Where it runs."""

    def opened(self) -> tuple[FeatureStudy, Callable[[], Model]]:
        """Return the folder of features, and a function that gives the model, loaded when it is first called."""
        from coral_lens.sae.folder import FeatureStudy

        study = FeatureStudy(self.study)
        return study, self.machine.opener(self.model or study.record["model"])


def as_selected(asking: Asking, study: FeatureStudy) -> Asking:
    """Return how to ask: after the worked examples that features were selected with; others are refused."""
    shots = study.record["shots"]
    if asking.num_fewshot not in (None, shots["num_fewshot"]) or (asking.fixed_shots and not shots["fixed_shots"]):
        raise CoralError(
            f"The features were selected with num_fewshot {shots['num_fewshot']} and fixed_shots {shots['fixed_shots']}; leave "
            "both options out, or select anew with others."
        )
    return replace(asking, **shots)


@app.command()
@flat
def ablate(
    source: Annotated[
        list[str], typer.Argument(help="TASK[:SPLIT] or files; questions that select used are left out.")
    ],
    *,
    selected: SelectedFeatures,
    plan: AblationPlan,
    asking: Asking,
) -> None:
    """Take features out one by one and measure the change of accuracy and ECE against the reconstruction.

    Example: `coral sae ablate commonsense_qa_cloze:train --study features --data DIR`
    """
    from coral_lens.cli.printing import print_ablation
    from coral_lens.sae.ablate import ablate_features
    from coral_lens.sae.folder import unseen
    from coral_lens.storage.progress import shown

    study, opened = selected.opened()
    chat = opened if study.record["style"]["chat"] else None
    questions = unseen(study, as_selected(asking, study).gather(source, chat=chat), selected.questions)
    print_ablation(ablate_features(opened(), questions, study, plan, bar=shown))
    typer.echo(f"In {selected.study}/ablation-{plan.name}.json.")


@app.command()
@flat
def steer(
    validation: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file; what was used before is left out.")],
    test: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of questions that nothing was chosen on.")],
    *,
    selected: SelectedFeatures,
    plan: SteerPlan,
    asking: Asking,
) -> None:
    """Steer by the features whose ablation hurts; how many and how strongly is chosen on validation questions.

    Example: `coral sae steer --study features --validation commonsense_qa_cloze:train --test commonsense_qa_cloze:validation`
    """
    from coral_lens.cli.printing import print_steering
    from coral_lens.sae.folder import without_known
    from coral_lens.sae.steer import SteerQuestions, steer_by_features
    from coral_lens.storage.progress import shown

    study, opened = selected.opened()
    chat, asking = opened if study.record["style"]["chat"] else None, as_selected(asking, study)
    fresh = without_known(asking.gather(validation, chat=chat), study.seen)[: selected.questions]
    questions = SteerQuestions(fresh, asking.gather(test, chat=chat))
    print_steering(steer_by_features(opened(), questions, study, plan, bar=shown))
    typer.echo(f"In {selected.study}/steering.json.")


@app.command()
def report(
    study: Annotated[Path, typer.Argument(help="Folder made by `coral sae select`.")],
    feature: Annotated[
        list[int] | None, typer.Option(metavar="NUMBER", help="Show this feature; may be given several times.")
    ] = None,
) -> None:
    """Make figures and features.html: effects of ablation and steering, and what single features respond to.

    Example: `coral sae report features --feature 812`
    """
    from coral_lens.report.pages.features import write_features
    from coral_lens.sae.dashboard import ablations_of, dashboard_of
    from coral_lens.sae.folder import FeatureStudy
    from coral_lens.storage.files import read_record

    need("report", by="coral sae report")
    features = FeatureStudy(study)
    steering = study / "steering.json"
    page = write_features(
        study,
        dashboard_of(features, feature or ()),
        ablations=ablations_of(features),
        steering=read_record(steering, remedy="run `coral sae steer` again") if steering.exists() else None,
    )
    typer.echo(f"{page}")
