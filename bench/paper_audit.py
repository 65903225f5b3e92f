"""Check the paper's published numbers against each other: bounds, averages, repeats, whole questions, noise.

    python bench/paper_audit.py                      every check
    python bench/paper_audit.py brier averages       some of them

Reads `coral_lens.report.tables.paper` only: no model, no data, a few seconds. `docs/paper-audit.md` quotes what it prints.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from coral_lens.metrics.scores import equal_width_bins
from coral_lens.report.tables.paper import COLUMNS, METHODS, load_paper_numbers, load_stated_numbers

HALF = 0.005
"""Half of the last printed digit: every check grants this much in the paper's favour."""
CELLS = load_paper_numbers()
VALUE = {(c.task, c.model, c.method, c.metric): c.value for c in CELLS}
STATED = {key: number.value for key, number in load_stated_numbers().items()}
MODELS = tuple(dict.fromkeys(c.model for c in CELLS))
TRAINED = tuple(dict.fromkeys(c.task for c in CELLS if c.table == "tab:steering_results"))
TRANSFER = tuple(dict.fromkeys(c.task for c in CELLS if c.table == "tab:transfer_results"))
TASKS = TRAINED + TRANSFER
SHORT = dict(zip(MODELS, ("Mistral", "Qwen", "Deepseek"), strict=True))
N_OPTIONS = {task: 5 if task == "CommonsenseQA" else 4 for task in TASKS}
"""Of most questions: ARC-Challenge also has a few of three and of five."""
N_QUESTIONS = {
    "MMLU": (2800, 2808, 2809),
    "RACE": (1045, 3498, 4934),
    "CommonsenseQA": (1140, 1221),
    "ARC-Challenge": (1172,),
    "OpenBookQA": (500,),
    "Math-MC": (2985, 4914, 5000),
}
"""Sizes that each test set may have: as stated, as lm-eval's task has it, as published. HellaSwag's 10,042 fit any accuracy."""
TAKEN = {"MMLU": 2809, "RACE": 4934, "CommonsenseQA": 1221, "ARC-Challenge": 1172, "HellaSwag": 10042,
         "OpenBookQA": 500, "Math-MC": 4914}  # fmt: skip
"""The sizes that `whole` finds to fit."""


@dataclass(frozen=True)
class Row:
    """A method's line in a results table, as fractions; NLL in nats."""

    task: str
    model: str
    method: str
    acc: float
    ece: float
    nll: float
    brier: float

    def __str__(self) -> str:
        return f"{self.task:<14}{SHORT[self.model]:<9} {self.method:<10}"


def rows() -> Iterator[Row]:
    """Yield every line of both tables."""
    for task, model, method in itertools.product(TASKS, MODELS, METHODS):
        acc, ece, nll, brier = (VALUE[task, model, method, m] / 100 for m in ("Acc", "ECE", "NLL", "Brier"))
        yield Row(task, model, method, acc, ece, nll, brier)


def check_brier() -> None:
    """Summed Brier (the paper's definition) below what its accuracy allows: a wrong answer costs at least 0.5."""
    below = [r for r in rows() if 100 * r.brier + HALF < (100 - 100 * r.acc - HALF) / 2]
    print("least summed Brier = (100 - Acc) / 2; rows below it:")
    for method in METHODS:
        print(f"  {method:<10}{sum(r.method == method for r in below):3d} of 21")
    print(f"  together  {len(below):3d} of {len(list(rows()))}")
    for r in below:
        print(f"  {r} Acc {100 * r.acc:5.2f}  needs {50 * (1 - r.acc):5.2f}  printed {100 * r.brier:5.2f}")
    worse = [r for r in rows() if r.method == "CORAL" and r.brier > (1 - 1 / N_OPTIONS[r.task]) / N_OPTIONS[r.task]]
    print(f"if divided by the number of options, CORAL would be worse than uniform guessing on {len(worse)} of 21 rows")


LEAST_RATIO = min(-math.log1p(-d) / d**2 for d in np.linspace(0.5, 0.9, 40001))
"""The least -log(1 - d) / d^2: an answer whose confidence is off by d costs d^2 in Brier and -log(1 - d) in NLL."""


