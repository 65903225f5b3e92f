"""What our numbers say about the paper's: one claim after another, in its order, each with a sentence. Only arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from coral_lens.report.tables.paper_shape import ROWS, STEERING, TRANSFER, abstract_means, best_and_second, find
from coral_lens.report.tables.study import Improvement, StudyTable, difference_of, verdict
from coral_lens.study.reproduce.claim import (
    Claim,
    Record,
    Said,
    between,
    interval_says,
    is_nothing,
    no_gain_says,
    stated,
    together,
)
from coral_lens.study.reproduce.claims_inside import OF_RECORDS

CORAL = ROWS["CORAL"]


def claims_of_tables(tables: Mapping[str, Sequence[StudyTable]]) -> list[Claim]:
    """Return what is claimed of the tables of studies, by part: counted over the models together, as the paper counts it."""
    steering = [*tables.get("probe1", ()), *tables.get("probe2", ())]
    transfer = tables.get("transfer", ())
    claims = [*abstract_claims([*steering, *transfer]), *table_claims(steering, STEERING, "steering")]
    return [*claims, *table_claims(transfer, TRANSFER, "transfer"), *corrsteer_claims(tables.get("corrsteer", ()))]


def claims_of_record(part: str, model: str, record: Record) -> list[Claim]:
    """Return what is claimed of one model and answered by the record of a part."""
    return [replace(claim, model=model) for claim in OF_RECORDS[part](record)] if part in OF_RECORDS else []


# ----------------------------------------------------------------------------------------------------- tables, abstract


def abstract_claims(tables: Sequence[StudyTable]) -> Iterator[Claim]:
    """Yield the two averages of the abstract, at home and in transfer."""
    for kind, mean in abstract_means(tables).items():
        prefix = "abstract." if kind == "held-out" else "abstract.transfer_"
        cells = f"models: {len({t.model for t in tables})}, cells of the table: {mean.n_cells}"
        for metric, name in (("accuracy", "accuracy"), ("ece", "ECE")):
            if metric in mean.intervals:
                yield abstract_claim(mean, metric, name, f"{stated(f'{prefix}{metric}_gain')}", cells)


def abstract_claim(mean: Improvement, metric: str, name: str, paper: str, cells: str) -> Claim:
    """Return one average; positive is better for both metrics."""
    low, high = mean.intervals[metric]
    value = {"value": mean.means[metric], "low": low, "high": high}
    said = interval_says(value, better="up")
    where = "on other questions of its tasks" if mean.kind == "held-out" else "on tasks it never saw"
    words = {
        "agrees": "CORAL gains",
        "does not agree": "CORAL loses",
        "cannot be told": "a gain cannot be told from none",
    }
    return Claim(
        "abstract",
        f"CORAL improves {name} {where}, in the mean of relative changes",
        f"+{paper}",
        f"{between(value)} %, {cells}",
        said,
        f"{said.capitalize()}: {words[said]} in {name} {where}.",
    )


def table_claims(tables: Sequence[StudyTable], tasks: Sequence[str], section: str) -> Iterator[Claim]:
    """Yield what is claimed of a table: the best accuracy everywhere, and how clear the gains are."""
    models = list(dict.fromkeys(t.model for t in tables))
    mine = [t for m in models for task in tasks if (t := find(tables, m, task)) and has(t, CORAL)]
    if not mine:
        return
    leads, clear = (sum(leads_in(t, "accuracy", clearly=clearly) for t in mine) for clearly in (False, True))
    ups, downs = (sum(verdict(t, CORAL, "accuracy") == sign for t in mine) for sign in (1, -1))
    beaten = sum(is_beaten(t, "accuracy") for t in mine)
    said: Said = "agrees" if clear == len(mine) else "does not agree" if beaten else "cannot be told"
    paper = "9 of 9" if section == "steering" else "12 of 12"
    sentence = (
        f"{said.capitalize()}: CORAL's accuracy is the highest in {leads} of {len(mine)} cells, and clearly so in {clear}; in "
        f"{beaten} another row is clearly ahead. Against the unsteered model it is clearly higher in {ups} and clearly lower in "
        f"{downs}."
    )
    yield Claim(section, "CORAL has the best accuracy", paper, f"{leads} of {len(mine)}", said, sentence)
    better = sum(verdict(t, CORAL, "brier") > 0 for t in mine)
    worse = sum(verdict(t, CORAL, "brier") < 0 for t in mine)
    said = "agrees" if better == len(mine) else "does not agree" if worse > better else "cannot be told"
    yield Claim(
        section,
        "CORAL lowers the Brier score",
        paper,
        f"{better} of {len(mine)} clearly",
        said,
        f"{said.capitalize()}: the Brier score of all options is clearly lower than the unsteered model's in {better} of "
        f"{len(mine)} cells and clearly higher in {worse}.",
    )


def has(table: StudyTable, method: str) -> bool:
    """Whether a table has a row."""
    return any(row.method == method for row in table.rows)


def is_beaten(table: StudyTable, metric: str) -> bool:
    """Whether another row clearly leads all others, or CORAL is clearly behind the unsteered model."""
    best = table.best.get(metric, ())
    return (bool(best) and CORAL not in best) or verdict(table, CORAL, metric) < 0


def leads_in(table: StudyTable, metric: str, *, clearly: bool) -> bool:
    """Whether CORAL has the best value among the paper's rows, or leads all others by the rule that makes values bold."""
    if clearly:
        return CORAL in table.best.get(metric, ())
    rows = {name: row for name, method in ROWS.items() for row in table.rows if row.method == method}
    return "CORAL" in best_and_second(rows, metric)[0]


def corrsteer_claims(tables: Sequence[StudyTable]) -> Iterator[Claim]:
    """Yield whether CorrSteer changes anything."""
    for table in tables:
        comparison = table.comparison("corrsteer")
        if comparison is None:
            continue
        accuracy, ece = (difference_of(comparison, metric) for metric in ("accuracy", "ece"))
        said = together((no_gain_says(accuracy, better="up"), no_gain_says(ece, better="down")))
        changed = f"it changes accuracy by {between(accuracy, digits=2)} and ECE by {between(ece, digits=2)} points"
        if is_nothing(accuracy) and is_nothing(ece):
            said, changed = "cannot be told", "its validation questions chose not to steer, so that nothing was changed"
        yield Claim(
            "features",
            "CorrSteer changes nothing that is significant",
            f"accuracy {stated('corrsteer.accuracy')}, ECE {stated('corrsteer.ece')} against {stated('corrsteer.baseline_ece')}",
            f"accuracy {between(accuracy, digits=2)}, ECE {between(ece, digits=2)} points",
            said,
            f"{said.capitalize()}: {changed}.",
            table.model,
        )
