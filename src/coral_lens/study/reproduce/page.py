"""Put what the parts have left into one page in the order of the paper, with its tables and figures as files. Computes nothing.

Everything is read from the records of the parts, so a page can be made again at any time, and of what is done so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from coral_lens.errors import CoralError
from coral_lens.report.figures.paper import ablation_figure, dimension_figure, head_figure, layer_figure
from coral_lens.report.figures.style import DrawnPicture, Picture
from coral_lens.report.pages.reproduction import (
    ClaimLine,
    PaperSection,
    Reproduction,
    render_reproduction,
    tally,
)
from coral_lens.report.tables.paper_shape import Block, model_names, shape_latex, shape_markdown, table_one, table_two
from coral_lens.report.tables.study import StudyTable, read_tables
from coral_lens.storage.escape import for_markdown
from coral_lens.storage.files import digest, file_name, write_atomic
from coral_lens.study.reproduce.claim import Claim
from coral_lens.study.reproduce.claims import claims_of_record, claims_of_tables
from coral_lens.study.reproduce.parts import PARTS
from coral_lens.study.reproduce.scale import Scale

Built = TypeVar("Built")
ALL_MODELS = "all models"
STUDIES = ("probe1", "probe2", "transfer", "corrsteer")
ABSTRACT = (
    "Relative changes of each value, averaged over models and tasks: three benchmarks of Table 1, four of Table 2."
)


class Figures:
    """The figures of a page that is written again and again: each is drawn once, and once more when what it shows has changed."""

    def __init__(self) -> None:
        self._drawn: dict[Path, tuple[str, DrawnPicture]] = {}

    def drawn(self, record: Any, draw: Callable[..., Picture], path: Path) -> DrawnPicture:
        """Return the figure of a record, in files of this path but for their endings.

        What cannot be drawn fails here, and not when the page is rendered.
        """
        key = digest(record)
        known = self._drawn.get(path)
        if known is None or known[0] != key:
            self._drawn[path] = known = (key, drawn_into(draw(record, name=path.name), path))
        return known[1]


def drawn_into(picture: Picture, path: Path) -> DrawnPicture:
    """Draw a picture into its files."""
    files = picture.files()
    for ending, data in files.items():
        write_atomic(path.with_name(f"{path.name}{ending}"), data)
    return DrawnPicture(picture.name, picture.caption, files[".svg"].decode())


@dataclass(frozen=True)
class Findings:
    """What the parts of all models have left."""

    models: tuple[str, ...]
    scale: Scale
    out: Path
    records: Mapping[str, Mapping[str, dict[str, Any]]]
    """By model, then by part."""
    failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By model, then by part: why it is missing."""
    broken: dict[str, dict[str, str]] = field(default_factory=dict)
    """By model, then by part: why a piece of what it has left cannot be shown; filled while the page is built."""
    figures: Figures = field(default_factory=Figures)
    """Those that were drawn for the page before."""

    @cached_property
    def names(self) -> dict[str, str]:
        """What each model is called on the page, no two alike."""
        return model_names(self.models)

    def of(self, part: str) -> dict[str, dict[str, Any]]:
        """Return the records of a part by model, of the models that have one."""
        return {m: self.records[m][part] for m in self.models if part in self.records.get(m, {})}

    def tables(self, part: str) -> list[StudyTable]:
        """Return the tables of the study of a part, of all models whose tables can be read."""
        return [
            table
            for model, record in self.of(part).items()
            for table in self.built(part, model, partial(tables_of_record, self.out, record)) or ()
        ]

    def built(self, part: str, model: str, build: Callable[[], Built]) -> Built | None:
        """Return a piece of the page; one that cannot be built is named in the place of its part, and stops no other."""
        try:
            return build()
        except CoralError as error:
            reason = str(error)
        except Exception as error:  # one figure must not take the others down
            what = str(error).splitlines()[0] if str(error) else "no more is known"
            reason = f"it cannot be shown ({type(error).__name__}: {what})."
        self.broken.setdefault(model, {})[part] = reason
        return None

    def missing(self, *parts: str) -> tuple[str, ...]:
        """Say which of some parts are missing, and why."""
        return tuple(
            f"{PARTS[part].title}, {self.names[model]}: {reason}"
            for model in self.models
            for part, reason in {**self.failed.get(model, {}), **self.broken.get(model, {})}.items()
            if part in parts
        )

    def links(self, *parts: str) -> tuple[tuple[str, str], ...]:
        """Return the reports of studies."""
        return tuple(
            (f"{PARTS[part].title}, {self.names[model]}", record["report"])
            for part in parts
            for model, record in self.of(part).items()
            if "report" in record
        )