def check_top_label() -> None:
    """Top-label Brier below the square of ECE, or NLL below 2.455 times Brier: impossible, whatever the confidences."""
    print(f"top-label Brier >= ECE^2, and top-label NLL >= {LEAST_RATIO:.4f} x Brier; rows that break one:")
    for r in rows():
        least_brier, least_nll = (r.ece - HALF / 100) ** 2, LEAST_RATIO * (r.brier - HALF / 100)
        if r.brier + HALF / 100 < least_brier:
            print(f"  {r} ECE {100 * r.ece:5.2f}  needs Brier {100 * r.ece**2:5.2f}  printed {100 * r.brier:5.2f}")
        if r.nll + HALF / 100 < least_nll:
            needs = 100 * LEAST_RATIO * r.brier
            print(f"  {r} Brier {100 * r.brier:5.2f}  needs NLL {needs:6.2f}  printed {100 * r.nll:5.2f}")
    # within a bin 0.04 wide the deviations are at most 0.02 and 0.5: (0.5 + 0.02)^2 - 0.5^2 is the last term
    above = [r for r in rows() if r.brier > r.acc * (1 - r.acc) + r.ece + 0.0204]
    print("rows above the most that Acc and ECE allow, Acc (1 - Acc) + ECE + 0.0204:")
    for r in above:
        print(f"  {r} {100 * (r.acc * (1 - r.acc) + r.ece + 0.0204):5.2f}  printed {100 * r.brier:5.2f}")
    dull = [r for r in rows() if r.method == "CORAL" and r.brier >= 0.97 * r.acc * (1 - r.acc)]
    print("CORAL's rows within 3 % of, or above, the Brier score of one constant confidence, Acc (1 - Acc):")
    for r in dull:
        print(f"  {r} {100 * r.acc * (1 - r.acc):5.2f}  printed {100 * r.brier:5.2f}")


def check_ratios() -> None:
    """Methods that are Fewshot times one factor, the same for all three models, in a column of a task."""
    for method in ("SteerConf", "ITI", "CCPS", "CORAL"):
        same = [(t, m) for t in TASKS for m in COLUMNS if one_factor((t,), method, m, MODELS)]
        pairs = sum(
            one_factor((t,), method, m, two)
            for t in TASKS
            for m in COLUMNS
            for two in itertools.combinations(MODELS, 2)
        )
        print(
            f"{method:<10} one factor fits all three models in {len(same):2d} of 35 columns, two models in {pairs:2d} of 105"
        )
    for one, other in itertools.combinations(TASKS, 2):
        for method in METHODS:
            if method != "Fewshot" and all(one_factor((one, other), method, m, MODELS) for m in COLUMNS):
                print(f"{method}: in every column one factor fits the six rows of {one} and {other}")
    for method in ("SteerConf", "ITI"):
        print(f"{method} / Fewshot for Mistral, Qwen, Deepseek (* one factor fits all three):")
        for task in TASKS:
            print(f"  {task:<14}" + "  ".join(ratios(task, method, m) for m in COLUMNS))


def interval(task: str, model: str, method: str, metric: str) -> tuple[float, float]:
    """Return the least and the greatest method / Fewshot that the printed digits allow."""
    value, base = VALUE[task, model, method, metric], VALUE[task, model, "Fewshot", metric]
    return (value - HALF) / (base + HALF), (value + HALF) / (base - HALF)


def one_factor(tasks: tuple[str, ...], method: str, metric: str, models: tuple[str, ...]) -> bool:
    """Whether one factor explains the column of these tasks and models to the printed digit."""
    ends = [interval(task, model, method, metric) for task in tasks for model in models]
    return max(low for low, _ in ends) <= min(high for _, high in ends)


def ratios(task: str, method: str, metric: str) -> str:
    """Return the three ratios of a column."""
    three = (VALUE[task, model, method, metric] / VALUE[task, model, "Fewshot", metric] for model in MODELS)
    return (
        f"{metric} "
        + "/".join(f"{r:.3f}" for r in three)
        + ("*" if one_factor((task,), method, metric, MODELS) else " ")
    )


def check_repeats() -> None:
    """Values that two methods share in a block, and a row that repeats another's shifted by one column."""
    for task, model in itertools.product(TASKS, MODELS):
        for one, other in itertools.combinations(METHODS, 2):
            first, second = ([VALUE[task, model, m, c] for c in COLUMNS] for m in (one, other))
            for shift in (0, 1, -1):
                pairs = [(i, i + shift) for i in range(5) if 0 <= i + shift < 5]
                equal = [(i, j) for i, j in pairs if first[i] == second[j]]
                if equal and (shift == 0 or len(equal) > 1):
                    cells = ", ".join(f"{COLUMNS[i]} = {COLUMNS[j]} = {first[i]:.2f}" for i, j in equal)
                    print(f"  {task:<14}{SHORT[model]:<9} {one} and {other}: {cells}")


