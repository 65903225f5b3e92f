"""A figure's SVG in a third of matplotlib's bytes, to be put into a page. Changes nothing that can be seen.

Names and numbers of users stand in a figure as text. Only tags are edited, so that no text can be taken for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

FALLBACKS = "'DejaVu Sans',Verdana,sans-serif"
"""Fonts of about the same width, for machines that lack the first."""
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", re.DOTALL)
_TAG = re.compile(r"(<[^>]+>)")
_COORDINATES = re.compile(r' (?:d|x|y|x1|y1|x2|y2|points)="[^"]*"|translate\([^)]*\)')
_ID = re.compile(r'(?<= id=")[^"]+|(?<=href="#)[^"]+|(?<=url\(#)[^)]+')
_STYLE = re.compile(r' style="([^"]*)"')


def compacted(svg: str, *, prefix: str) -> str:
    """Return the bare `<svg>` element: no groups without a purpose, short ids, each style once, coordinates to 0.01 points."""
    ids, styles = Names(prefix), Names(f"{prefix}s")
    body = "".join(tokens(_DROPPED.sub("", svg[svg.index("<svg") :])))
    edited = "".join(
        edit_tag(part, ids, styles) if part.startswith("<") else part for part in _TAG.split(body) if part
    )  # fmt: skip
    rules = "".join(f".{name}{{{style}}}" for style, name in styles.known.items())
    head, rest = edited.split(">", 1)
    # what matplotlib says of all elements is inherited here: a rule for `*` would hold for the whole page
    return f'{head} stroke-linejoin="round" stroke-linecap="butt"><style>{rules}</style>{rest}'


class Names:
    """Short names, given out in the order in which they are asked for."""

    def __init__(self, prefix: str) -> None:
        self.known: dict[str, str] = {}
        self._next = (f"{prefix}{n}" for n in count())

    def of(self, text: str) -> str:
        if text not in self.known:
            self.known[text] = next(self._next)
        return self.known[text]


def tokens(svg: str) -> Iterator[str]:
    """Yield tags and text, without blank text and without groups that have no attributes but a name."""
    kept: list[bool] = []
    for part in _TAG.split(svg):
        if not part.startswith("<"):
            yield part if part.strip() else ""
            continue
        tag = re.sub(r"\s+", " ", part)
        if tag.startswith("<g") and (tag[2] in " >/"):
            tag = re.sub(r'(?<=<g) id="[^"]*"', "", tag)
            bare = tag.rstrip("/> ") == "<g"
            if not tag.endswith("/>"):
                kept.append(not bare)
            yield "" if bare else tag
        elif tag == "</g>":
            yield tag if kept.pop() else ""
        else:
            yield tag


def edit_tag(tag: str, ids: Names, styles: Names) -> str:
    """Return a tag with short ids and coordinates, and its style as a class."""
    tag = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", tag)
    tag = _COORDINATES.sub(shortened, tag)
    tag = _ID.sub(lambda match: ids.of(match[0]), tag)
    return _STYLE.sub(lambda match: f' class="{styles.of(plain(match[1]))}"', tag)


def shortened(match: re.Match[str]) -> str:
    """Return coordinates to a hundredth of a point: more is not seen. Letters of a path need no spaces around them."""
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", match[0])
    return re.sub(r" ?([A-Za-z]) (?=[-\d\"A-Za-z])", r"\1", text).replace(' "', '"') if text.startswith(" d=") else text


def plain(style: str) -> str:
    """Return a style without spaces, with fonts to fall back on."""
    return re.sub(r"\s*([:;,])\s*", r"\1", style).replace("'DejaVu Sans'", FALLBACKS).strip(";")
