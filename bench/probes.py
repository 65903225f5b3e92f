"""Speed of fitting probes: the search against the whole grid, the MLP and ridge against scikit-learn, in one run.

    python bench/probes.py --store DIR                        an existing store of labelled questions, all layers
    python bench/probes.py --data DIR --store NEW             extracts commonsense_qa_cloze:train with SmolLM2 first
    python bench/probes.py --store DIR --parts sweep          a whole model: all layers, 24 settings, 2,000 questions
    python bench/probes.py --parts memory                     peak memory of whole fits from 20,000 and 80,000 questions

Machines are noisy, so contenders take turns in short rounds and the median of the rounds' ratios is printed. The searches
are too long for that: they run one after the other, and the processor time and the epochs are printed beside the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import FORMAT, ActivationStore, question_record
from coral_lens.engine.extract import extract, question_lines
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.engine.readers import layer_name
from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit_store
from coral_lens.lens.probes.grid import GRID
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, fit_ridge_folds, fit_ridge_path
from coral_lens.lens.probes.search import BUDGETS, SearchOutcome, planned_epochs, search_mlp
from coral_lens.lens.probes.standardise import fit_standardiser, r_squared
from coral_lens.lens.rules import base_probs, residuals
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.records import Question
from coral_lens.storage.arrays import scratch_folder
from coral_lens.storage.files import digest, write_atomic, write_json
from coral_lens.storage.shards import Journal

FOLDS = 5


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=None, help="an activation store, or where to make one")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=2000, help="of a new store, and at most so many for the sweep")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40, help="cap of the search that is compared with the whole grid")
    parser.add_argument("--sizes", type=int, nargs="*", default=[20_000, 80_000], help="questions, for memory")
    parser.add_argument("--width", type=int, default=2048, help="of the states, for memory")
    parser.add_argument("--fits", nargs="*", default=list(FITS), choices=list(FITS), help="for memory")
    parser.add_argument("--journal", type=Path, default=None, help="where a sweep that may be killed keeps what it did")
    parser.add_argument("--parts", nargs="*", default=["ridge", "mlp", "search"], choices=[*PARTS, "memory"])
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads", flush=True)
    if "memory" in args.parts:
        bench_memory(args.sizes, args.width, args.fits)
    if set(args.parts) - {"memory"}:
        with tempfile.TemporaryDirectory() as temporary:
            store = open_store(args.store or Path(temporary) / "store", args.data, args.questions)
            for part in args.parts:
                if part in PARTS:
                    PARTS[part](store, args)


def open_store(folder: Path, data: Path | None, n: int) -> ActivationStore:
    """Open a store, or make it with SmolLM2."""
    if (folder / "journal.jsonl").exists():
        try:
            return ActivationStore(folder)
        except CoralError:
            pass  # not finished: extract goes on
    from coral_lens.data.questions import load_questions
    from coral_lens.data.settings import TaskOptions
    from coral_lens.engine.loading import load_model

    model = load_model("smollm2")
    questions = load_questions("commonsense_qa_cloze:train", TaskOptions(limit=n, data_dir=data))
    return extract(model, questions, folder, extraction=Extraction(layers=all_layers(model)))


# -------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Rows:
    """The first questions of a store: residuals, questions of rows, and which rows train and validate."""

    store: ActivationStore
    r: np.ndarray
    question: np.ndarray
    train: np.ndarray
    validation: np.ndarray

    def layer(self, layer: int) -> LayerData:
        """Read one layer and standardise it with training statistics."""
        states = self.store.layer(layer)
        standardiser = fit_standardiser(states[self.train])
        z, z_val = (standardiser(states[rows]) for rows in (self.train, self.validation))
        return LayerData(z, self.r[self.train], z_val, self.r[self.validation])


def rows_of_store(store: ActivationStore, n_questions: int) -> Rows:
    """Divide the first questions of a store, four for training to one for validation."""
    table = store.table
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    first = np.arange(len(mask)) < n_questions
    question = table.options.question
    train, validation = (table.options.rows(first & part) for part in (~mask, mask))
    return Rows(store, residuals(table, base_probs(table, "token")), question, train, validation)


def ranked_layers(rows: Rows) -> list[tuple[float, int]]:
    """Return ridge's validation R2 of each layer, best first."""
    found = []
    for layer in rows.store.layers:
        data = rows.layer(layer)
        scores = [r_squared(data.r_val, probe.predict(data.z_val)) for probe in fit_ridge_path(data.z, data.r)]
        found.append((max(scores), layer))
    return sorted(found, reverse=True)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratios(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return the medians of our time, of theirs and of their ratio over rounds in turns."""
    pairs = []
    for i in range(rounds):
        order = (ours, theirs) if i % 2 else (theirs, ours)
        times = {call: seconds(call) for call in order}
        pairs.append((times[ours], times[theirs]))
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return mine, other, statistics.median(b / a for a, b in pairs)


# ------------------------------------------------------------------------------------------------------------- parts


def bench_ridge(store: ActivationStore, args: argparse.Namespace) -> None:
    """Ridge with grouped folds and all penalties against RidgeCV with the same folds."""
    from sklearn.linear_model import Ridge, RidgeCV
    from sklearn.model_selection import GroupKFold

    rows = rows_of_store(store, 1000)
    data, groups = rows.layer(middle(store)), rows.question[rows.train]
    splits = list(GroupKFold(FOLDS).split(data.z, groups=groups))
    folds = np.empty(len(groups), dtype=np.int64)
    for k, (_, held_out) in enumerate(splits):
        folds[held_out] = k
    wide = data.z.astype(np.float64)
    theirs = RidgeCV(alphas=PENALTIES, cv=splits)
    mine, other, ratio = ratios(
        lambda: fit_ridge_folds(data.z, data.r, folds), lambda: theirs.fit(wide, data.r), args.rounds
    )
    _, probes = fit_ridge_folds(data.z, data.r, folds)
    gaps = []
    for penalty, probe in zip(PENALTIES, probes, strict=True):
        coefficients = Ridge(alpha=penalty, solver="cholesky").fit(wide, data.r).coef_
        gaps.append(np.abs(probe.weight - coefficients).max() / np.abs(coefficients).max())
    chosen = probes[int(np.argmin(np.abs(np.asarray(PENALTIES) - theirs.alpha_)))]
    gap = np.abs(chosen.weight - theirs.coef_).max() / np.abs(theirs.coef_).max()
    print(
        f"ridge, {len(data.r)} x {data.z.shape[1]}, {FOLDS} folds, {len(PENALTIES)} penalties: {mine:.2f} s, RidgeCV "
        f"{other:.2f} s: {ratio:.1f} times faster (wanted 10); largest relative difference of coefficients {gap:.1e} at "
        f"RidgeCV's penalty {theirs.alpha_:g}, {max(gaps):.1e} at any (allowed 1e-6)",
        flush=True,
    )


def bench_mlp(store: ActivationStore, args: argparse.Namespace) -> None:
    """One MLP fit, with dropout and validation, against MLPRegressor's, without; same shape, batches and epochs."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    warnings.simplefilter("ignore", ConvergenceWarning)
    epochs = 2
    data = rows_of_store(store, 1000).layer(middle(store))
    settings = MlpSettings(max_epochs=epochs, patience=epochs)
    r = data.r.astype(np.float32)

    def ours() -> None:
        fit_mlp(LayerData(data.z, r, data.z_val, data.r_val), settings, seed=0)

    def theirs() -> None:
        MLPRegressor(
            hidden_layer_sizes=settings.hidden,
            batch_size=settings.batch_size,
            learning_rate_init=settings.learning_rate,
            max_iter=epochs,
            n_iter_no_change=epochs + 1,
            random_state=0,
        ).fit(data.z, r)

    ours()  # once, so that torch is warm
    mine, other, ratio = ratios(ours, theirs, args.rounds)
    print(
        f"MLP {settings.hidden}, {len(r)} rows, {epochs} epochs: {mine / epochs:.2f} s an epoch, MLPRegressor "
        f"{other / epochs:.2f} s: {ratio:.2f} times faster (wanted 1)",
        flush=True,
    )


def bench_search(store: ActivationStore, args: argparse.Namespace) -> None:
    """The search against the whole grid: the 8 best layers, 8 settings, 1,000 questions."""
    rows = rows_of_store(store, 1000)
    ranked = ranked_layers(rows)
    layers = [layer for _, layer in ranked[:8]]
    grid = [replace(point, max_epochs=args.epochs) for point in GRID[::3]]
    found: dict[str, tuple[SearchOutcome, float, float]] = {}
    for name, kind in (("search", "halving"), ("whole grid", "grid")):
        start, busy = time.perf_counter(), time.process_time()
        outcome = search_mlp(rows.layer, layers, grid, seed=0, budget=BUDGETS[kind])
        found[name] = outcome, time.perf_counter() - start, time.process_time() - busy
        print(f"{name}: {describe(outcome)}; {found[name][1]:.0f} s, processors {found[name][2]:.0f} s", flush=True)
    (ours, short, cpu_short), (theirs, long, cpu_long) = found["search"], found["whole grid"]
    behind = [theirs.layers[layer][0].r2 - ours.layers[layer][0].r2 for layer in layers]
    print(
        f"8 layers x 8 settings x 1,000 questions: {long / short:.1f} times less time (wanted 4), {cpu_long / cpu_short:.1f} "
        f"times less processor time, validation R2 "
        f"{ours.best.r2 - theirs.best.r2:+.4f} (allowed -0.002); at each layer {-max(behind):+.4f} at worst, "
        f"{-sum(behind) / len(behind):+.4f} in the mean; ridge {ranked[0][0]:.4f}",
        flush=True,
    )


def bench_sweep(store: ActivationStore, args: argparse.Namespace) -> None:
    """A whole model: ridge ranks all layers, then the search over all of them and the default grid.

    With --journal a killed sweep goes on; what is printed is then the time of all calls, up to the last trial of each.
    """
    from rich.console import Console
    from rich.progress import Progress

    rows = rows_of_store(store, args.questions)
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        journal = args.journal or Path(folder) / "search.jsonl"
        clock = Clock(journal.with_suffix(".seconds"))
        ranked = ranked_layers(rows)
        task = progress.add_task("epochs", total=planned_epochs(len(ranked), GRID))

        def advance(n: int) -> None:
            progress.advance(task, n)
            clock.note()

        layers = [layer for _, layer in ranked]
        found = search_mlp(rows.layer, layers, GRID, seed=0, journal=journal, progress=advance)
        wall, busy = clock.note()
    print(
        f"sweep, {len(ranked)} layers x {len(GRID)} settings, {rows.train.sum()} training rows: {describe(found)}; "
        f"{wall / 60:.1f} minutes (wanted 20) in {clock.calls} call(s), processors {busy / 60:.1f} minutes; ridge R2 "
        f"{ranked[0][0]:.4f}",
        flush=True,
    )


class Clock:
    """Wall and processor time of a piece of work over all the calls that it took, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, (time.perf_counter(), time.process_time())
        before = json.loads(path.read_text()) if path.exists() else [0.0, 0.0, 0]
        self.before, self.calls = before[:2], before[2] + 1

    def note(self) -> tuple[float, float]:
        """Write down the times so far and return them."""
        now = (time.perf_counter(), time.process_time())
        wall, busy = (b + n - s for b, n, s in zip(self.before, now, self.start, strict=True))
        write_json(self.path, [wall, busy, self.calls])
        return wall, busy


def describe(found: SearchOutcome) -> str:
    """Return the outcome of a search in a line."""
    epochs, best = sum(t.epochs for t in found.trials), found.best
    return (
        f"{epochs} epochs of {len(found.trials)} trials, best R2 {best.r2:.4f} at layer {best.layer}, weight decay "
        f"{best.settings.weight_decay:g}, output penalty {best.settings.output_penalty:g}, learning rate "
        f"{best.settings.learning_rate:g}, {best.epochs} epochs"
    )


def middle(store: ActivationStore) -> int:
    """Return a layer in the middle, where probes work."""
    return store.layers[3 * len(store.layers) // 5]


PARTS: dict[str, Callable[[ActivationStore, argparse.Namespace], None]] = {
    "ridge": bench_ridge,
    "mlp": bench_mlp,
    "search": bench_search,
    "sweep": bench_sweep,
}


# ------------------------------------------------------------------------------------------------------------ memory

OPTIONS = 4
FITS = {
    "ridge": FitSettings(lens="ridge", temper=True),
    "ridge, 5 folds": FitSettings(lens="ridge", folds=FOLDS),
    "listwise": FitSettings(lens="listwise"),
    # memory is the same with one setting and two epochs
    "mlp, 2 epochs": FitSettings(
        lens="mlp",
        network=NetworkSearch(weight_decay=(1.0,), output_penalty=(0.0,), learning_rate=(1e-3,), epochs=2),
    ),
}


def bench_memory(questions: Sequence[int], width: int, fits: Sequence[str]) -> None:
    """Peak memory of `fit_store` on stores of made-up states, one layer, above what the process had before it."""
    for n in questions:
        with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder:
            store = made_up_store(Path(folder), n, width)
            for name in fits:
                with peak_memory() as peak:
                    taken = seconds(partial(fit_store, store, FITS[name]))
                print(
                    f"{name}, {n:,} questions x {OPTIONS} options x {width}: own memory {peak[0] / 2**30:.2f} GiB above the "
                    f"start (allowed 3), resident with mapped pages {peak[1] / 2**30:.2f} GiB, {taken:.0f} s",
                    flush=True,
                )


def made_up_store(folder: Path, n: int, width: int) -> ActivationStore:
    """Write a store shard by shard: base scores and states lean to the answers."""
    rng = np.random.default_rng(0)
    answers = rng.integers(0, OPTIONS, n)
    options = tuple("abcd"[:OPTIONS])
    questions = [Question(str(i), str(i), f"question {i}", options, int(answer)) for i, answer in enumerate(answers)]
    model = {"name": "made up", "weights": "", "tokenizer": "", "dtype": "torch.float32"}
    asked = digest([question_record(q) for q in questions])
    manifest = {"format": FORMAT, "model": model, "style": "text", "layers": [0], "n_questions": n, "questions": asked}
    write_json(folder / "manifest.json", manifest)
    write_atomic(folder / "questions.jsonl", question_lines(questions))
    journal, step = Journal(folder), 1000
    for shard, start in enumerate(range(0, n, step)):
        some = answers[start : start + step]
        right = np.eye(OPTIONS, dtype=np.float32)[some].ravel()
        states = rng.standard_normal((len(right), width), dtype=np.float32)
        states[:, 0] += right
        counts = {name: torch.ones(len(right), dtype=torch.int64) for name in ("n_tokens", "n_chars", "n_bytes")}
        logprobs = torch.from_numpy(0.5 * right + rng.standard_normal(len(right)))
        order = torch.arange(start, start + len(some))
        layer = {layer_name(0): torch.from_numpy(states).half()}
        journal.add(shard, {"question": order, "logprob": logprobs, **counts, **layer})
    return ActivationStore(folder)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure the largest growth of the process's own memory and of all that is resident, every 10 ms.

    Mapped pages are resident too, but the system's to drop.
    """
    peak, stop, start = [0, 0], threading.Event(), memory()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[:] = [max(p, now - then) for p, now, then in zip(peak, memory(), start, strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def memory() -> tuple[int, int]:
    """Return the bytes of memory that belong to this process alone, and those that are resident in all (Linux)."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    except FileNotFoundError:
        raise CoralError("Memory is measured on Linux only.") from None
    own, resident = (1024 * int(lines[name].split()[0]) for name in ("RssAnon", "VmRSS"))
    return own, resident


if __name__ == "__main__":
    main()
