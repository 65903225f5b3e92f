"""The one exception that a user's mistake may raise, and what is said of packages that are not installed.

Never raised for a bug of ours: that is an `assert`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

EXTRAS = {
    "eval": ("lm_eval", "datasets", "pyarrow"),
    "report": ("matplotlib", "jinja2", "markupsafe"),
    "gguf": ("gguf",),
    "frames": ("pandas",),
    "tables": ("pyarrow",),
    "excel": ("openpyxl",),
    "adapter": ("peft",),
    "ray": ("ray",),
    "remote": ("s3fs",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}
"""What each extra of the package installs, by the names that it is imported by."""


class CoralError(Exception):
    """What is wrong, what was found, where, and what to do, in one sentence.

    The command line prints the message without a traceback and exits with code 2.
    """


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> str:
    """Return ` Did you mean 'a', 'b'?` for the known names closest to `name` but for case, or an empty string."""
    written = {k.lower(): k for k in reversed(list(known))}
    close = [written[c] for c in get_close_matches(name.lower(), list(written), n=n, cutoff=0.6)]
    return f" Did you mean {', '.join(repr(c) for c in close)}?" if close else ""


def need(*extras: str, by: str) -> None:
    """Refuse to go on without the packages of these extras; `by` is the subject of the sentence: `A report page`.

    Nothing is imported. Long work that ends in such a package calls this before it begins.
    """
    missing = {name: extra for extra in extras for name in EXTRAS[extra] if find_spec(name) is None}
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        wanted = ",".join(dict.fromkeys(missing.values()))
        *others, last = missing
        named = f"{', '.join(others)} and {last}" if others else last
        raise CoralError(f"{by} needs {named}, which {verb} not installed: pip install 'coral-lens[{wanted}]'")
