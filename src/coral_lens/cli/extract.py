"""The command that scores questions and keeps states: in one process, in parts, or only reckoned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import Asking, ModelChoice, flat
from coral_lens.data.settings import Style
from coral_lens.engine.settings import StatePlaces
from coral_lens.errors import CoralError
from coral_lens.scale.settings import RaySettings
from coral_lens.storage.escape import for_terminal
from coral_lens.storage.parts import Part, parse_part
from coral_lens.storage.settings import Layers, Option, Settings, parse_layers

if TYPE_CHECKING:
    from coral_lens.engine.activations import ActivationStore
    from coral_lens.engine.model import Model
    from coral_lens.engine.planned import Extraction
    from coral_lens.engine.reckoning import Reckoned
    from coral_lens.engine.wanted import Wanted
    from coral_lens.records import Question

app = typer.Typer()


def parse_blocks(text: str, option: str) -> tuple[int, ...] | None:
    """Return the blocks of `1-30`, or None for `all`."""
    return None if text == "all" else parse_layers(text, option)


@dataclass(frozen=True)
class KeptStates(Settings):
    """What is kept of each option."""

    layers: Layers = None
    """Layers to keep, such as `12-20` or `0,16`; by default all."""
    heads: Annotated[tuple[int, ...] | None, Option(read=parse_blocks)] = ()
    """Keep the heads of these blocks too, such as `1-30`, or `all`; by default none."""
    read: StatePlaces = ()
    """Where states are read, with commas between: `answer` (the option's own tokens, the default), `listed` (its text where the
    prompt lists it), `context` (the last token before it)."""
    neutral: bool = False
    """Score options after a neutral context too, for the base rule `pmi`."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""

    def extraction(self, model: Model) -> Extraction:
        """Return what is extracted of a model."""
        return self.wanted.of(model)

    @property
    def wanted(self) -> Wanted:
        """What is extracted of whatever model."""
        from coral_lens.engine.wanted import Wanted

        return Wanted(self.layers, self.heads, self.read or ("answer",), self.neutral, self.style)


@dataclass(frozen=True)
class Sharing(Settings):
    """Several processes on one store."""

    part: Annotated[Part | None, Option(read=parse_part)] = None
    """Compute this share of the shards alone, such as 3/16; other processes compute the others in the same folder."""
    finish: bool = False
    """Check that all parts of the store are there, and say what is missing. Needs no questions and no model."""
    plan: bool = False
    """Say how many hours, bytes and shards it takes, for these questions or for a --case, and stop; no model is loaded."""
    case: tuple[str, ...] = ()
    """What the plan shall assume, such as questions=1000000, devices=64 or price=2.5; may be given several times."""
    mixed: bool = False
    """Go on with a store that was begun on another kind of device, although it rounds in another way."""