def check_averages() -> None:
    """CORAL's average improvement, every way it might have been averaged, beside the abstract's numbers."""
    print("abstract: 10 % and 50 %; transfer 14 % and 49 %")
    print(
        f"{'tasks':<10}{'against':<12}{'':<6}{'mean of %':>10}{'median of %':>12}{'% of means':>11}{'geometric':>10}{'points':>8}"
    )
    for name, tasks in (("trained", TRAINED), ("transfer", TRANSFER), ("all", TASKS)):
        for against in ("Fewshot", "SteerConf", "ITI", "CCPS", "second best"):
            for metric in ("Acc", "ECE"):
                pairs = [before_after(t, m, against, metric) for t in tasks for m in MODELS]
                print(f"{name:<10}{against:<12}{metric:<6}" + averages(pairs))


def before_after(task: str, model: str, against: str, metric: str) -> tuple[float, float]:
    """Return a metric of the method compared with, and CORAL's."""
    values = {method: VALUE[task, model, method, metric] for method in METHODS}
    after = values.pop("CORAL")
    if against == "second best":
        return (max if metric == "Acc" else min)(values.values()), after
    return values[against], after


def averages(pairs: list[tuple[float, float]]) -> str:
    """Return five averages of the change from before to after."""
    relative = [100 * (after / before - 1) for before, after in pairs]
    means = 100 * (sum(after for _, after in pairs) / sum(before for before, _ in pairs) - 1)
    geometric = 100 * math.expm1(fmean(math.log(after / before) for before, after in pairs))
    points = fmean(after - before for before, after in pairs)
    return f"{fmean(relative):10.2f}{median(relative):12.2f}{means:11.2f}{geometric:10.2f}{points:8.2f}"


def check_sentences() -> None:
    """Numbers and superlatives of the text, recomputed from the tables."""
    deepseek = MODELS[2]
    print("RACE, Deepseek: CORAL's accuracy and ECE against each method (text: 17.39 points, 64 %)")
    for method in METHODS[:-1]:
        (acc, coral_acc), (ece, coral_ece) = (before_after("RACE", deepseek, method, m) for m in ("Acc", "ECE"))
        gain = f"{100 * (1 - coral_ece / ece):5.1f} %"
        print(f"  {method:<10}{coral_acc - acc:+6.2f} points   ECE {ece:5.2f} -> {coral_ece:.2f}: {gain}")
    print("columns in which CORAL's value is the best, alone or tied:")
    for metric in COLUMNS:
        won = [t for t in TASKS for m in MODELS if "CORAL" in ranked(t, m, metric)[0]]
        print(f"  {metric:<6}{len(won)} of 21")
    for task, model in itertools.product(("MMLU", "CommonsenseQA"), MODELS):
        if (best := ranked(task, model, "Brier")[0]) != ["CORAL"]:
            print(f"  lowest Brier on {task}, {SHORT[model]}: {' and '.join(best)}")
    for metric, sign, stated in (("Acc", 1, "20"), ("ECE", -1, "14; 15+ in 5.2")):
        gains = sorted(((sign * (a - b), t, SHORT[m]) for t in TASKS for m in MODELS
                        for b, a in [before_after(t, m, "Fewshot", metric)]), reverse=True)  # fmt: skip
        many = sum(gain >= (20 if sign == 1 else 15) for gain, *_ in gains)
        largest = ", ".join(f"{g:.2f} ({t}, {m})" for g, t, m in gains[:6])
        print(
            f"largest {metric} gains over Fewshot (text: up to {stated}): {largest}; {many} of 21 reach {20 if sign == 1 else 15}"
        )
    print("mean relative change against Fewshot by task:")
    for task in TASKS:
        means = {m: fmean(100 * (a / b - 1) for model in MODELS for b, a in [before_after(task, model, "Fewshot", m)])
                 for m in ("Acc", "ECE")}  # fmt: skip
        print(f"  {task:<14}Acc {means['Acc']:+6.1f} %   ECE {means['ECE']:+6.1f} %")
    for name, tasks in (("all", TASKS), ("transfer", TRANSFER)):
        steps = [before_after(t, m, "Fewshot", "Acc")[0] - VALUE[t, m, "CCPS", "Acc"] for t in tasks for m in MODELS]
        below, equal = sum(step > 0 for step in steps), sum(step == 0 for step in steps)
        print(
            f"CCPS's accuracy against Fewshot's, {name} tasks: below in {below}, equal in {equal} of {len(steps)} cells"
        )


