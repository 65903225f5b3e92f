"""A lens as others see it: the README of its folder, and the way to the Hugging Face hub and back.

A few files, nothing executable, and of local paths only the last part. The hub is asked only for what is not a folder here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from coral_lens.data.hub import OFFLINE, hub_session
from coral_lens.errors import CoralError
from coral_lens.lens.trace import ALL, Trace, Training
from coral_lens.metrics.scores import Score
from coral_lens.storage.escape import for_markdown

if TYPE_CHECKING:
    from coral_lens.lens.artefact import Lens

# ------------------------------------------------------------------------------------------------------------- the card

COLUMNS = {"accuracy": "accuracy", "ece": "ECE", "brier": "Brier", "nll": "NLL"}


def card(lens: Lens) -> str:
    """Say what a lens is, what it learned from, how good it is, and what it must not be used for."""
    training, model = lens.training, public_name(lens.model["name"])
    return f"""---
library_name: coral-lens
tags: [calibration, multiple-choice, interpretability]
base_model: {json.dumps(model, ensure_ascii=False)}
---

# A CORAL lens for {for_markdown(model)}

A {lens.name}. {purpose(lens)}

{base_lines(lens)} Prompts: `{lens.style}`.
- Layer 0 is the embedding output, layer l the residual stream after block l, before the final norm.
- Inputs of the probe: {", ".join(["pooled states", *lens.correction.inputs])}.{exit_sentence(lens)}{answer_lines(lens.trace)}
- Fitted on {training.n_train} questions, {split_phrase(training)}.
{override_lines(training)}
| training data | questions | terms |
|---|---|---|
{data_rows(training)}

## Scores on the validation questions

Percent, with 95 % intervals. The lens was chosen on these questions, so they flatter it: measure it with
`coral {"ask" if lens.open else "eval"}` on questions that it has never seen.

| method | {" | ".join(COLUMNS.values())} |
|---|{"---|" * len(COLUMNS)}
{score_rows(lens.trace.validation)}

## Limits and misuse

- It works only with the model of the fingerprints in `lens.json`.
- It is only as good as the questions it learned from. Each answer comes with a `shift`: 1 is typical of the training
  questions, from 1.5 on is far from them, and there its corrections deserve less trust. {shift_sentence(lens)}
- A calibrated probability is right on average, not for each question. Do not let it decide alone about people's health,
  money, rights or marks.
- A lens can be fitted to any labels, wrong or biased ones too: it then makes the model confidently wrong. Look at the data.
- The terms of the training data apply to what was learned from them.
"""


def purpose(lens: Lens) -> str:
    """Say what a lens is for, and how it is used."""
    if lens.open:
        return """It says how likely each answer is right that a frozen model writes to an open question, from the model's own
hidden states, what it says of the answer, and how often it wrote it; or that none of them is right. Use it with
`coral ask --lens THIS-FOLDER "Which river flows through Vienna?"`."""
    return (
        "It corrects the probabilities that a frozen model gives to the options of a multiple-choice question, from the\nmodel's "
        "own hidden states. Use it with `coral predict --lens THIS-FOLDER --questions FILE --out answers.jsonl`."
    )


def base_lines(lens: Lens) -> str:
    """Say what the lens starts from; of open questions also how candidates are written and labelled."""
    if not lens.open:
        return f"- Base probabilities: softmax of the `{lens.base}` score{temperature_phrase(lens)}."
    s, weights = lens.open.sampling, asdict(lens.open.weighing)
    shown = ", ".join(f"{name} {weight:.3g}" for name, weight in weights.items())
    return f"""- Candidates: {s.candidates} answers at temperature {s.temperature:g}, seed {s.seed}, of at most {s.max_tokens}
  tokens, after {s.examples} worked examples.
- Fitted on the model's own candidates: one is right if it is a known answer but for case, accents, articles, punctuation
  and the spelling of numbers; where none is, `none of these` is the right option.
- Base probabilities: softmax of weighed facts about a candidate ({shown}){temperature_phrase(lens)}."""


def temperature_phrase(lens: Lens) -> str:
    """Say that temperatures stand before or after the lens."""
    before = f", scaled by temperature {lens.base_temperature:.3g}" if lens.base_temperature != 1.0 else ""
    after = f"; the result is scaled by {lens.steered_temperature:.3g}" if lens.steered_temperature != 1.0 else ""
    return before + after


def split_phrase(training: Training) -> str:
    """Say whether one split or folds chose the lens."""
    if training.n_train + training.n_validation > sum(training.tasks.values()):
        return f"chosen by folds on {training.n_validation}, each predicted by a fit that had not seen it"
    return f"chosen on {training.n_validation} others"


def training_sentence(training: Training) -> str:
    """Say how many questions a lens is from, and how many of them fitted and chose it."""
    sources = ", ".join(f"{n} questions of “{source}”" for source, n in training.tasks.items())
    return f"{sources or 'Questions'}: fitted on {training.n_train}, {split_phrase(training)}."


def override_lines(training: Training) -> str:
    """Say which fingerprints were overridden, if any."""
    lines = [f"- **Overridden**: {for_markdown(without_paths(note))}" for note in training.overrides]
    return "\n".join([*lines, ""]) if lines else ""


def data_rows(training: Training) -> str:
    """Return one row for each source of questions."""
    rows = ((source, n, training.terms.get(source) or "not known") for source, n in sorted(training.tasks.items()))
    return "\n".join(f"| {for_markdown(source)} | {n} | {for_markdown(terms)} |" for source, n, terms in rows)


def score_rows(validation: Mapping[str, Mapping[str, Score]]) -> str:
    """Return one row for each method."""
    lines = []
    for method, scores in validation.items():
        cells = (scores[m] for m in COLUMNS)
        shown = (f"{100 * c.value:.1f} ({100 * c.low:.1f} to {100 * c.high:.1f})" for c in cells)
        lines.append(f"| {for_markdown(method)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def exit_sentence(lens: Lens) -> str:
    """Say what an early exit saves and loses."""
    return f"\n- **Early exit**: {exit_cost(lens)}" if lens.exits else ""


BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configurations call the number of blocks."""
LOST = {"accuracy": "base", "brier": "temperature"}
"""What a lens that exits early is compared with, by metric."""


