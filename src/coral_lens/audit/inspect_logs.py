"""Logs of Inspect, `.eval` and `.json`: the options' probabilities from the tokens that were logged, or a stated confidence.

A `.eval` file is a zip of JSON; nothing of Inspect is imported. Of a multiple-choice sample, the letter that the model answered
with is looked up in its log-probabilities, and beside it stand those of the other letters.
"""

from __future__ import annotations

import math
import re
import string
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from coral_lens.audit.systems import CONFIDENCE_ONLY, AuditedSet, predictions_of_rows
from coral_lens.errors import CoralError, need
from coral_lens.metrics.answered import distribution_of
from coral_lens.records import Columns, Question
from coral_lens.storage.lines import EXPANSION, UNHARMED, opened, parse_json

SAMPLES = re.compile(r"samples/.+\.json")
HEADER = ("header.json", "_journal/start.json")
"""Where a .eval file says what was evaluated; the second of one that is not finished."""
ZSTANDARD = 93
"""How a zip calls this way to pack."""
DAMAGED = (
    BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    NotImplementedError,
    RuntimeError,
)
"""What reading a damaged zip may raise."""
RIGHT: Mapping[str | float, bool] = {"C": True, "I": False, "P": False, "N": False, 1: True, 0: False}
"""How Inspect writes right and wrong; a score between them, such as an F1, says neither."""
REMEDY = "run Inspect with logprobs=True and top_logprobs=20 in its GenerateConfig"
MOST_OTHERS = 0.1
"""Share of the samples whose letter may be another than the one that was scored, as after long reasoning."""


@dataclass(frozen=True)
class InspectLog:
    """What a log says: the task, the model and the samples."""

    path: Path
    task: str
    model: str
    samples: Sequence[Mapping[str, Any]]


def is_inspect_log(path: Path) -> bool:
    """Whether a file is a log of Inspect, by its ending and its first bytes."""
    if path.suffix.lower() == ".eval":
        return True
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with opened(path) as file:
        head = file.read(4096)
    return b'"status"' in head and b'"eval"' in head and b'"version"' in head


def read_inspect(path: Path) -> AuditedSet:
    """Return what a log of Inspect holds."""
    log = read_eval(path) if path.suffix.lower() == ".eval" else read_json_log(path)
    refuse_shuffled(log)
    rows = [row for sample in log.samples if (row := read_sample(sample, log))]
    if not rows:
        raise CoralError(f"{path} holds no sample with probabilities or a confidence; {REMEDY}.")
    top_only = any(row.options == CONFIDENCE_ONLY for row in rows)
    if top_only and not all(row.options == CONFIDENCE_ONLY for row in rows):
        rows = [row for row in rows if row.options != CONFIDENCE_ONLY]
        top_only = False
    table = Columns({name: [row.columns.get(name) for row in rows] for name in ("epoch", *all_columns(rows))})
    questions = tuple(row.question(log.task, table, i) for i, row in enumerate(rows))
    predictions = predictions_of_rows(log.model, log.task, questions, [row.probs for row in rows])
    return AuditedSet(log.task, questions, {log.model: predictions}, top_only)


# ------------------------------------------------------------------------------------------------------------- reading


def read_json_log(path: Path) -> InspectLog:
    """Read a log in one JSON document."""
    with opened(path) as file:
        try:
            record = parse_json(file.read().decode("utf-8"))
        except ValueError as error:
            raise CoralError(f"{path} is no log of Inspect: {error}.") from error
    samples = record.get("samples") if isinstance(record, dict) else None
    if not isinstance(samples, list):
        raise CoralError(f"{path} is no log of Inspect, or one without samples; log them (log_samples).")
    return log_of(path, record, [s for s in samples if isinstance(s, dict)])