def ranked(task: str, model: str, metric: str) -> list[list[str]]:
    """Return the methods from the best to the worst value of a column, equal ones together."""
    values = {method: VALUE[task, model, method, metric] for method in METHODS}
    order = sorted(set(values.values()), reverse=metric == "Acc")
    return [[method for method in METHODS if values[method] == value] for value in order]


def check_marks() -> None:
    """Bold that is not the best value, underlines that are not the second best."""
    marked = {(c.task, c.model, c.metric, c.mark, c.method) for c in CELLS}
    wrong = 0
    for task, model, metric in itertools.product(TASKS, MODELS, COLUMNS):
        first, second, *_ = ranked(task, model, metric)
        for mark, true in (("best", first), ("second", second if len(first) == 1 else [])):
            shown = [m for m in METHODS if (task, model, metric, mark, m) in marked]
            if shown != true:
                wrong += 1
                told = ", ".join(f"{m} {VALUE[task, model, m, metric]:.2f}" for m in shown) or "none"
                should = (
                    ", ".join(f"{m} {VALUE[task, model, m, metric]:.2f}" for m in true) or "none (the best is tied)"
                )
                print(f"  {task:<14}{SHORT[model]:<9} {metric:<6}{mark:<7} marked {told}; by value {should}")
    print(f"  {wrong} of 210 marks")


def fits(percent: float, n: int) -> bool:
    """Whether some whole number of right answers among n rounds to this accuracy."""
    near = round(percent * n / 100)
    return any(abs(100 * k / n - percent) <= HALF + 1e-9 for k in (near - 1, near, near + 1))


def check_whole() -> None:
    """Accuracies that no whole number of right answers gives, for each size the test set may have."""
    for task, sizes in N_QUESTIONS.items():
        for n in sizes:
            chance = fmean(fits(x / 100, n) for x in range(3000, 9000))
            print(f"{task}, {n:,} questions ({100 * chance:.0f} % of all two-digit accuracies fit by chance)")
            for method in METHODS:
                values = [VALUE[task, model, method, "Acc"] for model in MODELS]
                bad = [f"{v:.2f}" for v in values if not fits(v, n)]
                print(f"  {method:<10}{3 - len(bad)} of 3 fit" + (f"; not {', '.join(bad)}" if bad else ""))
    three = [VALUE["CommonsenseQA", model, "CORAL", "Acc"] for model in MODELS]
    near = [n for n in range(1000, 1401) if all(fits(v, n) for v in three)]
    runs = [k for k in range(1, 11) if all(fits(v, 1221 * k) for v in three)]
    print(f"CORAL on CommonsenseQA: sizes from 1,000 to 1,400 that fit all three: {near}")
    print(f"CORAL on CommonsenseQA: averages over so many runs of 1,221 that fit all three, of 1 to 10: {runs}")


def check_gains() -> None:
    """How many questions CORAL's accuracy gains over Fewshot are, and the smallest p that McNemar's test could give."""
    for task, model in itertools.product(TASKS, MODELS):
        before, after = before_after(task, model, "Fewshot", "Acc")
        net = round((after - before) * TAKEN[task] / 100)
        if net < 30:
            print(f"  {task:<14}{SHORT[model]:<9} {after - before:+.2f} points = {net} of {TAKEN[task]:,} questions; "
                  f"smallest two-sided p {min(1.0, 2 * 0.5**net):.2g}")  # fmt: skip


def check_floor() -> None:
    """ECE of a perfectly calibrated model whose accuracy and top-label Brier are those that CORAL's row prints."""
    print("mean and 95 % point over 400 simulations; confidences Beta on [1/n, 1] with Var = Acc (1 - Acc) - Brier")
    print(f"{'':<24}{'questions':>10}{'25 bins':>8}{'95 %':>7}{'15 bins':>9}{'CORAL':>8}{'Fewshot':>9}")
    for r in (r for r in rows() if r.method == "CORAL"):
        n, rng = TAKEN[r.task], np.random.default_rng(0)
        sure = confidences(r, n, rng)
        draws = {b: simulated_ece(sure, b, rng) for b in (25, 15)}
        few = VALUE[r.task, r.model, "Fewshot", "ECE"]
        mark = " <- within noise" if 100 * r.ece <= np.quantile(draws[25], 0.95) else ""
        print(f"{r.task:<14}{SHORT[r.model]:<10}{n:>10,}{draws[25].mean():8.2f}{np.quantile(draws[25], 0.95):7.2f}"
              f"{draws[15].mean():9.2f}{100 * r.ece:8.2f}{few:9.2f}{mark}")  # fmt: skip
    for n in (300, 500, 1045, 1221, 2809, 4934, 10042):
        sure = np.random.default_rng(0).uniform(0.25, 1, n)
        print(f"uniform confidences on [0.25, 1], {n:6,} questions, 25 bins: "
              f"{simulated_ece(sure, 25, np.random.default_rng(1)).mean():.2f}")  # fmt: skip


