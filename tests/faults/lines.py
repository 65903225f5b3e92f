"""Hostile command lines: every option and argument of every command with values that nobody would mean.

The commands, their options and the types of these are those of the command line itself. There are two ways to try a line. A
light one stops where the command would begin to compute: it costs a hundredth of a second, so that every option can meet
every value. A whole one runs to its end, since a value may do harm later.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from support.commands import COMMANDS, LINES, WITHOUT_WORK, command_of

from coral_lens.data import task_index
from coral_lens.errors import CoralError
from faults.hostile import NUMBERS, TEXTS
from faults.outcomes import PATIENCE, Outcome, Tally, at_most, coral
from faults.workshop import Workshop

HEAVY = ("cli.options.Machine.open", "lens.fit.fit", "lens.artefact.Lens.predict", "lens.asking.fit_open",
         "lens.asking.ask", "analysis.layers.analyse_layers",
         "analysis.dimensions.analyse_dimensions", "analysis.heads.analyse_heads", "analysis.heads.time_step",
         "analysis.data.analyse_curves", "analysis.probes.analyse_probes", "sae.train.train_on_store",
         "study.run.run_prepared", "study.run.run_alone")  # fmt: skip
"""Where commands begin to compute."""
NEVER = ("study.demo.run_demo", "study.reproduce.run.attempt", "study.reproduce.plan.plan_parts",
         "harness.command.run_lm_eval", "data.assets.fetch_assets", "lens.publish.push_to_hub",
         "serve.server.LensServer.run")  # fmt: skip
"""What is not begun in a whole line either: it takes minutes, is another program, or asks the network."""
REACHED = "Accepted, and nothing is computed here."
SHORT_LINES = {
    "serve": "serve --lens lens --model model --port 0",
    "push": "push lens me/lens",
    "lm-eval": "lm-eval ls",
    "demo": "demo --out demo",
    "reproduce": "reproduce --model model --anyway --out reproduction",
    "doctor": "doctor model",
    "tasks": "tasks",
    "show": "show train.jsonl --model model",
    "cache list": "cache list",
    "cache clear": "cache clear --yes",
    "assets": "assets",
}
"""Sound lines of the commands that do not work for long."""

Kind = Literal["int", "float", "path", "flag", "text"]
WHOLE = ("-1", "0", "1", "1.5", "1_000", "١", "0x10", " 7", "9" * 400, str(2**31), str(2**63), str(-(2**63)), "1e3", "nan",
         "")  # fmt: skip
REAL = ("nan", "inf", "-inf", "1e999", "-1e-320", "-0.0", "5e-324", "1e308", "1,5", "½", "0x1p3", "", "-1", "0", "1",
        "2")  # fmt: skip
PLACES = ("", " ", ".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "nowhere/at/all", "train.jsonl/x", "loop",
          "empty", "model", "train.jsonl", "~", "~nobody", "x" * 300, "a/" * 2500, "nul\x00l", "\ud800", "-", "--", "CON",
          "\n")  # fmt: skip
WORDS = (*TEXTS, *map(str, NUMBERS), "1" * 50, "0-9999", "9-1", "1,,2", "cuda:99", "meta", "float8", "a:b:c:", ":", "=",
         "a=")  # fmt: skip
VALUES: dict[Kind, tuple[str, ...]] = {
    "int": (*WHOLE, *TEXTS),
    "float": (*REAL, *TEXTS),
    "path": (*PLACES, *TEXTS),
    "flag": ("1", "no", "", "--"),
    "text": (*WORDS, *PLACES),
}
"""What is tried by the type of an option's value."""


class ReachedError(CoralError):
    """Accepted: the command would now begin to compute."""