def read_eval(path: Path) -> InspectLog:
    """Read a log that is a zip of JSON, one file for each sample; one that would fill the memory is refused."""
    try:
        with opened(path) as file, ZipFile(file) as archive:
            parts = archive.infolist()
            if sum(part.file_size for part in parts) > max(8 * UNHARMED, EXPANSION * path.stat().st_size):
                raise CoralError(
                    f"{path} would expand to more than {EXPANSION} times its size; give fewer samples at a time."
                )
            by_name = {part.filename: part for part in parts}
            first = next((by_name[name] for name in HEADER if name in by_name), None)
            header: Any = parse_json(content_of(archive, first)) if first else {}
            samples = [parse_json(content_of(archive, part)) for part in parts if SAMPLES.fullmatch(part.filename)]
    except DAMAGED as error:
        raise CoralError(
            f"{path} cannot be read as a log of Inspect ({error}); write it with --log-format json."
        ) from error
    if not isinstance(header, dict):
        raise CoralError(f"{path} is no log of Inspect: its header is no record.")
    return log_of(path, header, [s for s in samples if isinstance(s, dict)])


def content_of(archive: ZipFile, part: ZipInfo) -> bytes:
    """Return a file of a zip; Inspect packs them by zstandard, which Python's own zip does not know yet."""
    if part.compress_type != ZSTANDARD:
        return archive.read(part)
    need("tables", by="Reading this log of Inspect")
    import pyarrow as pa

    packed = archive.fp
    assert packed is not None, "the archive is open"
    packed.seek(part.header_offset)
    name_length, extra_length = struct.unpack("<HH", packed.read(30)[26:30])
    packed.seek(name_length + extra_length, 1)
    return bytes(pa.decompress(packed.read(part.compress_size), part.file_size, codec="zstd", asbytes=True))


