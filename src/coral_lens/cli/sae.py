"""Commands of sparse autoencoders: sae train, select, ablate, steer, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import Asking, Machine, ModelName, flat
from coral_lens.data.settings import Style
from coral_lens.errors import CoralError, need

if TYPE_CHECKING:
    from coral_lens.sae.folder import FeatureStudy


app = typer.Typer(
    no_args_is_help=True, help="Sparse autoencoders: train them, select features, ablate them, steer by them."
)


@app.command()
@flat
def train(
    out: Annotated[Path, typer.Option(help="Folder for the autoencoders (OUT/4x ...), states and checkpoints.")],
    layer: Annotated[int, typer.Option(help="The layer whose residual stream is taken apart.")],
    source: Annotated[
        list[str] | None, typer.Argument(help="TASK[:SPLIT] or files of questions whose token states are used.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Use pooled answer states of a folder of `coral extract` instead; no model runs."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, local folder, .gguf file, or smollm2 (embedded). Default: smollm2.")
    ] = None,
    expansion: Annotated[
        list[int] | None, typer.Option(help="Features per dimension, trained in one pass. Default: 4, 8, 16.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="States to collect, at least, if the questions have so many; 0: all. Default: 500000."),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Tokens to use: `all`, `answer` or `context`. Default: all.")
    ] = None,
    penalty: Annotated[float, typer.Option(help="The paper's lambda, of z-scored states.")] = 4.0,
    top_k: Annotated[int, typer.Option(help="Keep so many features of a state instead of a penalty.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="After warm-up.")] = 3e-3,
    batch_size: Annotated[int, typer.Option(help="States in a step.")] = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the states.")] = 1,
    massive: Annotated[
        float,
        typer.Option(help="Leave out states so many times longer than the median (attention sinks); 0: none."),
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the draw of questions, the first weights and the order.")] = 0,
    *,
    style: Style,
    asking: Asking,
    machine: Machine,
) -> None:
    """Train sparse autoencoders on the token states of a layer, and say how good they are on states held out.

    Example: `coral sae train commonsense_qa_cloze:train --data DIR --layer 16 --out sae`
    """
    from coral_lens.cli.printing import print_quality
    from coral_lens.engine.activations import ActivationStore
    from coral_lens.engine.readers import TOKENS
    from coral_lens.progress import shown
    from coral_lens.sae.quality import refuse_dead
    from coral_lens.sae.states import Sampling
    from coral_lens.sae.train import TrainingSettings, train_on_store, train_on_tokens

    if bool(source) == bool(store):
        raise CoralError("Give questions, whose token states are used, or --store FOLDER, whose pooled states are.")
    if store and (model, where, tokens) != (None, None, None):
        raise CoralError(
            "--store brings states of its own, so that --model, --where and --tokens mean nothing; leave them out."
        )
    if where not in (None, *TOKENS):
        raise CoralError(f"--where must be one of {', '.join(TOKENS)}. Got {where!r} instead.")
    settings = TrainingSettings(
        expansions=tuple(expansion or (4, 8, 16)),
        penalty=penalty,
        k=top_k,
        learning_rate=learning_rate,
        batch_size=batch_size,
        epochs=epochs,
        massive=massive,
        seed=seed,
    )
    if store:
        quality = train_on_store(ActivationStore(store), out, how=(layer, settings), bar=shown)
    else:
        opened = machine.opener(model or "smollm2")
        questions = asking.gather(source or [], chat=opened if style.chat else None)
        given = {name: value for name, value in (("tokens", tokens), ("where", where)) if value is not None}
        sampling = Sampling(layer, style=style, seed=seed, **given)  # type: ignore[arg-type]
        quality = train_on_tokens(opened(), questions, out, how=(sampling, settings), bar=shown)
    print_quality(quality)
    typer.echo(f"Autoencoders in {out}, in SAELens' layout.")
    refuse_dead(quality)


StudyFolder = Annotated[Path, typer.Option("--study", help="Folder made by `coral sae select`.")]


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
def select(
    source: Annotated[list[str], typer.Argument(help="TASK[:SPLIT] or files of labelled questions.")],
    sae: Annotated[Path, typer.Option(help="Folder of an autoencoder, such as SAE/16x; SAELens' own will do.")],
    out: Annotated[Path, typer.Option(help="Folder for what is found of its features.")],
    model: ModelName = "smollm2",
    k: Annotated[int, typer.Option(help="Features to choose by each criterion.")] = 300,
    base: Annotated[str, typer.Option(help="Base score: `sum`, `token` or `char`.")] = "token",
    layer: Annotated[int | None, typer.Option(help="Of an autoencoder whose configuration does not say it.")] = None,
    *,
    style: Style,
    asking: Asking,
    machine: Machine,
) -> None:
    """Choose features by their correlation with the residual, and by what they should do to a ridge probe.

    Example: `coral sae select commonsense_qa_cloze:train --limit 2000 --sae sae/16x --out features --data DIR`
    """
    from coral_lens.cli.printing import print_selection
    from coral_lens.lens.rules import BASE_SCORES
    from coral_lens.progress import shown
    from coral_lens.sae.select import Selecting, select_features

    if base not in BASE_SCORES:
        raise CoralError(f"Unknown base {base!r}; use one of {', '.join(BASE_SCORES)}.")
    opened = machine.opener(model)
    questions = asking.gather(source, chat=opened if style.chat else None)
    what = Selecting(sae, k, base, style, layer, asking.num_fewshot, asking.fixed_shots)  # type: ignore[arg-type]
    print_selection(select_features(opened(), questions, out, what, bar=shown).record["selection"])
    typer.echo(f"Features in {out}; ablate them with `coral sae ablate SOURCE --study {out}`.")


@app.command()
@flat
def ablate(
    source: Annotated[
        list[str], typer.Argument(help="TASK[:SPLIT] or files; questions that select used are left out.")
    ],
    study: StudyFolder,
    model: Annotated[str | None, typer.Option(help="Default: the model of the study.")] = None,
    by: Annotated[str, typer.Option(help="Whose features: `correlation` or `impact`.")] = "correlation",
    features: Annotated[int, typer.Option(help="So many of the selected features.")] = 300,
    random: Annotated[int, typer.Option(help="Further features drawn at random, for comparison.")] = 100,
    questions: Annotated[int, typer.Option(help="At most so many questions.")] = 300,
    where: Annotated[str, typer.Option(help="Patch `all` positions, as the paper, or `answer` tokens.")] = "all",
    keep_error: Annotated[bool, typer.Option("--keep-error", help="Keep what the reconstruction misses.")] = False,
    *,
    asking: Asking,
    machine: Machine,
) -> None:
    """Take features out one by one and measure the change of accuracy and ECE against the reconstruction.

    Example: `coral sae ablate commonsense_qa_cloze:train --study features --data DIR`
    """
    from coral_lens.cli.printing import print_ablation
    from coral_lens.progress import shown
    from coral_lens.sae.ablate import AblationPlan, ablate_features
    from coral_lens.sae.folder import FeatureStudy, unseen

    if where not in ("all", "answer"):
        raise CoralError(f"--where must be all or answer. Got {where!r} instead.")
    known = FeatureStudy(study)
    opened = machine.opener(model or known.record["model"])
    chat = opened if known.record["style"]["chat"] else None
    asked = unseen(known, as_selected(asking, known).gather(source, chat=chat), questions)
    plan = AblationPlan(by, features, random, where, keep_error)  # type: ignore[arg-type]
    print_ablation(ablate_features(opened(), asked, known, plan, bar=shown))
    typer.echo(f"In {study}/ablation-{plan.name}.json.")


@app.command()
@flat
def steer(
    study: StudyFolder,
    validation: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file; what was used before is left out.")],
    test: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of questions that nothing was chosen on.")],
    model: Annotated[str | None, typer.Option(help="Default: the model of the study.")] = None,
    ablation: Annotated[
        str, typer.Option(help="Whose effects are the weights, e.g. `impact-all`.")
    ] = "correlation-all",
    questions: Annotated[int, typer.Option(help="At most so many validation questions.")] = 300,
    alpha_acc: Annotated[float, typer.Option(help="Weight of the change of accuracy.")] = 1.0,
    alpha_cal: Annotated[float, typer.Option(help="Weight of the change of ECE.")] = 1.0,
    criterion: Annotated[str, typer.Option(help="Validation metric that chooses features and gamma.")] = "brier",
    *,
    asking: Asking,
    machine: Machine,
) -> None:
    """Steer by the features whose ablation hurts; how many and how strongly is chosen on validation questions.

    Example: `coral sae steer --study features --validation commonsense_qa_cloze:train --test commonsense_qa_cloze:validation`
    """
    from coral_lens.cli.printing import print_steering
    from coral_lens.metrics.scores import metric_named
    from coral_lens.progress import shown
    from coral_lens.sae.folder import FeatureStudy, without_known
    from coral_lens.sae.steer import SteerPlan, Weighing, steer_by_features

    metric_named(criterion)
    known = FeatureStudy(study)
    opened = machine.opener(model or known.record["model"])
    chat = opened if known.record["style"]["chat"] else None
    asking = as_selected(asking, known)
    fresh = without_known(asking.gather(validation, chat=chat), known.seen)[:questions]
    plan = SteerPlan(ablation, Weighing(alpha_acc, alpha_cal), criterion=criterion)
    asked = asking.gather(test, chat=chat)
    print_steering(steer_by_features(opened(), fresh, asked, known, how=(plan, shown)))
    typer.echo(f"In {study}/steering.json.")


@app.command()
def report(
    study: Annotated[Path, typer.Argument(help="Folder made by `coral sae select`.")],
    feature: Annotated[list[int] | None, typer.Option(help="Show this feature; may be given several times.")] = None,
) -> None:
    """Make figures and features.html: effects of ablation and steering, and what single features respond to.

    Example: `coral sae report features --feature 812`
    """
    from coral_lens.report.pages.features import write_features
    from coral_lens.sae.dashboard import ablations_of, dashboard_of
    from coral_lens.sae.folder import FeatureStudy
    from coral_lens.storage.files import read_json

    need("report", by="coral sae report")
    known = FeatureStudy(study)
    steering = study / "steering.json"
    page = write_features(
        study,
        dashboard_of(known, feature or ()),
        ablations=ablations_of(known),
        steering=read_json(steering) if steering.exists() else None,
    )
    typer.echo(f"{page}")