@app.command()
@flat
def extract(
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="TASK[:SPLIT], or a file of questions (.jsonl, .csv, .parquet, ...)."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="STORE", help="Folder for the activation store, or an address such as s3://bucket/states."
        ),
    ] = None,
    *,
    kept: KeptStates,
    sharing: Sharing,
    spread: RaySettings,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Score questions and keep the pooled hidden states of each option.

    Example: `coral extract commonsense_qa_cloze:validation --out states/csqa --layers 12-20`
    """
    from coral_lens.engine.extract import extract as run
    from coral_lens.engine.parts import extract_part, finish_store
    from coral_lens.storage.progress import shown

    if sharing.case and not sharing.plan:
        raise CoralError("--case describes what --plan reckons with; add --plan, or leave it out.")
    if sharing.plan:
        return print_case(asking.gather(source or []), model, kept, sharing.case)
    if out is None:
        raise CoralError("Give --out, a folder for the activation store; only --plan needs none.")
    if sharing.finish:
        return print_store(finish_store(out), out)
    if not source:
        raise CoralError("Give questions: TASK[:SPLIT] or a file; only --finish and --plan need none.")
    spread.refuse_without_ray()
    if spread.ray is not None:
        if sharing.part:
            raise CoralError(
                "--part is for processes of your own, --ray has workers of its own; leave one of them out."
            )
        return extract_by_workers(
            spread,
            asking.gather(source, chat=model.opener(folder=out) if kept.style.chat else None),
            out,
            replace(kept.wanted, mixed=sharing.mixed),
            model,
        )
    loaded = model.opener(folder=out)
    questions = asking.gather(source, chat=loaded if kept.style.chat else None)
    extraction = replace(kept.extraction(loaded()), mixed=sharing.mixed)
    if sharing.part:
        done = extract_part(loaded(), questions, out, sharing.part, extraction=extraction, bar=shown)
        return typer.echo(f"{done.words} in {out}")
    with shown("extracting", len(questions), "questions") as advance:
        print_store(run(loaded(), questions, out, extraction=extraction, progress=advance), out)


def extract_by_workers(
    spread: RaySettings, questions: list[Question], out: str, wanted: Wanted, model: ModelChoice
) -> None:
    """Fill a store on a Ray cluster; the model is loaded by the workers alone."""
    from coral_lens.scale.cluster import connected
    from coral_lens.scale.extract import Spread, extract_on_ray
    from coral_lens.storage.progress import shown

    def tell(said: str) -> None:
        typer.echo(for_terminal(said), err=True)

    with connected(spread) as cluster:
        tell(f"{cluster.workers} worker(s) load {model.model} ...")
        workers = Spread(cluster, model.source(out), tell)
        with shown("extracting", len(questions), "questions") as advance:
            store = extract_on_ray(workers, questions, out, wanted=wanted, progress=advance)
    print_store(store, out)


def print_case(questions: list[Question], model: ModelChoice, kept: KeptStates, facts: tuple[str, ...]) -> None:
    """Print what an extraction takes: of these questions with this model, as far as nothing else is said of the case."""
    from coral_lens.engine.extract import SHARD_BYTES
    from coral_lens.engine.loading import load_outline
    from coral_lens.engine.planned import BARE_ROW_BYTES
    from coral_lens.engine.reckoning import described, known_case, reckon
    from coral_lens.lens.training_data import usable_device

    named = {fact.partition("=")[0].strip() for fact in facts}
    outline = None if {"layers", "width"} <= named else load_outline(model.model)
    device = usable_device(model.machine.device)
    n_layers, places = len(kept.layers) if kept.layers else None, len(kept.wanted.read)
    known = known_case(questions, outline, kept=n_layers, device=device, places=places)
    if kept.heads != ():
        raise CoralError("--plan knows nothing of heads: they are as large as the states of their blocks.")
    print_reckoned(reckon(described(facts, known), shard_bytes=SHARD_BYTES, bare_row_bytes=BARE_ROW_BYTES))


def print_store(store: ActivationStore, out: str) -> None:
    """Print in a line what a finished store holds."""
    size = store.place.n_bytes() / 2**20
    parts = f"{len(store.layers)} layers"
    if len(store.places) > 1:
        parts += f" at {' and '.join(store.places)}"
    if store.blocks:
        parts += f", the heads of {len(store.blocks)} blocks"
    typer.echo(f"{store.n_questions:,} questions, {parts}, {size:,.0f} MiB in {out}")


def print_reckoned(reckoned: Reckoned) -> None:
    """Print what an extraction takes, with what that was reckoned from."""
    from coral_lens.storage.files import size_text
    from coral_lens.storage.progress import duration

    case = reckoned.case
    kept = case.layers + 1 if case.kept is None else case.kept
    places = f" at {case.places} places" if case.places > 1 else ""
    lines = {
        "questions": f"{case.questions:,}, with {case.options:.3g} options and {case.tokens:,.0f} tokens each",
        "model": f"{case.layers} blocks of width {case.width:,}; the states of {kept} layers are kept{places}",
        "machine": f"{case.devices} device(s), {case.speed:.3g} x 10^12 operations/s each",
        "tokens": f"{reckoned.n_tokens:,.3g}",
        "time": f"{duration(reckoned.hours * 3600)} ({reckoned.device_hours:,.3g} device hours)",
        "states": f"{size_text(reckoned.n_bytes)} in {reckoned.n_shards:,} shards",
        "written": f"{size_text(round(reckoned.bytes_per_second))}/s and {reckoned.shards_per_second:.3g} shards/s, together",
        "journal": size_text(reckoned.journal_bytes),
        "memory": f"{size_text(reckoned.memory)} for prompts where it is planned",
    }
    if case.price:
        lines["price"] = f"{reckoned.price:,.2f} ({reckoned.price_per_million:,.2f} for a million questions)"
    for name, line in lines.items():
        typer.echo(f"{name:<10}{line}")
    typer.echo("An order of magnitude: reckoned, not measured. Change what it assumes with --case, such as speed=100.")