def write_page(findings: Findings, provenance: Mapping[str, Any]) -> Path:
    """Write the page, the two tables as LaTeX and Markdown, and the figures; return the page."""
    out, tables = findings.out, {part: findings.tables(part) for part in STUDIES}
    claims = claims_of(findings, tables)
    steering = table_one([*tables["probe1"], *tables["probe2"]], findings.models)
    transfer = table_two(tables["transfer"], findings.models)
    sections = page_sections(findings, claims, steering, transfer)
    lines = [line for section in sections for line in section.claims]
    page = Reproduction(
        title=f"The paper on {', '.join(findings.names.values())}",
        headline=headline(findings, lines),
        sections=sections,
        provenance=provenance,
    )
    write_atomic(out / "tables.tex", "\n".join((shape_latex(steering), shape_latex(transfer))).encode())
    write_atomic(out / "tables.md", markdown_of(page, steering, transfer).encode())
    target = out / "reproduction.html"
    write_atomic(target, render_reproduction(page).encode())
    return target


def tables_of_record(out: Path, record: Mapping[str, Any]) -> list[StudyTable]:
    """Return the tables of a study, from its folder."""
    about = {name: record[name] for name in ("model", "mixture", "tests")}
    return read_tables(out / record["run"], **about)


def claims_of(findings: Findings, tables: Mapping[str, Sequence[StudyTable]]) -> list[Claim]:
    """Return every claim that can be answered, those of one statement beside each other."""
    claims = claims_of_tables(tables)
    for part in PARTS:
        for model, record in findings.of(part).items():
            claims += findings.built(part, model, partial(claims_of_record, part, model, record)) or []
    order = list(dict.fromkeys(claim.statement for claim in claims))
    return sorted(claims, key=lambda claim: order.index(claim.statement))


def headline(findings: Findings, claims: Sequence[ClaimLine]) -> tuple[str, ...]:
    """Say how many claims agree, and what was left out."""
    n_missing = sum(len(reasons) for by in (findings.failed, findings.broken) for reasons in by.values())
    left = "; ".join(f"{name}: {reason}" for name, reason in findings.scale.left_out.items())
    sentences = [*counted(findings, claims), f"Scale {findings.scale.name}. {findings.scale.about}"]
    if left:
        sentences.append(f"Left out at this scale: {left}.")
    if n_missing:
        sentences.append(f"Parts that are missing: {n_missing}; the reason stands in the place of each.")
    return tuple(sentences)


def counted(findings: Findings, claims: Sequence[ClaimLine]) -> list[str]:
    """Say how many claims agree: of the one model, or of each of several and of what is counted over all of them."""
    counts = tally(claims)
    if len(findings.models) == 1:
        return [
            f"Of {len(claims)} statements of the paper that could be looked at here, this model agrees with {counts['agrees']} "
            f"and does not agree with {counts['does not agree']}; of {counts['cannot be told']} it cannot be told from these "
            "questions."
        ]
    by_model = {name: tally([c for c in claims if c.model == name]) for name in (*findings.names.values(), ALL_MODELS)}
    return [
        f"{len(claims)} times a statement of the paper could be looked at here. Those that agree, do not agree, and cannot be "
        "told from these questions: "
        + "; ".join(f"{name} {', '.join(map(str, n.values()))}" for name, n in by_model.items())
        + "."
    ]


def claim_line(claim: Claim, findings: Findings) -> ClaimLine:
    """Return a claim as the page shows it: with its model, where there are several."""
    model = ALL_MODELS if claim.model is None else findings.names[claim.model]
    several = len(findings.models) > 1
    return ClaimLine(
        claim.statement, claim.paper, claim.ours, claim.said, claim.sentence, model=model if several else ""
    )