def log_of(path: Path, header: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> InspectLog:
    """Return a log with the names of its task and model."""
    about = header.get("eval")
    about = about if isinstance(about, dict) else {}
    ordered = sorted(samples, key=place_of)
    return InspectLog(path, str(about.get("task") or path.stem), str(about.get("model") or path.stem), ordered)


def place_of(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a sample belongs, whenever it was finished: by epoch, then by id."""
    return tuple(str(sample.get(name, "")).zfill(20) for name in ("epoch", "id"))  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class InspectRow:
    """One sample: its options with their probabilities, and which one is right."""

    identity: str
    group: str
    text: str
    options: tuple[str, ...]
    probs: list[float]
    answer: int
    columns: Mapping[str, Any]

    def question(self, task: str, table: Columns, row: int) -> Question:
        """Return it as a question for people."""
        options = self.options
        if options == CONFIDENCE_ONLY:
            options = (options[0], *(f"another {j}" for j in range(1, len(self.probs))))
        texts = tuple(option if option.strip() else "(empty)" for option in options)
        return Question(self.identity, self.group, self.text, texts, self.answer, task=task, table=table, row=row)


def all_columns(rows: Sequence[InspectRow]) -> list[str]:
    """Return the names of what samples say beside their answers."""
    return list(dict.fromkeys(name for row in rows for name in row.columns if name != "epoch"))


def read_sample(sample: Mapping[str, Any], log: InspectLog) -> InspectRow | None:
    """Return a sample that has probabilities or a confidence, else nothing."""
    identity, epoch = f"{log.task}/{sample.get('id', '?')}", sample.get("epoch", 1)
    whole = identity if epoch in (1, None) else f"{identity} epoch {epoch}"
    about = sample.get("metadata")
    columns = {"epoch": epoch, **(about if isinstance(about, dict) else {})}
    choices = sample.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        probs = letter_probs(sample, len(choices)) if scored_otherwise(sample) is not True else None
        answer = target_of(sample, choices)
        if probs is not None and answer is not None:
            return InspectRow(whole, identity, text_of(sample), tuple(map(str, choices)), probs, answer, columns)
    confidence, right = stated(sample)
    if confidence is None or right is None:
        return None
    probs = distribution_of(confidence).tolist()
    return InspectRow(whole, identity, text_of(sample), CONFIDENCE_ONLY, probs, int(not right), columns)


def text_of(sample: Mapping[str, Any]) -> str:
    """Return what was asked."""
    asked = sample.get("input")
    if isinstance(asked, list):
        asked = "\n\n".join(str(message.get("content", "")) for message in asked if isinstance(message, dict))
    return str(asked or sample.get("id", ""))


def target_of(sample: Mapping[str, Any], choices: Sequence[Any]) -> int | None:
    """Return the right option: its letter, or its text; several are none."""
    target = sample.get("target")
    if isinstance(target, list):
        target = target[0] if len(target) == 1 else None
    if isinstance(target, str) and target in string.ascii_uppercase[: len(choices)] and len(target) == 1:
        return string.ascii_uppercase.index(target)
    return (
        [str(c) for c in choices].index(target)
        if isinstance(target, str) and [str(c) for c in choices].count(target) == 1
        else None
    )


def letter_probs(sample: Mapping[str, Any], n: int) -> list[float] | None:
    """Return the probability of each letter at the last token that is one.

    A letter that was not logged is no more likely than the least likely that was, and counts as that.
    """
    letters = string.ascii_uppercase[:n]
    token = letter_token(sample, letters)
    if token is None:
        return None
    listed = [token, *(t for t in token.get("top_logprobs") or () if isinstance(t, dict))]
    # the token that was drawn stands among the likeliest too
    logged = {str(t.get("token")): float(t["logprob"]) for t in listed if isinstance(t.get("logprob"), int | float)}
    if len(logged) < 2 or max(logged.values()) > 0:
        return None
    masses: dict[str, float] = {}
    for text, logprob in logged.items():
        letter = letter_of(text, letters)
        if letter is not None:
            masses[letter] = masses.get(letter, 0.0) + math.exp(logprob)
    least = math.exp(min(logged.values()))
    total = sum(masses.get(letter, least) for letter in letters)
    return [masses.get(letter, least) / total for letter in letters] if total > 0 else None


def letter_token(sample: Mapping[str, Any], letters: str) -> Mapping[str, Any] | None:
    """Return the last token that is a letter."""
    return next((t for t in reversed(list(tokens_of(sample))) if letter_of(t.get("token"), letters)), None)


def scored_otherwise(sample: Mapping[str, Any]) -> bool | None:
    """Whether the letter that was logged is another than the one that was scored; None where one is not known."""
    choices, scores = sample.get("choices"), sample.get("scores")
    if not isinstance(choices, list) or not isinstance(scores, dict):
        return None
    letters = string.ascii_uppercase[: len(choices)]
    token = letter_token(sample, letters)
    answers = [s.get("answer") for s in scores.values() if isinstance(s, dict)]
    scored = [a for a in answers if isinstance(a, str) and len(a) == 1 and a in letters]
    return letter_of(token.get("token"), letters) not in scored if token and scored else None


def refuse_shuffled(log: InspectLog) -> None:
    """Refuse a log whose letters are not those of its options: the solver shuffled them, and told the scorer alone."""
    known = [other for sample in log.samples if (other := scored_otherwise(sample)) is not None]
    if sum(known) > MOST_OTHERS * len(known):
        raise CoralError(
            f"{log.path}: in {sum(known)} of {len(known)} samples the letter that was logged is another than the one that was "
            "scored, as with multiple_choice(shuffle=True); shuffle the options in the dataset instead (shuffle_choices)."
        )


def letter_of(token: Any, letters: str) -> str | None:
    """Return the letter that a token is, whatever stands around it."""
    bare = str(token).strip(" \n\t()*.:`\u2581\u0120") if isinstance(token, str) else ""
    return bare if len(bare) == 1 and bare in letters else None


def tokens_of(sample: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the tokens of the first answer that were logged."""
    output = sample.get("output")
    choices = output.get("choices") if isinstance(output, dict) else None
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    logged = first.get("logprobs")
    content = logged.get("content") if isinstance(logged, dict) else None
    yield from (token for token in content or () if isinstance(token, dict))


def stated(sample: Mapping[str, Any]) -> tuple[float | None, bool | None]:
    """Return the confidence that a scorer or the sample states, and whether the answer is right."""
    scores = sample.get("scores")
    first = next((s for s in scores.values() if isinstance(s, dict)), {}) if isinstance(scores, dict) else {}
    value = first.get("value")
    right = RIGHT.get(value) if isinstance(value, str | int | float) else None
    for about in (first.get("metadata"), sample.get("metadata")):
        confidence = about.get("confidence") if isinstance(about, dict) else None
        if isinstance(confidence, int | float) and 0 <= confidence <= 1:
            return float(confidence), right
    return None, right
