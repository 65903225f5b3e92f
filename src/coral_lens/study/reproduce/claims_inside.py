"""What the analyses of a model's inside say about the paper's claims: layers, probes, features, heads, dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coral_lens.report.figures.paper import components_text
from coral_lens.report.tables.paper import load_stated_numbers
from coral_lens.study.reproduce.claim import (
    Claim,
    Record,
    Said,
    between,
    interval_says,
    most_chosen,
    no_gain_says,
    number_of,
    stated,
    together,
)

MIDDLE = (0.45, 0.8)
"""Shares of a model's depth that count as its middle: the paper's best layers are 17 to 21 of 30."""
HIGHEST = 0.1
"""The R² that none of the paper's heads is above."""
EARLY = 0.2
"""The paper's harmful layers are the first 7 of 31."""
NOTHING = 0.005
"""A mean change of ECE below half a point is next to nothing: the paper's is a hundredth of that."""
MANY = 0.25
"""A share of the heads above which the signal counts as spread over many: the paper's is 0.55."""


# ---------------------------------------------------------------------------------------------------- layers and probes


def layer_claims(record: Record) -> Iterator[Claim]:
    """Yield where the best layers are, what early ones do, whether several help, and whether gamma = 1 is best."""
    yield middle_claim(record)
    yield early_claim(record)
    yield from side_by_side_claims(record)
    yield gamma_claim(record)


def middle_claim(record: Record) -> Claim:
    """Return where the best layers are: counted over folds, and said only where steering by them clearly helps."""
    last, chosen, gain = last_layer(record), record["single_layers"], record["single_gain"]["accuracy"]
    best, inside = most_chosen(chosen), [MIDDLE[0] <= layer / last <= MIDDLE[1] for layer in chosen]
    said: Said = "cannot be told"
    if gain["low"] > 0 and all(inside) is any(inside):
        said = "agrees" if all(inside) else "does not agree"
    return Claim(
        "layers",
        "Middle layers are the best to steer by",
        "layers {} to {} of {}".format(*(number_of(f"layers.{name}") for name in ("best_low", "best_high", "last"))),
        f"layer {best} of {last}, chosen on other folds",
        said,
        f"{said.capitalize()}: layer {best} of {last} is chosen, at {100 * best / last:.0f} % of the depth, and one between "
        f"{100 * MIDDLE[0]:.0f} and {100 * MIDDLE[1]:.0f} % in {sum(inside)} of {len(inside)} folds, which is a count; "
        f"steering by the layer of each fold changes accuracy by {between(gain)} points.",
    )


def early_claim(record: Record) -> Claim:
    """Return whether early layers harm at gamma = 1, as the paper steers: a chosen strength may be 0, which harms nothing."""
    early = [row for row in record["rows"] if row["layer"] <= EARLY * last_layer(record)]
    gains = [row["at_one_gain"]["accuracy"] for row in early]
    below, above = (
        sum(said == "agrees" for said in (interval_says(g, better=b) for g in gains)) for b in ("down", "up")
    )
    said: Said = "agrees" if below == len(gains) else "does not agree" if above == len(gains) else "cannot be told"
    mean, unsteered = (
        mean_of([row["at_one"]["accuracy"] for row in early], "value"),
        record["base"]["accuracy"]["value"],
    )
    return Claim(
        "layers",
        "Steering by early layers falls below the unsteered accuracy",
        f"layers 0 to {number_of('layers.harmful_high')}",
        f"{100 * mean:.1f} on average, unsteered {100 * unsteered:.1f}",
        said,
        f"{said.capitalize()}: at gamma = 1 the first {len(early)} layers have {100 * mean:.1f} % accuracy on average, "
        f"{100 * unsteered:.1f} % without steering; {below} of them are clearly below it, {above} clearly above.",
    )


def last_layer(record: Record) -> int:
    """Return the number of the last layer that was analysed."""
    return int(max(row["layer"] for row in record["rows"]))


def side_by_side_claims(record: Record) -> Iterator[Claim]:
    """Yield whether several layers side by side are better than the best one."""
    for row in record["top"]:
        behind = row["behind_single"]["accuracy"]
        said = no_gain_says(behind, better="up")
        yield Claim(
            "probe",
            f"{row['n_layers']} layers side by side are no better than one",
            "no meaningful improvement",
            f"{between(behind)} points of accuracy",
            said,
            f"{said.capitalize()}: {row['n_layers']} layers change accuracy by {between(behind)} points against the best single "
            "one.",
        )


