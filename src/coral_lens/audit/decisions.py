"""Answers of servers of decisions, taken apart: OpenAI's format, TypeSafe's, and our own log, with labels beside them.

Each decision becomes one flat row with `options`, `probs`, `label` and `kind`, a refusal none. Other rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Numbered = tuple[int, Mapping[str, Any]]
YES_NO, LISTED = ("predicate", "noul"), ("choice", "score")
"""The types of decisions: of one probability, and of one for each option. A third type, `refusal`, has none."""
LABELS = ("labels", "label", "answers_right", "gold")
"""What the right answers may be called beside a response: by name, or in the order of the questions."""


def flattened(rows: Iterable[Numbered]) -> Iterator[Numbered]:
    """Yield rows, and in place of a response each of its decisions."""
    for number, row in rows:
        response = row.get("response") if isinstance(row.get("response"), dict) else row
        answers = response.get("answers") if response else None
        named = named_decisions(answers)
        if named is None:
            made = flat(row) if is_decision(row) else row
            if made or not row:
                yield number, made
            continue
        labels = next((row[name] for name in LABELS if row.get(name) is not None), None)
        shared = {name: value for name, value in row.items() if name not in ("answers", "response", "usage", *LABELS)}
        identity = number if row.get("id") in (None, "") else row["id"]
        for place, (name, answer) in enumerate(named):
            made = flat({**answer, "label": label_at(labels, name, place, len(named))})
            if made:
                yield number, {**shared, **made, "id": f"{identity}.{name}", "name": name}


def label_at(labels: Any, name: str, place: int, n: int) -> Any:
    """Return the label of one decision: by its name, by its place, or the only one that there is."""
    if isinstance(labels, dict):
        return labels.get(name)
    return labels[place] if isinstance(labels, list) and len(labels) == n else labels


def named_decisions(answers: Any) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Return the decisions of a response by name or number; None where it is no response."""
    if isinstance(answers, dict) and answers and all(map(is_decision, answers.values())):
        return [(str(name), answer) for name, answer in answers.items()]
    if isinstance(answers, list) and answers and all(map(is_decision, answers)):
        return [(str(a.get("name") or i + 1), a) for i, a in enumerate(answers)]
    return None


def is_decision(value: Any) -> bool:
    """Whether a value is one answered decision, or one that was refused."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in YES_NO:
        return bool({"probability", "noul"} & set(value))
    given = value.get("probabilities") if kind in LISTED else None
    listed = isinstance(given, list) and bool(given) and all(isinstance(one, Mapping) for one in given)
    return kind == "refusal" or isinstance(given, Mapping) or listed


def flat(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision as a row of an audit; a refusal is an empty one."""
    kind = answer["type"]
    others = {
        k: v
        for k, v in answer.items()
        if k not in ("type", "probabilities", "probability", "noul", "legend", "confidence")
    }
    if kind == "refusal":
        return {}
    if kind in YES_NO:
        yes = answer.get("probability", answer.get("noul"))
        return {**others, "kind": "yes-no", "probability": yes}
    given = answer["probabilities"]
    if isinstance(given, Mapping):
        names, probs = list(given), list(given.values())
    else:
        names = [one.get("label", one.get("value")) for one in given]
        probs = [one.get("probability") for one in given]
    # the text "true" and the truth itself are different options of one name
    texts = [text_of(name) for name in names]
    if len(set(texts)) < len(texts):
        texts = [
            f"{text} ({type(name).__name__})" if texts.count(text) > 1 else text
            for text, name in zip(texts, names, strict=True)
        ]
    label = answer.get("label")
    same = [j for j, name in enumerate(names) if type(name) is type(label) and name == label]
    if len(same) == 1:
        label = texts[same[0]]
    elif kind == "score" and text_of(label) in texts:  # names are texts in JSON, and levels may be counted from 1
        label = text_of(label)
    elif kind == "score" and isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(texts):
        label = texts[label]
    return {**others, "kind": kind, "options": texts, "probs": probs, "label": label}


def text_of(value: Any) -> str:
    """Return the value of an option as text."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
