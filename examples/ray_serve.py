"""`coral serve` on a Ray cluster: every replica has the model, the lenses, all routes and the page.

    pip install 'coral-lens[serve]' 'ray[serve]'
    PYTHONPATH=examples serve run ray_serve:app lens=general

Ray sends each request to one replica, which batches those that reach it. A key, and who may reach it, is Ray's business.
"""

from __future__ import annotations

from ray import serve

from coral_lens import load_model
from coral_lens.serve.app import make_app
from coral_lens.serve.guard import App
from coral_lens.serve.lenses import open_lenses
from coral_lens.serve.service import Service
from coral_lens.serve.settings import Address, ServeSettings


def app(arguments: dict[str, str]) -> serve.Application:
    """Return what `serve run` starts: `lens` is a folder or `general`, `model` the lens's own unless it is said."""

    def routes() -> App:
        lenses = open_lenses([arguments.get("lens", "general")])
        model = load_model(arguments.get("model", next(iter(lenses)).lens.model["name"]), dtype="float32")
        return make_app(Service(model, lenses, ServeSettings(address=Address(no_auth=True))))

    return serve.deployment(serve.ingress(routes)(), num_replicas=1, max_ongoing_requests=100).bind()
