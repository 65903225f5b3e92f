"""The page of an autoencoder's features: figures, and a dashboard of single features. Renders records, computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coral_lens.report.figures.features import LABELS, ablation_picture, steering_picture
from coral_lens.report.figures.paper import ablation_figure
from coral_lens.report.figures.style import Picture
from coral_lens.report.pages.contents import Contents
from coral_lens.report.pages.templates import fill_template
from coral_lens.report.runs import is_page
from coral_lens.storage.files import write_atomic
from coral_lens.storage.outputs import refuse_replacing


def write_features(
    folder: Path,
    dashboard: Mapping[str, Any],
    *,
    ablations: Mapping[str, Mapping[str, Any]],
    steering: Mapping[str, Any] | None,
) -> Path:
    """Write the page features.html, and then its figures as SVG and PNG; return the page."""
    pictures, page = feature_pictures(ablations, steering, dashboard["names"]), folder / "features.html"
    drawn = {f"figures/{p.name}{ending}": data for p in pictures.values() for ending, data in p.files().items()}
    refuse_replacing(folder, [page.name, *drawn], is_ours=lambda _: page.exists() and is_page(page))
    write_atomic(page, render_features(dashboard, pictures).encode())
    for name, data in drawn.items():
        write_atomic(folder / name, data)
    return page


def feature_pictures(
    ablations: Mapping[str, Mapping[str, Any]], steering: Mapping[str, Any] | None, names: Mapping[str, str]
) -> dict[str, Picture]:
    """Return the figures of a study's ablations, whose names say what was taken out, and of its steering, by title."""
    pictures = {
        f"Change of {LABELS[metric]} by taking out one feature, {names[name]}": ablation_picture(
            record, metric, name=f"ablation-{name}-{metric}"
        )
        for name, record in ablations.items()
        for metric in ("ece", "accuracy")
    }
    pictures |= {
        f"The same as the paper draws it, {names[name]}": ablation_figure(record, name=f"ablation-{name}-paper")
        for name, record in ablations.items()
        if record["chosen"]
    }
    if steering and any(row["gamma"] for row in steering["rows"]):
        pictures["Steering by the features whose removal harms"] = steering_picture(steering, name="steering")
    return pictures


def render_features(dashboard: Mapping[str, Any], pictures: Mapping[str, Picture]) -> str:
    """Return the page; all text of questions is escaped."""
    contents = Contents()
    contents.begin("effects", "What ablation and steering do")
    figures = [contents.figure(picture, title) for title, picture in pictures.items()]
    contents.begin("features", "What features respond to")
    features = [(contents.table(f"Feature {f['feature']}"), f) for f in dashboard["features"]]
    parts = {**dashboard, "figures": figures, "features": features, "sections": contents.sections}
    return fill_template("features.html", parts, headline=dashboard["lead"])
