"""The page of an autoencoder's features: figures, and a dashboard of single features. Renders records, computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coral_lens.manifest import write_atomic
from coral_lens.report.feature_figures import ablation_picture, steering_picture
from coral_lens.report.page import shown, text_of
from coral_lens.report.style import Picture


def write_features(
    folder: Path,
    dashboard: Mapping[str, Any],
    *,
    ablations: Mapping[str, Mapping[str, Any]],
    steering: Mapping[str, Any] | None,
) -> Path:
    """Write the figures as PNG and the page features.html; return the page."""
    pictures = pictures_of(ablations, steering)
    for picture in pictures:
        write_atomic(folder / "figures" / f"{picture.name}.png", picture.png())
    page = folder / "features.html"
    write_atomic(page, render_features(dashboard, pictures).encode())
    return page


def pictures_of(ablations: Mapping[str, Mapping[str, Any]], steering: Mapping[str, Any] | None) -> list[Picture]:
    """Return the figures of a study's ablations and of its steering."""
    found = [
        ablation_picture(record, metric, name=f"ablation-{name}-{metric}")
        for name, record in ablations.items()
        for metric in ("ece", "accuracy")
    ]
    if steering and any(row["gamma"] for row in steering["rows"]):
        found.append(steering_picture(steering, name="steering"))
    return found


def render_features(dashboard: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """Return the page; all text of questions is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(text_of("features.html"))
    return template.render(dashboard, pictures=[shown(p) for p in pictures], css=Markup(text_of("page.css")))
