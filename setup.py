"""The README as a package index shows it. Everything else about the package is in pyproject.toml.

On an index page a link to docs/tutorial.md would lead nowhere. With a `Repository` among the project's URLs links lead
there; without one, the path stands in the text, and a picture is left out with its caption.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = re.compile(r"^!\[([^\]]*)\]\((?![a-z]+:)([^)]+)\)\n\n(\*[^*]+\*\n\n)?", re.MULTILINE)
"""A picture and, in italics, its caption."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:)([^)#]+)\)")


def index_readme(text: str, repository: str | None) -> str:
    """Return the README without links that work only inside the repository."""
    if repository:
        text = PICTURE.sub(rf"![\1]({repository}/raw/main/\2)\n\n\3", text)
        return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)
    return LINK.sub(r"\1 (`\2`)", PICTURE.sub("", text))


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    readme = index_readme((ROOT / "README.md").read_text("utf-8"), urls.get("Repository"))
    setup(long_description=readme, long_description_content_type="text/markdown")