def page_sections(
    findings: Findings, claims: Sequence[Claim], steering: Sequence[Block], transfer: Sequence[Block]
) -> tuple[PaperSection, ...]:
    """Return the sections in the order of the paper."""

    def section(anchor: str, title: str, where: str, *parts: str, **more: Any) -> PaperSection:
        lines = (claim_line(c, findings) for c in claims if c.section == anchor)
        missing, links = findings.missing(*parts), findings.links(*parts)
        return PaperSection(anchor, title, where, claims=tuple(lines), missing=missing, links=links, **more)

    return (
        section(
            "abstract", "Abstract", "the averages that it states", "probe1", "probe2", "transfer", words=(ABSTRACT,)
        ),
        section(
            "steering",
            "CORAL steering results",
            "4.1, Table 1",
            "probe1",
            "probe2",
            blocks=tuple(steering),
            table="Steering methods across models and benchmarks",
        ),
        section("probe", "What the probe must be, and how strong", "4.1", "depth"),
        section(
            "layers",
            "Layer analysis",
            "4.2, figure of layers",
            "layers",
            pictures=figures(findings, "layers", layer_figure, "Steering by layer"),
        ),
        section(
            "transfer",
            "Transferability",
            "4.3, Table 2",
            "transfer",
            blocks=tuple(transfer),
            table="Transfer of Probe 1 to four benchmarks",
        ),
        section(
            "features",
            "Sparse autoencoders and CorrSteer",
            "5.1, 5.2, figure of ablations",
            "sae",
            "corrsteer",
            pictures=figures(findings, "sae", ablation_figure, "Single features taken out", key="ablation"),
        ),
        section(
            "heads",
            "Attention heads",
            "A.2, figure of heads",
            "heads",
            pictures=figures(findings, "heads", head_figure, "Signal over attention heads"),
        ),
        section(
            "dimensions",
            "Dimensions of the signal",
            "A.3, figure of dimensions",
            "dimensions",
            pictures=figures(findings, "dimensions", dimension_figure, "R² and variance by components"),
        ),
    )


def figures(
    findings: Findings, part: str, draw: Callable[..., Picture], title: str, *, key: str = ""
) -> tuple[tuple[DrawnPicture, str], ...]:
    """Return the figure of a part for each model that has it; `key` names what is drawn where the record holds more."""
    drawn = []
    for model in findings.models:
        record, called = findings.records.get(model, {}).get(part), findings.names[model]
        if record is None:
            continue
        path = findings.out / "figures" / f"{part}-{file_name(called)}"
        build = partial(findings.figures.drawn, record[key] if key else record, draw, path)
        if picture := findings.built(part, model, build):
            drawn.append((picture, f"{title}, {called}"))
    return tuple(drawn)


def markdown_of(page: Reproduction, steering: Sequence[Block], transfer: Sequence[Block]) -> str:
    """Return the page as Markdown: its sentences, the two tables, and the claims."""
    parts = [f"# {for_markdown(page.title)}", *page.headline]
    for section in page.sections:
        parts.append(f"## {section.title} ({section.where})")
        if section.anchor == "steering":
            parts.append(shape_markdown(steering).strip())
        if section.anchor == "transfer":
            parts.append(shape_markdown(transfer).strip())
        parts += [
            f"![{for_markdown(title)}](figures/{picture.name}.svg)\n\n*{picture.caption}*"
            for picture, title in section.pictures
        ]
        if section.claims:
            parts += [claims_markdown(section.claims), "\n".join(map(claim_sentence, section.claims))]
        parts += [f"Missing: {for_markdown(reason)}" for reason in section.missing]
    return "\n\n".join(parts) + "\n"


def claims_markdown(claims: Sequence[ClaimLine]) -> str:
    """Return claims as a table, with a column of models where there are several."""
    named = any(c.model for c in claims)
    heads = ["the paper says", *(["model"] if named else []), "its number", "ours", "so it"]
    rows = [[c.statement, *([for_markdown(c.model)] if named else []), c.paper, c.ours, c.said] for c in claims]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def claim_sentence(claim: ClaimLine) -> str:
    """Return what is said of a claim, as a line of a list."""
    return f"- {for_markdown(claim.model)}: {claim.sentence}" if claim.model else f"- {claim.sentence}"
