"""The cold routes, on FastAPI: probes, models, metrics, tokenizing. Imported only by a server that starts."""

from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from bladellm_runtime import __version__
from bladellm_runtime.errors import ParameterError
from bladellm_runtime.server.adapter_routes import add_adapter_routes
from bladellm_runtime.server.chat import parse_chat
from bladellm_runtime.server.cold_body import json_of
from bladellm_runtime.server.errors import ApiError, from_parameter_error, invalid_request
from bladellm_runtime.server.fields import Fields
from bladellm_runtime.server.generate import tokenize_chat
from bladellm_runtime.server.health import engine_condition
from bladellm_runtime.server.limits import unavailable
from bladellm_runtime.server.models_api import model_card, models_list
from bladellm_runtime.server.sampling import check_token_id
from bladellm_runtime.server.state import ServerState
from bladellm_runtime.text.pool import PoolBusyError

GENERATION = {"/v1/chat/completions": ("chat completions", "messages"), "/v1/completions": ("completions", "prompt")}
"""The hot routes: what OpenAI calls them, and the field that each needs."""


def cold_routes(state: ServerState) -> FastAPI:
    """The FastAPI application with every route but the two hot ones."""
    app = FastAPI(title="BladeLLM Open", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(ParameterError, _answer_parameter_error)
    app.add_exception_handler(PoolBusyError, _answer_busy)
    app.add_exception_handler(HTTPException, _answer_http_error)
    _add_probes(app, state)
    _add_models(app, state)
    _add_text(app, state)
    if state.authenticator.has_admin:
        add_adapter_routes(app, state)
    _describe_generation(app)
    return app


def _add_probes(app: FastAPI, state: ServerState) -> None:
    @app.get("/")
    async def hello() -> Response:
        """BladeLLM's liveness probe."""
        return PlainTextResponse("hello")

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of BladeLLM Open."""
        return {"version": __version__}

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine works, 503 when it is dead or stuck."""
        condition = engine_condition(state.client, state.args.engine_timeout)
        return _json({"status": condition}, 200 if condition == "ok" else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are welcome, else 503 and the reason."""
        obstacle = state.obstacle()
        return _json({"status": "ok" if obstacle is None else obstacle.code}, 200 if obstacle is None else 503)

    @app.get("/metric")
    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics, also while the engine is stuck; `/metric` is BladeLLM's spelling."""
        return Response(state.page.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, state: ServerState) -> None:
    names = state.context.model_names

    @app.get("/v1/models")
    async def models() -> Response:
        """The model's names, and those of its adapters."""
        return Response(models_list(names, state.created, state.adapters), media_type="application/json")

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of these names, or 404."""
        return Response(model_card(name, names, state.created, state.adapters), media_type="application/json")


def _add_text(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a `prompt`, or of chat `messages` with the model's template."""
        body = await json_of(state, request)
        tokens = await _tokenize(state, body)
        return _json({"count": len(tokens), "max_model_len": state.context.max_model_len, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of `tokens`."""
        fields = Fields(await json_of(state, request))
        if not fields.given("tokens"):
            raise invalid_request("tokens is missing", "tokens")
        tokens = fields.integers("tokens", state.max_body_bytes)
        for token in tokens:
            check_token_id("tokens", token, state.context)
        text = await state.pool.run("tokens", state.tokenizer.decode, tokens, False)
        return _json({"prompt": text})


def _describe_generation(app: FastAPI) -> None:
    """Put the two hot routes, which are answered before FastAPI is asked, into the schema."""
    for path, (name, wanted) in GENERATION.items():
        schema = {"type": "object", "required": [wanted]}
        app.openapi()["paths"][path] = {
            "post": {
                "summary": f"OpenAI's {name}, with BladeLLM's fields beside OpenAI's.",
                "operationId": name.replace(" ", "_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "The answer, or with `stream` its events"}},
            }
        }


async def _tokenize(state: ServerState, body: dict[str, Any]) -> list[int]:
    fields = Fields(body)
    if fields.given("messages"):
        names = ("add_special_tokens", "prompt")
        call = parse_chat({k: v for k, v in body.items() if k not in names}, state.context)
        await state.adapters.find(call.model)
        return await tokenize_chat(state, call)
    prompt = fields.string("prompt")
    if prompt is None:
        raise invalid_request("prompt is missing", "prompt")
    special = fields.boolean("add_special_tokens", True)
    return await state.pool.encode(state.tokenizer, prompt, add_special_tokens=special)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _answer_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return Response(error.body(), error.status, media_type="application/json")


async def _answer_parameter_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ParameterError):
        raise error
    return await _answer_api_error(request, from_parameter_error(error))


async def _answer_busy(request: Request, error: Exception) -> Response:
    return await _answer_api_error(request, unavailable("tokenizer_busy"))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    known = {404: "There is no such route; GET /openapi.json lists them", 405: "This route does not take this method"}
    answer = ApiError(error.status_code, known.get(error.status_code, str(error.detail)))
    return Response(answer.body(), error.status_code, error.headers, media_type="application/json")