def gamma_claim(record: Record) -> Claim:
    """Return whether another strength than 1 is clearly better, or may be by a point."""
    best = min(record["gammas"], key=lambda row: row["scores"]["brier"]["value"])
    behind = best["over_one"]["brier"]
    said = together([no_gain_says(row["over_one"]["brier"], better="down") for row in record["gammas"]])
    return Claim(
        "probe",
        "gamma = 1 is the strongest and most consistent",
        f"gamma = {stated('gamma.best')}",
        f"lowest Brier score at gamma = {best['gamma']:g}",
        said,
        f"{said.capitalize()}: at gamma = {best['gamma']:g} the Brier score is {between(behind)} points from that at gamma = 1.",
    )


def depth_claims(record: Record) -> Iterator[Claim]:
    """Yield whether networks of one to three hidden layers are behind a linear one."""
    home = [row for row in record["rows"] if not row["transfer"]]
    linear = [row["gain"]["accuracy"] for row in home if row["probe"] == "depth 0"]
    deeper = [row["gain"]["accuracy"] for row in home if row["probe"] in ("depth 1", "depth 2", "depth 3")]
    if not linear or not deeper:
        return
    # the two are not paired, so the ends that lie farthest apart are taken: the interval is too wide rather than too narrow
    ends = {"value": "value", "low": "high", "high": "low"}
    values = {p: mean_of(deeper, p) - mean_of(linear, other) for p, other in ends.items()}
    said: Said = "does not agree" if values["low"] > 0 else "agrees" if values["high"] < 0 else "cannot be told"
    yield Claim(
        "probe",
        "One to three hidden layers are slightly behind a linear probe",
        f"{stated('depth.shallow_loss_low')} to {stated('depth.shallow_loss_high')} behind",
        f"{between(values)} points of accuracy",
        said,
        f"{said.capitalize()}: on held-out questions of the same task one to three hidden layers are {between(values)} points of "
        "accuracy from a linear probe trained by the same loss.",
    )


def mean_of(scores: Sequence[Record], part: str) -> float:
    """Return the mean of one part of scores."""
    return sum(score[part] for score in scores) / len(scores)


# --------------------------------------------------------------------------------------------------------- autoencoders


def sae_claims(record: Record) -> Iterator[Claim]:
    """Yield what single features do, and steering by many."""
    yield ablation_claim(record["ablation"])
    yield steering_claim(record["steering"])


def ablation_claim(ablation: Record) -> Claim:
    """Return whether single features matter; where none was selected, that is said."""
    statement, paper = (
        "Taking out one feature changes next to nothing",
        f"mean change of ECE {stated('sae.mean_ece_change')}",
    )
    group = ablation["groups"].get(ablation["plan"]["by"])
    if group is None:
        reason = f"no feature was selected by {ablation['plan']['by']}."
        return Claim("features", statement, paper, "no feature", "cannot be told", f"Cannot be told: {reason}")
    mean, (first, _, third) = group["ece"]["mean"], group["ece"]["quartiles"]
    nearest = max(mean["low"], -mean["high"], 0.0)
    farthest = max(abs(mean["low"]), abs(mean["high"]))
    said: Said = "agrees" if farthest < NOTHING else "does not agree" if nearest > NOTHING else "cannot be told"
    return Claim(
        "features",
        statement,
        paper,
        f"{between(mean, unit=1.0, digits=5)}, quartiles {first:+.1e} and {third:+.1e}",
        said,
        f"{said.capitalize()}: {len(ablation['chosen'])} features, each taken out alone, change ECE by {between(mean, digits=3)} "
        "points on average.",
    )


def steering_claim(steering: Record) -> Claim:
    """Return whether steering by features does anything; where there was nothing to steer by, that is said."""
    example = stated("sae.steered_example")
    statement = "Steering by features does not help"
    paper = f"top {example}: accuracy {stated('sae.steered_accuracy_change')}, ECE +{stated('sae.steered_ece_change')}"
    rows = [row for row in steering.get("rows", ()) if row["gamma"]]
    if not rows:
        reason = steering.get("failed", "no strength above 0 was tried.")
        return Claim("features", statement, paper, "not steered", "cannot be told", f"Cannot be told: {reason}")
    said_of = [no_gain_says(row["less base"]["accuracy"], better="up") for row in rows]
    said_of += [no_gain_says(row["less base"]["ece"], better="down") for row in rows]
    nearest = min(rows, key=lambda row: abs(row["features"] - load_stated_numbers()["sae.steered_example"].value))
    change, said = nearest["less base"], together(said_of)
    return Claim(
        "features",
        statement,
        paper,
        f"top {nearest['features']}: accuracy {between(change['accuracy'], digits=2)}, ECE {between(change['ece'], digits=2)}",
        said,
        f"{said.capitalize()}: of {len(rows)} steerings by {rows[0]['features']} to {rows[-1]['features']} features "
        f"{said_of.count('does not agree')} clearly raise accuracy or lower ECE, and {said_of.count('cannot be told')} may by a "
        "point or more.",
    )