@dataclass(frozen=True)
class HostileLine:
    """A sound line in which one option or argument has another value."""

    base: str
    parameter: Any
    """As the command line knows it."""
    value: str

    @property
    def kind(self) -> Kind:
        """The type of the value."""
        if getattr(self.parameter, "is_flag", False):
            return "flag"
        # older versions of typer have a name in place of the description
        described = getattr(self.parameter, "type_descriptor", None) or getattr(self.parameter.type, "name", "")
        described = str(described or self.parameter.type).lower()
        for kind, pattern in {"int": r"\bint", "float": r"\bfloat", "path": r"\bpath"}.items():
            if re.search(pattern, described):
                return kind  # type: ignore[return-value]
        return "text"

    @property
    def words(self) -> list[str]:
        """The line as the shell gives it; what comes twice would not be the last word."""
        words, flag = shlex.split(self.base), self.parameter.opts[0]
        if not flag.startswith("-"):  # an argument: it stands in the place of the first one, or at the end
            n = len(command_of(self.base).split())
            given = len(words) > n and not words[n].startswith("-")
            return [*words[:n], *words[n + given :], "--", self.value]
        if self.kind == "flag":
            return [*words, f"{flag}={self.value}"]
        while flag in words:
            at = words.index(flag)
            del words[at : at + 2]
        return [*words, f"{flag}={self.value}"]

    @property
    def is_impossible(self) -> bool:
        """Whether no option can mean it: a number below 0 where things are counted, or no number at all."""
        text = self.value.strip().lower()
        if self.kind == "int":
            try:
                return int(text) < 0
            except ValueError:
                return True
        return self.kind == "float" and ("nan" in text or "inf" in text)


def all_lines() -> list[HostileLine]:
    """Return every option and argument of every command with every value for its type."""
    bases = {command_of(line): line for line in reversed(LINES)} | SHORT_LINES
    return [
        line
        for command, base in sorted(bases.items())
        for parameter in COMMANDS[command].params
        for line in lines_of(base, parameter)
    ]


def lines_of(base: str, parameter: Any) -> Iterator[HostileLine]:
    """Yield a line with each value for one option."""
    if parameter.name == "help":
        return
    for value in dict.fromkeys(VALUES[HostileLine(base, parameter, "").kind]):
        yield HostileLine(base, parameter, value)


def drawn(n: int, seed: int) -> list[HostileLine]:
    """Return a sample: one value of each option in turn, in another order each time round."""
    rng, by_option = random.Random(seed), dict[tuple[str, str], list[HostileLine]]()
    for line in all_lines():
        by_option.setdefault((line.base, line.parameter.name), []).append(line)
    for lines in by_option.values():
        rng.shuffle(lines)
    options = rng.sample(list(by_option.values()), len(by_option))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*options))
    return [line for line in turns if line is not None][:n]


@contextlib.contextmanager
def stopping(*names: str) -> Iterator[None]:
    """Have functions say that they were reached, and do nothing; lm-eval's thousands of tasks are read once for all lines."""

    def stop(*_: Any, **__: Any) -> Any:
        raise ReachedError(REACHED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_index, "_scan", cache(task_index._scan))
        for name in names:
            patch.setattr(f"coral_lens.{name}", stop)
        yield


def hostile_lines(shop: Workshop, lines: list[HostileLine], *, light: bool) -> Tally:
    """Try lines, each in a folder in which its command has what it needs."""
    tally = Tally("command lines, to where they compute" if light else "command lines, whole")
    folders = {command_of(step.line): step.before for step in reversed(shop.steps)}
    folders |= dict.fromkeys(WITHOUT_WORK, shop.steps[-1].after)
    with stopping(*NEVER, *(HEAVY if light else ())):
        for command, of_command in itertools.groupby(sorted(lines, key=lambda line: line.base), command_of_line):
            folder = Path()
            for line in of_command:
                if not light or not folder.name:  # a light one writes nothing that the next would notice
                    folder = with_traps(shop.bench(folders[command]))
                judge(tally, line, folder)
    return tally


def command_of_line(line: HostileLine) -> str:
    """Return the command of a hostile line."""
    return command_of(line.base)


def judge(tally: Tally, line: HostileLine, folder: Path) -> None:
    """Run a line and count its end."""
    words = [word.replace("\x00", "") for word in line.words]  # no shell could give a NUL
    # a million draws may be meant, and take long: then they can be stopped
    outcome = coral(folder, *words, patience=at_most(PATIENCE // 3, KeyboardInterrupt))
    if REACHED in outcome.err:
        outcome = Outcome(0, outcome.out, outcome.err)
    tally.judge(f"`{shlex.join(words)[:300]}`", outcome, difference="accepted" if line.is_impossible else "")


def with_traps(folder: Path) -> Path:
    """Put the places into a folder that lines name and that are neither plain files nor plain folders."""
    (folder / "loop").symlink_to("loop")
    (folder / "empty").mkdir()
    return folder