def confidences(r: Row, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw confidences with the mean and the variance that calibration implies for this row."""
    low = 1 / N_OPTIONS[r.task]
    mean = (r.acc - low) / (1 - low)
    # where Brier reaches that of a constant confidence (HellaSwag), nearly constant confidences are taken
    variance = max(r.acc * (1 - r.acc) - r.brier, 1e-4) / (1 - low) ** 2
    total = mean * (1 - mean) / variance - 1
    assert total > 0, f"{r}: no confidences on [1/n, 1] are calibrated and have this Brier score"
    return low + (1 - low) * rng.beta(mean * total, (1 - mean) * total, n)


def simulated_ece(sure: np.ndarray, n_bins: int, rng: np.random.Generator) -> np.ndarray:
    """Return 100 x ECE of 400 sets of answers, each right with a probability of exactly its confidence."""
    bins = equal_width_bins(sure, n_bins=n_bins)
    gaps = ((rng.random(len(sure)) < sure) - sure for _ in range(400))
    return np.array([100 * np.abs(np.bincount(bins, gap)).sum() / len(sure) for gap in gaps])


def check_stated() -> None:
    """Arithmetic of the numbers that only the text states."""
    total, mean, share = (STATED[f"heads.{key}"] for key in ("total", "mean_r2", "top48_signal"))
    print(f"heads: {STATED['heads.layers'] * STATED['heads.per_layer']:.0f} = layers x heads, stated {total:.0f}")
    for key in ("above_005", "needed"):
        print(f"heads: {key} {100 * STATED[f'heads.{key}'] / total:.1f} %, stated {STATED[f'heads.{key}_share']:g} %")
    top48 = share / 100 * mean * total / 48
    print(f"heads: {100 * 48 / total:.1f} % of them (48) hold {share} % of the signal: mean R2 {top48:.3f}, all {mean}")
    print(f"heads: {0.8 * total:.0f} equal heads would hold 80 %, stated {STATED['heads.needed']:.0f}")
    change = 100 * STATED["sae.mean_ece_change"]
    print(f"SAE: mean change {change:.4f} points, stated {STATED['sae.mean_ece_change_points']}")
    for n in (2800, 2808, 2809):
        losses = [(b, b - k) for k in (3, 4) for b in range(1000, 2000)]
        shown = {f"{round(100 * b / n, 2) - round(100 * a / n, 2):.2f}" for b, a in losses}
        print(f"SAE: 3 or 4 of {n:,} questions print as {', '.join(sorted(shown))}; stated 0.12")
    few, corr = VALUE["MMLU", MODELS[2], "Fewshot", "Acc"], STATED["corrsteer.accuracy"]
    print(f"CorrSteer: {corr:.1f} against Fewshot {few:.2f}: {corr - few:+.2f} points")
    sampled = STATED["construct.commonsense_qa"] + STATED["construct.race"]
    train, split = sampled * STATED["construct.train_share"] / 100, (STATED["mmlu.train"], STATED["mmlu.validation"])
    print(f"training: Probe 1 {train:,.0f} + {sampled - train:,.0f} for validation = {sampled:,.0f}")
    print(f"training: Probe 2 {split[0]:,.0f} + {split[1]:,.0f} for validation = {sum(split):,.0f}")


CHECKS: dict[str, Callable[[], None]] = {
    "brier": check_brier,
    "top-label": check_top_label,
    "ratios": check_ratios,
    "repeats": check_repeats,
    "averages": check_averages,
    "sentences": check_sentences,
    "marks": check_marks,
    "whole": check_whole,
    "gains": check_gains,
    "floor": check_floor,
    "stated": check_stated,
}


def main() -> None:
    """Run the checks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="check", help=f"of {', '.join(CHECKS)}; all if none is named")
    args = parser.parse_args()
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.error(f"no check called {unknown[0]!r}; there are {', '.join(CHECKS)}")
    for name in args.checks or CHECKS:
        print(f"\n== {name}: {(CHECKS[name].__doc__ or '').strip()}")
        CHECKS[name]()


if __name__ == "__main__":
    main()