# ------------------------------------------------------------------------------------------------- heads and dimensions


def head_claims(record: Record) -> Iterator[Claim]:
    """Yield how the signal is spread over heads, with the numbers of the paper's caption."""
    yield spread_claim(record)
    yield highest_claim(record)


def spread_claim(record: Record) -> Claim:
    """Return whether many heads hold the signal; where no head clearly has any, there is nothing to be spread."""
    needed, top, n = record["needed_share"], record["top_share"], len(record["rows"])
    said: Said = "agrees" if needed["low"] > MANY else "does not agree" if needed["high"] < MANY else "cannot be told"
    held = (
        f"{record['needed']['value']:.0f} of {n} heads hold 80 % of the positive signal, the best 48 hold {plain(top)} % (the "
        f"paper: {stated('heads.top48_signal')})."
    )
    if not record["clear"]:
        said, held = "cannot be told", f"of {n} heads none has an R² whose interval lies above 0."
    return Claim(
        "heads",
        "The signal is spread over many heads",
        f"{stated('heads.needed')} ({stated('heads.needed_share')}) hold 80 % of it",
        f"{record['needed']['value']:.0f} of {n} ({plain(needed)} %)",
        said,
        f"{said.capitalize()}: {held}",
    )


def highest_claim(record: Record) -> Claim:
    """Return whether a head has more signal than the paper's best ones: by the interval of each."""
    above, scores = record["above"], [row["r2"] for row in record["rows"]]
    room, clear = (sum(score[end] > HIGHEST for score in scores) for end in ("high", "low"))
    said: Said = "does not agree" if clear else "cannot be told" if room else "agrees"
    return Claim(
        "heads",
        "No head has an R² above 0.10, few above 0.05",
        f"none; {stated('heads.above_005')}; mean {stated('heads.mean_r2')}, highest {stated('heads.max_r2')}",
        f"{above['0.1']}; {above['0.05']} heads; mean {record['mean']['value']:.3f}, highest {record['highest']:.3f}",
        said,
        f"{said.capitalize()}: {above['0.1']} heads have an R² above 0.10, {clear} of them clearly, and {above['0.05']} above "
        f"0.05; the highest has {record['highest']:.3f}, and the intervals of {room} reach above 0.10.",
    )


def plain(score: Record) -> str:
    """Return a share in per cent with its interval, without signs."""
    return between(score).replace("+", "")


def dimension_claims(record: Record) -> Iterator[Claim]:
    """Yield whether more components keep helping, and where the variance of early layers is."""
    rising = [g for g in record["groups"] if g["last_half"]["low"] > 0]
    n = len(record["groups"])
    said: Said = "agrees" if len(rising) == n else "cannot be told" if rising else "does not agree"
    most = max(row["components"] for row in record["rows"])
    late = max(row["r2"]["value"] for row in record["rows"] if row["layers"] == record["groups"][-1]["layers"])
    yield Claim(
        "dimensions",
        "R² rises up to 100 components without saturating",
        f"all groups; {stated('pca.late_r2_low')} to {stated('pca.late_r2_high')} in later layers",
        f"{len(rising)} of {n} groups still rise; {late:.3f} in the last",
        said,
        f"{said.capitalize()}: in {len(rising)} of {n} groups of layers the second half of {most} components clearly adds to R².",
    )
    first = record["groups"][0]
    said, held = "agrees" if first["for_90"] <= 3 else "does not agree", components_text(first["for_90"], most)
    yield Claim(
        "dimensions",
        "Three components hold 90 % of the variance of early layers",
        f"{stated('pca.early_components')} components",
        f"{held} components in layers {first['layers']}, a count",
        said,
        f"{said.capitalize()}: 90 % of the variance of layers {first['layers']} lie in {held} components, on average over its "
        "layers; that is a count, and has no interval.",
    )


OF_RECORDS: dict[str, Callable[[Record], Iterator[Claim]]] = {
    "layers": layer_claims,
    "depth": depth_claims,
    "sae": sae_claims,
    "heads": head_claims,
    "dimensions": dimension_claims,
}
"""The claims that the record of a part answers."""
