"""The routes. Each reads one format and has the service answer; a mistake, of the client or of ours, is one sentence."""

# no `from __future__ import annotations`: FastAPI reads the annotations of routes, whose names are those of this function
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from coral_lens.lens.publish import public_name
from coral_lens.serve.ask import AskReply, AskRequest, OpenAsker
from coral_lens.serve.complaints import FAILED, STATUSES, Complaint, ErrorReply, validation_sentence
from coral_lens.serve.decisions import DecisionReply, DecisionRequest, decision_reply
from coral_lens.serve.guard import App, Doors, Guard
from coral_lens.serve.lenses import ServedLens
from coral_lens.serve.page import add_pages
from coral_lens.serve.predict import PredictReply, PredictRequest, predict_reply
from coral_lens.serve.service import Asked, Reply, Service, lens_note, report
from coral_lens.serve.systemone import SystemOneReply, SystemOneRequest, systemone_reply

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": why} for status, why in STATUSES.items()
}
Body = PredictRequest | DecisionRequest | SystemOneRequest


def make_app(service: Service) -> App:
    """Return the application of a service, behind its guard; the service runs while the application does."""
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()
        opened.close()

    app = FastAPI(
        title="coral-lens", version=version("coral-lens"), lifespan=running, docs_url=None, redoc_url=None,
        summary="Calibrated answers to multiple-choice questions, with a probability for every option.",
    )  # fmt: skip

    def complained(complaint: Complaint) -> JSONResponse:
        return JSONResponse(complaint.body, complaint.status, complaint.headers)

    @app.exception_handler(Complaint)
    async def on_complaint(_: Request, error: Complaint) -> JSONResponse:
        return complained(error)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
        field, sentence = validation_sentence(list(error.errors()))
        return complained(Complaint(422, sentence, field=field))

    async def on_wrong_route(_: Request, error: Any) -> JSONResponse:
        return complained(Complaint(error.status_code, f"{error.detail}: see /openapi.json for what is served."))

    @app.exception_handler(Exception)
    async def on_failure(_: Request, error: Exception) -> JSONResponse:
        report(error)
        service.metrics.failure()
        return complained(Complaint(500, FAILED))

    for status in (400, 404, 405):
        app.add_exception_handler(status, on_wrong_route)

    async def gone(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def answer(request: Request, body: Body, name: str | None) -> Reply:
        most = service.settings.limits.max_questions
        if body.n_questions > most:
            raise Complaint(413, f"The request has {body.n_questions} questions, and {most} are allowed at a time.")

        layers = isinstance(body, PredictRequest) and body.layers
        asked = Asked(request.url.path, name, body.asked(), layers)
        return await service.answer(asked, gone=lambda: gone(request))

    @app.post("/v1/predict", responses=ERRORS)
    async def predict(body: PredictRequest, request: Request) -> PredictReply:
        """Answer questions with everything that a lens says of them."""
        return predict_reply(await answer(request, body, body.lens))

    opened = OpenAsker(service)

    @app.post("/v1/ask", responses=ERRORS)
    async def ask(body: AskRequest, request: Request) -> AskReply:
        """Answer questions that come without options: the model writes candidates, and a lens weighs them."""
        return await opened.answer(body, gone=lambda: gone(request))

    @app.post("/v1/decisions", responses=ERRORS)
    async def decisions(body: DecisionRequest, request: Request) -> DecisionReply:
        """Answer in OpenAI's format."""
        return decision_reply(body, await answer(request, body, body.model))

    @app.post("/v1/systemone", responses=ERRORS)
    async def systemone(body: SystemOneRequest, request: Request) -> SystemOneReply:
        """Answer in TypeSafe's format."""
        return systemone_reply(body, await answer(request, body, body.model))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the lenses, as OpenAI's clients read it (`data`) and as TypeSafe's do (`models`)."""
        return models_of(list(service.lenses))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the server is there."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": ErrorReply, "description": "The self-check has not passed yet."}})
    async def ready() -> dict[str, str]:
        """Say whether questions can be answered: the self-check has passed."""
        if not service.is_ready:
            raise Complaint(503, "The self-check has not passed yet.", retry_after=1)
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Return counters and histograms for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    pages = add_pages(app)
    address, limits = service.settings.address, service.settings.limits
    doors = Doors(
        routes=frozenset(app.openapi()["paths"]) | pages,
        pages=pages,
        key=address.key,
        names=address.names,
        origins=address.allow_origin,
    )
    return Guard(app, service.metrics, doors, limits.max_body)


def models_of(lenses: list[ServedLens]) -> dict[str, Any]:
    """Return the list of lenses in both formats; `coral` says what a lens is and promises."""
    return {
        "object": "list",
        "data": [
            {
                "id": s.name,
                "object": "model",
                "created": int(s.saved.timestamp()),
                "owned_by": "coral-lens",
                "coral": about(s),
            }
            for s in lenses
        ],
        "models": [
            {
                "name": s.name,
                "description": f"Lens for {public_name(s.lens.model['name'])}: {s.lens.name}",
                "release_date": s.saved.date().isoformat(),
            }
            for s in lenses
        ],
    }


def about(served: ServedLens) -> dict[str, Any]:
    """Return what a lens is and promises, for people."""
    lens = served.lens
    return {
        "digest": served.digest,
        "model": public_name(lens.model["name"]),
        "lens": lens.name,
        "layers": list(lens.layers),
        "trained_on": {public_name(source): n for source, n in lens.training.tasks.items()},
        "note": lens_note(served),
        "has_layer_view": lens.view is not None,
        "open": lens.open is not None,
        "coverage": lens.sets.coverage if lens.sets else None,
        "risk": lens.abstention.risk if lens.abstention else None,
        "least_confidence": lens.abstention.threshold if lens.abstention else None,
    }
