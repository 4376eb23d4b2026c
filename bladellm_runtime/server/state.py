"""What the handlers of one server share."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.server.adapters import Adapters, make_adapters
from bladellm_runtime.server.auth import Authenticator
from bladellm_runtime.server.context import RequestContext, SamplingDefaults
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.health import obstacle
from bladellm_runtime.server.keys import read_admin_keys, read_api_keys
from bladellm_runtime.server.limits import Admission
from bladellm_runtime.server.metrics import Metrics, MetricsPage
from bladellm_runtime.server.place import Place
from bladellm_runtime.text.pool import TextPool
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.messages import EngineStats

if TYPE_CHECKING:
    from bladellm_runtime.server.generation import Generation

logger = logging.getLogger(__name__)

MIB = 1024 * 1024


@dataclass
class ServerState:
    """One server: its settings, its engine, its tokenizer, and the requests it is answering."""

    args: ServingArgs
    client: EngineClient
    tokenizer: Tokenizer
    context: RequestContext
    authenticator: Authenticator
    adapters: Adapters
    admission: Admission
    metrics: Metrics
    page: MetricsPage
    place: Place = field(default_factory=Place)
    pool: TextPool = field(default_factory=TextPool)
    generations: set["Generation"] = field(default_factory=set)
    touched: list["Generation"] = field(default_factory=list)
    """Generations that got a piece in the step being handled."""
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def max_body_bytes(self) -> int:
        """The limit of --max_body_mib in bytes."""
        return int(self.args.max_body_mib * MIB)

    def on_step(self, stats: EngineStats) -> None:
        """A step's pieces have all arrived: send them on."""
        touched, self.touched = self.touched, []
        for generation in touched:
            try:
                generation.flush()
            except Exception:
                # One request's fault must not cost the others of the step their tokens.
                logger.exception("a step's tokens could not be sent")
                generation.fail("generation_failed")
        self.metrics.on_step(stats)

    def publish_metrics(self) -> None:
        """Let the other front ends know what this one has counted."""
        if self.place.readings is not None:
            self.place.readings.publish(self.metrics.reading(self.client.stats))

    def open_adapters(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of open requests that have a token, and of those that have none yet."""
        found: tuple[set[str], set[str]] = (set(), set())
        for generation in self.generations:
            if generation.adapter is not None:
                found[not generation.started].add(generation.adapter.name)
        return sorted(found[0]), sorted(found[1])

    def obstacle(self) -> ApiError | None:
        """Why no new request can be taken now, if so."""
        return obstacle(self.client, self.args.engine_timeout, draining=self.draining)

    def end_all(self, code: str) -> None:
        """End every open request with this error."""
        for generation in list(self.generations):
            generation.fail(code)


def make_state(
    args: ServingArgs, model_folder: Path, client: EngineClient, tokenizer: Tokenizer, place: Place
) -> ServerState:
    """The state of a server whose engine is ready. Raises `UserError` for unusable keys or generation defaults."""
    context = RequestContext(
        model_names=served_names(args),
        max_model_len=client.ready.max_model_len,
        kv_tokens=client.ready.kv_tokens,
        vocab_size=client.ready.vocab_size,
        strict=args.strict_params,
        defaults=SamplingDefaults.from_generation_config(read_generation_config(model_folder)),
        adapters=args.enable_lora,
    )
    metrics = Metrics(count_steps=place.number == 0)
    admission = Admission(args.slots + args.max_queue_size, place.counts.open_requests)
    state = ServerState(
        args=args,
        client=client,
        tokenizer=tokenizer,
        context=context,
        authenticator=Authenticator(read_api_keys(args), read_admin_keys(args)),
        adapters=make_adapters(args, context.model_names, place.adapters),
        admission=admission,
        metrics=metrics,
        page=MetricsPage(metrics, client, admission, context.model_names[0], place.readings),
        place=place,
    )
    metrics.open_adapters = state.open_adapters
    client.on_step.append(state.on_step)
    return state


def served_names(args: ServingArgs) -> list[str]:
    """The names requests may use. Raises `ConfigError` for an empty one."""
    if not all(args.served_model_name):
        raise ConfigError("--served_model_name must not be empty; leave it out to serve the model under its own name")
    return args.served_model_name or [args.model]


def read_generation_config(model_folder: Path) -> dict[str, Any]:
    """The model's generation_config.json, or nothing. Raises `CheckpointError` when it is not a JSON object."""
    path = model_folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config
