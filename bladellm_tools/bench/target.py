"""A server to measure: where it is, what to ask it for, and whether it is there."""

import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import orjson

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.bench.answer import shorten
from bladellm_tools.bench.args import TargetArgs
from bladellm_tools.bench.connection import CONNECT_SECONDS
from bladellm_tools.bench.records import PlannedRequest

MAX_LIST_BYTES = 4 * 1024**2
FRAMING = ("accept-encoding", "connection", "content-length", "expect", "transfer-encoding", "upgrade")
"""Header fields that say how a message is sent; another value than the client's own breaks it."""
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """How to ask one server. `tokenizer` names the folder that counts tokens where the server reports none."""

    name: str
    base_url: str
    api: Literal["completions", "chat"] = "completions"
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    timeout: float = 600.0
    tokenizer: str | None = None

    @property
    def url(self) -> str:
        """The route that generates."""
        return self.base_url + ROUTES[self.api]

    def body(self, planned: PlannedRequest) -> bytes:
        """The request body: greedy, streamed, with usage; `extra_body` wins."""
        body: dict[str, Any] = {
            "model": planned.lora or self.model,
            "max_tokens": planned.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": planned.prompt}]
        else:
            body["prompt"] = planned.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps(body | self.extra_body)


async def resolve_target(args: TargetArgs, name: str, url: str, ignore_eos: bool = True) -> Target:
    """The target at `url`, its model asked for where none is given. Raises `UserError` when nothing answers there."""
    base_url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {name}={url}: the address must begin with http:// or https://")
    base_url, login = without_login(base_url)
    target = Target(
        name=name,
        base_url=base_url,
        api=args.api,
        model=args.model or "",
        headers=with_login(parse_headers(args), login, name),
        extra_body=parse_extra_body(args.extra_body),
        ignore_eos=ignore_eos,
        timeout=args.timeout,
        tokenizer=args.tokenizer,
    )
    status, body = await list_models(target)
    if target.model:
        return target
    return Target(**{**vars(target), "model": first_model(target, status, body)})


def without_login(url: str) -> tuple[str, str]:
    """`http://USER:PASSWORD@HOST` as `http://HOST` and `USER:PASSWORD`, which is empty where there is none."""
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host)), unquote(login)


def with_login(headers: dict[str, str], login: str, name: str) -> dict[str, str]:
    """The headers with a login of the address as HTTP has it (RFC 7617). Raises `ConfigError` where they have one."""
    if not login:
        return headers
    if any(field.lower() == "authorization" for field in headers):
        raise ConfigError(f"--endpoint {name} has a login of its own; give it, or --api_key or a header, not both")
    return {**headers, "Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


async def list_models(target: Target) -> tuple[int, bytes]:
    """Status and body of /v1/models. Raises `UserError` when nothing answers."""
    try:
        async with (
            aiohttp.ClientSession(
                headers=target.headers, timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            ) as session,
            session.get(target.base_url + "/v1/models") as response,
        ):
            return response.status, await response.content.read(MAX_LIST_BYTES)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or "no answer in time"
        raise UserError(
            f"no server answers at {target.base_url} ({target.name}): {reason}; start it, or correct --endpoint"
        ) from error


def first_model(target: Target, status: int, body: bytes) -> str:
    """The first model of an answer of /v1/models. Raises `UserError` where it lists none."""
    try:
        name = orjson.loads(body)["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        name = None
    if status != 200 or not isinstance(name, str):
        told = f"status {status}" if status != 200 else shorten(body)
        raise UserError(f"{target.base_url}/v1/models of {target.name} names no model ({told}); give --model")
    return name


def parse_headers(args: TargetArgs) -> dict[str, str]:
    """`--header` and `--api_key` as header fields. Raises `ConfigError`."""
    headers: dict[str, str] = {}
    for text in args.header:
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[\w-]+", name.strip(), re.ASCII) or not is_field_value(value):
            raise ConfigError(f"--header must be NAME:VALUE in printable ASCII, got {text!r}")
        if name.strip().lower() in FRAMING:
            raise ConfigError(f"--header {name.strip()} is the client's own to set; leave it out")
        if name.strip().lower() in (other.lower() for other in headers):
            raise ConfigError(f"--header sets {name.strip()} twice; give it once")
        headers[name.strip()] = value.strip()
    if args.api_key is not None:
        if not is_field_value(args.api_key):
            raise ConfigError("--api_key must be printable ASCII")
        if "authorization" in (name.lower() for name in headers):
            raise ConfigError("--api_key and --header Authorization set the same field; give one of them")
        headers["Authorization"] = f"Bearer {args.api_key}"
    return headers


def is_field_value(text: str) -> bool:
    """Whether a header may hold the text; a line break in one would be another header."""
    return text.isascii() and text.isprintable()


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """`--extra_body` as an object. Raises `ConfigError`."""
    try:
        value = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"--extra_body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra_body must be a JSON object, got {text}")
    try:
        orjson.dumps(value)
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--extra_body holds a value that cannot be sent: {error}") from error
    return value
