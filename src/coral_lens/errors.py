"""The one exception that a user's mistake may raise. Never raised for a bug of ours: that is an `assert`."""

from collections.abc import Iterable
from difflib import get_close_matches


class CoralError(Exception):
    """What is wrong, what was found, where, and what to do, in one sentence.

    The command line prints the message without a traceback and exits with code 2.
    """


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> str:
    """Return ` Did you mean 'a', 'b'?` for the known names closest to `name`, or an empty string."""
    close = get_close_matches(name, list(known), n=n, cutoff=0.6)
    return f" Did you mean {', '.join(repr(c) for c in close)}?" if close else ""
