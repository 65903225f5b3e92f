"""The figures of a run as PNG files: metrics by task, how the lens was chosen, and reliability before and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coral_lens.manifest import write_atomic
from coral_lens.report.curves import curve_picture, gamma_curve, layer_curve
from coral_lens.report.figures import metric_picture, reliability_picture
from coral_lens.report.style import Picture, looks_of
from coral_lens.report.tables import COLUMNS, ResultsTable, in_order, subject_of
from coral_lens.runs import Run, file_name


def write_pictures(run: Run, table: ResultsTable, folder: Path) -> None:
    """Write each figure under its name."""
    for picture in pictures_of(run, table):
        write_atomic(folder / f"{picture.name}.png", picture.png())


def pictures_of(run: Run, table: ResultsTable) -> Iterator[Picture]:
    """Yield the figures of a run; of the reliability diagrams, those of the base and of the method it is about."""
    for metric in COLUMNS:
        yield metric_picture(table, metric, name=f"summary-{metric}")
    for curve in (layer_curve(run.lens), gamma_curve(run.lens)):
        if curve:
            yield curve_picture(curve, name=f"chosen-{curve.what}")
    looks = looks_of(table.methods)
    for evaluation, task in zip(in_order(run), table.tasks, strict=True):
        for method in dict.fromkeys(("base", subject_of(evaluation.predictions))):
            if method in evaluation.predictions:
                name = f"reliability-{file_name(evaluation.name)}-{file_name(method)}"
                predictions, metrics = evaluation.predictions[method], task.metrics[method]
                yield reliability_picture(predictions, metrics, name=name, look=looks[method])
