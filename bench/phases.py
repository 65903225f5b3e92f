"""Where a command's time goes: import, loading, scoring, fitting, doing no harm, intervals, figures, page.

    python bench/phases.py demo --out DIR

runs `coral demo --out DIR` in this process and prints the processor time of each phase, of all threads together, which busy
neighbours change least, and the time on the clock behind it. A phase within another counts by itself only.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

PHASES = {
    "loading the model": ("engine.loading.load_model",),
    "reading questions": ("data.questions.load_questions",),
    "forecast": ("engine.forecast.forecast",),
    "scoring": ("engine.extract.extract", "engine.extract.score_questions"),
    "fitting": ("lens.fit.load_or_fit", "lens.fit.fit_store"),
    "doing no harm": ("lens.do_no_harm.fit_do_no_harm",),
    "leak guard": ("data.leaks.guard_of", "data.leaks.Guard.find"),
    "intervals": ("metrics.scores.measure", "metrics.comparisons.paired_difference", "report.tables.run.results_table"),
    "confidence": ("report.figures.confidence.confidence_findings", "report.findings.write_findings"),
    "figures": ("report.figures.run.write_run_pictures",),
    "page": ("report.pages.run.write_report",),
}
"""The functions of each phase, below coral_lens."""
REST = "the rest"


class Clock:
    """How much time each phase took: the processor's and that on the clock."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self._running = [REST]
        self._since = now()

    def switch(self) -> None:
        """Count the time since the last switch for the phase that is running."""
        then, self._since = self._since, now()
        total = self.taken.setdefault(self._running[-1], [0.0, 0.0])
        for i, (before, after) in enumerate(zip(then, self._since, strict=True)):
            total[i] += after - before

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts for a phase."""

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            self.switch()
            self._running.append(phase)
            try:
                return function(*args, **options)
            finally:
                self.switch()
                self._running.pop()

        return run


def now() -> tuple[float, float]:
    """Return the processor's time and that on the clock."""
    return time.process_time(), time.perf_counter()


def watch(clock: Clock) -> None:
    """Put a timed function in the place of each one of the phases, wherever it was imported."""
    for phase, names in PHASES.items():
        for name in names:
            module, *owner, last = split(name)
            place = functools.reduce(getattr, owner, import_module(f"coral_lens.{module}"))
            usual = getattr(place, last)
            timed = clock.timed(phase, usual)
            setattr(place, last, timed)
            for other in [m for n, m in sys.modules.items() if n.startswith("coral_lens.")]:
                for attribute in [key for key, value in vars(other).items() if value is usual]:
                    setattr(other, attribute, timed)


def split(name: str) -> list[str]:
    """Take `data.leaks.Guard.find` apart: its module, the class if there is one, and the function."""
    words = name.split(".")
    n_module = next((i for i, word in enumerate(words) if word[0].isupper()), len(words) - 1)
    return [".".join(words[:n_module]), *words[n_module:]]


def main() -> None:
    """Run the command and print its phases."""
    clock = Clock()
    importing = clock.timed("import", import_module)
    importing("coral_lens.cli")
    importing("coral_lens.study.demo")
    importing("coral_lens.cli.printing")
    watch(clock)
    load = os.getloadavg()[0]
    try:
        sys.modules["coral_lens.cli"].main()
    except SystemExit as end:
        if end.code:
            raise
    clock.switch()
    busy = sum(seconds[0] for seconds in clock.taken.values())
    print(f"\ncoral {' '.join(sys.argv[1:])}: load of the machine {load:.1f} before it")
    for phase, (processor, wall) in sorted(clock.taken.items(), key=lambda entry: -entry[1][0]):
        print(f"{phase:<20} {processor:7.1f} s of the processor ({processor / busy:4.0%}), {wall:7.1f} s on the clock")


if __name__ == "__main__":
    main()
