"""What an audit found, in sentences: the head of its page and the first lines in the terminal. Computes nothing."""

from __future__ import annotations

from coral_lens.audit.measure import Audit, Threshold
from coral_lens.metrics.scores import Score
from coral_lens.report.confidence import ConfidenceSummary, confidence_summary
from coral_lens.report.names import method_name
from coral_lens.report.tables.formats import interval_text, percent

MOST_NAMED = 3
"""Systems that the head describes one by one; the tables have all."""
ENOUGH = 300
"""Questions below which the head says that they are few."""


def with_interval(score: Score, *, sign: bool = False) -> str:
    """Return `61.2 [57.0 to 65.1]`."""
    return f"{percent(score.value, sign=sign)} [{interval_text(score.low, score.high, sign=sign)}]"


def sentences(found: Audit) -> list[str]:
    """Say how right and how sure each system is, what a threshold is worth, and what flips."""
    said = []
    for name, predictions in list(found.audited.systems.items())[:MOST_NAMED]:
        said.append(trust_sentence(found, name, confidence_summary(predictions, base=None)))
    said += [threshold_sentence(t) for t in found.thresholds[:MOST_NAMED]]
    for flips in found.flips[:MOST_NAMED]:
        said.append(
            f"Of “{method_name(flips.system)}”, {with_interval(flips.flipped)} % of the answers flip when the options are put "
            f"into another order ({flips.n_pairs:,} questions)."
        )
    if len(found.audited.questions) < ENOUGH:
        said.append(
            f"{len(found.audited.questions):,} questions are few: what cannot be told apart here may differ all the same."
        )
    return said


def trust_sentence(found: Audit, name: str, summary: ConfidenceSummary) -> str:
    """Say whether the confidence of a system can be taken at its word."""
    over, smooth = summary.overconfidence, found.metrics[name].scores["smooth_ece"]
    if over.low > 0:
        verdict = f"it is too sure by {with_interval(over)} points"
    elif over.high < 0:
        verdict = f"it is not sure enough, by {percent(-over.value)} [{interval_text(-over.high, -over.low)}] points"
    else:
        verdict = f"on average that is not clearly off ({with_interval(over, sign=True)} points)"
    floor = found.floors[name]["smooth_ece"]
    alike = ": the two cannot be told apart" if smooth.low <= floor else ""
    return (
        f"On {summary.n_questions:,} questions “{method_name(name)}” is right on {with_interval(summary.accuracy)} % and says "
        f"{percent(summary.confidence.value)} %: {verdict}. Its smooth ECE is {with_interval(smooth)}, where a perfectly "
        f"calibrated one with these confidences would show {percent(floor)}{alike}."
    )


def threshold_sentence(threshold: Threshold) -> str:
    """Say what is promised above a threshold, and what was found on other questions."""
    abstention = threshold.maps.abstention
    assert abstention is not None, "a threshold was fitted"
    who = f"“{method_name(threshold.system)}”"
    if abstention.threshold is None or threshold.right is None:
        return f"For {who} no threshold can be promised: it {abstention}."
    promised = (
        f"at least {percent(1 - abstention.risk)} % are right, with a certainty of {percent(1 - abstention.delta)} %"
    )
    used = threshold.maps.used
    after = "" if used == "none" else f" after the {'isotonic curve' if used == 'isotonic' else used}"
    above = "Of all answers of" if abstention.threshold < 0 else "Of the answers of"
    bar = "" if abstention.threshold < 0 else f" above a confidence of {abstention.threshold:.4g}{after}"
    return (
        f"{above} {who}{bar}, {promised}, for questions drawn as these. On "
        f"the questions that had no part in it, {with_interval(threshold.answered)} % are answered, and of these "
        f"{with_interval(threshold.right)} % are right."
    )