def exit_cost(lens: Lens) -> str:
    """Say which share of the model an answer of a lens that exits early takes, and what validation says of what that loses."""
    config, last = lens.model.get("config", {}), max(lens.layers)
    n_blocks = next((config[name] for name in BLOCKS if isinstance(config.get(name), int)), None)
    share = f" ({last} of {n_blocks}, {last / n_blocks:.0%})" if n_blocks else ""
    found = lens.trace.validation
    accuracy, brier = ([100 * found[m][metric].value for m in (lens.method, other)] for metric, other in LOST.items())
    return (
        f"an answer takes the blocks up to layer {last}{share} and no vocabulary head. On the validation questions, which chose "
        f"it, its accuracy is {accuracy[0]:.1f} %, the whole model's {accuracy[1]:.1f} %; its Brier score {brier[0]:.1f}, the "
        f"whole model's by temperature {brier[1]:.1f}. The model's own probabilities are not computed: the lens cannot go back "
        "to them, and far from home it can only be less sure."
    )


def answer_lines(trace: Trace) -> str:
    """Say whether the answers are the lens's or the model's own, in all tasks and in those that differ."""
    return "".join(f"\n- {for_markdown(sentence)}" for sentence in answer_sentences(trace))


def answer_sentences(trace: Trace) -> list[str]:
    """Return what held-out questions say of the lens's answers, and of which tasks they say something else."""
    if ALL not in trace.answers:
        return []
    everywhere = trace.answers[ALL]
    others = {name: check for name, check in trace.answers.items() if check.used != everywhere.used}
    return [str(everywhere), *(f"{name}: {check}" for name, check in others.items())]


def shift_sentence(lens: Lens) -> str:
    """Say what the lens does about shift."""
    there = "becomes less sure" if lens.exits else "goes back to the model's own answers"
    if lens.adaptation:
        return (
            f"It {there} there by itself. It was adapted to one task and is for that task alone: on the tasks in the table above "
            f"the lens before that is better. {lens.adaptation}"
        )
    if lens.trust:
        return (
            f"It {there} there by itself. On any task that is not in the table above it is believed by a weight of "
            f"{lens.trust.elsewhere:.2g} and less sure of itself by a temperature of {lens.trust.temperature:.2g}, and harm "
            "cannot be excluded without labels of that task."
        )
    return "It weakens them there by itself." if lens.tempering else "It does not weaken them there by itself."


# ------------------------------------------------------------------------------------------------- names without paths


def public_name(name: str) -> str:
    """Return a hub id as it is, and of a path its last part: a card is shown to others, who have nothing of the rest."""
    path = PurePath(name)
    is_local = path.is_absolute() or name.startswith(("~", ".")) or name.endswith(".gguf") or len(path.parts) > 2
    return path.name if is_local and path.name else name


def without_paths(text: str) -> str:
    """Return a sentence in which every local path is cut to its last part."""
    return " ".join(map(public_name, text.split(" ")))


# -------------------------------------------------------------------------------------------------------------- the hub

FILES = ("lens.json", "lens.safetensors", "README.md")
OPTIONAL = ("layers.safetensors",)
SHIPPED = {"general": Path(__file__).parent / "shipped" / "general"}
"""Lenses that come with the package, by their names: `general` is for the embedded model."""


def local_folder(source: str | Path) -> Path:
    """Return the folder of a lens: the source itself, one that ships, or a download of a hub id, `owner/name[@revision]`."""
    folder = Path(source)
    if str(source) in SHIPPED and not folder.exists():
        return SHIPPED[str(source)]
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", str(source)):
        return folder
    if any(part in ("", ".", "..") for part in str(source).split("@")[0].split("/")):
        return folder
    from huggingface_hub import snapshot_download

    repo, _, revision = str(source).partition("@")
    try:
        with hub_session() as asks:
            return Path(snapshot_download(repo, revision=revision or None, allow_patterns=[*FILES, *OPTIONAL]))
    except hub_errors() as error:
        reason = str(error).strip().split("\n")[0] if asks else OFFLINE
        raise CoralError(
            f"{source} is neither a folder here nor a lens that the hub gives out ({reason}); check the name, or make a lens "
            "with `coral fit --out FOLDER`."
        ) from None


def push_to_hub(folder: str | Path, repo: str, *, private: bool = True, message: str = "A CORAL lens") -> str:
    """Upload a saved lens and return its address. Private unless asked otherwise: a lens says what data it learned from."""
    source = Path(folder)
    missing = [name for name in FILES if not (source / name).exists()]
    if missing:
        raise CoralError(f"{source} is not a lens: it has no {missing[0]}; make one with `coral fit --out {source}`.")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=source, allow_patterns=[*FILES, *OPTIONAL], commit_message=message
            )
        )
    except hub_errors() as error:
        reason = str(error).strip().split("\n")[0]
        raise CoralError(
            f"The lens could not be uploaded to {repo} ({reason}); log in with `hf auth login` and check the name."
        ) from None


def hub_errors() -> tuple[type[BaseException], ...]:
    """Return all that the hub's client raises for a wrong name, a missing login or a network that is down.

    A connection that fails is an error of the HTTP library, whose name has changed from release to release: it is the
    base of the hub's own errors.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return HfHubHTTPError.__bases__[0], HFValidationError, OSError
