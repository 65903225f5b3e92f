"""The pages of a server, for people: the playground at `/` and a description of the routes at `/docs`.

Plain files without a build step, which ask for nothing of other sites. They hold no lens and no question: all that they show
they ask the routes for, with the key that a person types in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

PAGES = {"/": "index.html", "/docs": "docs.html"}
"""Paths and the files that stand there; every other file has its name below `/page/`."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, str]:
    """Return every path of the pages with its file."""
    folder = files("coral_lens.serve") / "pages"
    others = sorted(file.name for file in folder.iterdir() if file.name not in PAGES.values())
    return PAGES | {f"/page/{name}": name for name in others}


def add_pages(app: FastAPI) -> frozenset[str]:
    """Have an application give out the pages, and return their paths; they are no part of its description."""
    from fastapi import Request
    from fastapi.responses import Response

    def giving(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
        async def give(_: Request) -> Response:
            return Response(content, media_type=media_type)

        return give

    folder, paths = files("coral_lens.serve") / "pages", page_files()
    for path, name in paths.items():
        media_type = TYPES[name[name.rindex(".") :]]
        app.add_route(path, giving((folder / name).read_bytes(), media_type), ["GET"], include_in_schema=False)
    return frozenset(paths)
