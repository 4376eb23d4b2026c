"""What `/metrics` shows. Names follow vLLM's with `blade_llm:` before them, so that its dashboards need one change."""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bladellm_runtime.server.histogram import Histogram
from bladellm_runtime.server.limits import Admission
from bladellm_runtime.server.shared_readings import MetricsReading, SharedReadings
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.messages import EngineStats

PREFIX = "blade_llm:"
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    80.0,
)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 1920.0)
TOKENS = tuple(float(2**power) for power in range(21))
MAX_LISTED_ADAPTERS = 64
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 128.0)


class Metrics:
    """Everything counted in one front end; the engine's own numbers are read from its last step when asked for.

    `count_steps` is for one of several front ends, which otherwise would count every step several times.
    """

    def __init__(self, *, count_steps: bool = True) -> None:
        self.time_to_first_token = _histogram("time_to_first_token_seconds", FIRST_TOKEN_SECONDS)
        self.inter_token_latency = _histogram("inter_token_latency_seconds", TOKEN_SECONDS)
        self.time_per_output_token = _histogram("request_time_per_output_token_seconds", TOKEN_SECONDS)
        self.latency = _histogram("e2e_request_latency_seconds", REQUEST_SECONDS)
        self.queue_time = _histogram("request_queue_time_seconds", REQUEST_SECONDS)
        self.prefill_time = _histogram("request_prefill_time_seconds", REQUEST_SECONDS)
        self.decode_time = _histogram("request_decode_time_seconds", REQUEST_SECONDS)
        self.inference_time = _histogram("request_inference_time_seconds", REQUEST_SECONDS)
        self.prompt_length = _histogram("request_prompt_tokens", TOKENS)
        self.answer_length = _histogram("request_generation_tokens", TOKENS)
        self.choices = _histogram("request_params_n", CHOICES)
        self.max_tokens = _histogram("request_params_max_tokens", TOKENS)
        self.step_tokens = _histogram("iteration_tokens_total", TOKENS)
        self.token_times: list[float] = []
        """Times between tokens of a request in the step being handled, not counted yet."""
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.disconnects = 0
        self.open_adapters: Callable[[], tuple[list[str], list[str]]] = lambda: ([], [])
        """Adapters of open requests that have a token, and of those that have none."""
        self._count_steps = count_steps
        self._last = EngineStats()

    def on_step(self, stats: EngineStats) -> None:
        """Count the tokens of the steps since the last reading, and the times between them."""
        steps = stats.steps - self._last.steps
        if steps > 0 and self._count_steps:
            before = self._last.prompt_tokens + self._last.generated_tokens
            self.step_tokens.observe((stats.prompt_tokens + stats.generated_tokens - before) / steps, steps)
        self._last = stats
        for seconds, times in Counter(self.token_times).items():
            self.inter_token_latency.observe(seconds, times)
        self.token_times.clear()

    def histograms(self) -> list[Histogram]:
        """All histograms."""
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    def reading(self, stats: EngineStats) -> MetricsReading:
        """What has been counted so far, beside the engine's `stats`."""
        histograms = {item.name: item.reading() for item in self.histograms()}
        return MetricsReading(
            stats, dict(self.finished), dict(self.rejected), self.disconnects, histograms, *self.open_adapters()
        )


class _Readings(Collector):
    """Reads counters, gauges and histograms at the moment /metrics is asked for."""

    def __init__(
        self,
        metrics: Metrics,
        client: EngineClient,
        admission: Admission,
        model_name: str,
        shared: SharedReadings | None,
    ) -> None:
        self._metrics = metrics
        self._client = client
        self._admission = admission
        self._shared = shared
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry."""
        reading = self._metrics.reading(self._client.stats)
        if self._shared is not None:
            reading = self._shared.total(reading)
        yield from self._gauges(reading.stats)
        yield from self._counters(reading.stats, reading.disconnects)
        yield self._by_label("request_success", "finished_reason", reading.finished)
        yield self._by_label("requests_rejected", "reason", reading.rejected)
        if reading.stats.lora_slots:
            yield self._lora_info(reading)
        for histogram in self._metrics.histograms():
            yield histogram.family(self._labels, reading.histograms[histogram.name])

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        values = {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "num_requests_late": stats.late,
            "num_requests_open": self._admission.open_everywhere,
            "num_requests_limit": self._admission.limit,
            "kv_cache_usage_perc": stats.kv_granules_used / max(1, stats.kv_granules),
            "kv_cache_tokens": stats.kv_granules * stats.granule_tokens,
            "kv_granules": stats.kv_granules,
            "kv_granules_used": stats.kv_granules_used,
            "kv_granules_cached": stats.kv_granules_cached,
            "kv_granules_shared": stats.kv_granules_shared,
            "kv_granules_swapped": stats.kv_granules_swapped,
            "kv_tokens_unused": stats.kv_tokens_unused,
            "kv_map_seconds_p99": stats.kv_map_p99,
            "guided_cache_bytes": stats.guided_cache_bytes,
            "last_step_age_seconds": self._client.heartbeat_age(),
            "engine_up": int(self._client.failure is None),
        }
        if stats.lora_slots:
            values |= {
                "lora_slots": stats.lora_slots,
                "lora_slots_used": stats.lora_used,
                "num_requests_waiting_for_lora": stats.lora_waiting,
            }
        for name, value in values.items():
            gauge = GaugeMetricFamily(PREFIX + name, HELP[name], labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), float(value))
            yield gauge

    def _counters(self, stats: EngineStats, disconnects: int) -> Iterator[Metric]:
        values = {
            "prompt_tokens": stats.prompt_tokens,
            "prompt_tokens_cached": stats.cached_tokens,
            "generation_tokens": stats.generated_tokens,
            "num_preemptions": stats.preemptions,
            "engine_steps": stats.steps,
            "engine_step_seconds": stats.step_seconds,
            "kv_maps": stats.kv_maps,
            "kv_map_wait_seconds": stats.kv_map_wait,
            "kernel_compiles_after_ready": stats.kernel_compiles_after_ready,
            "guided_hits": stats.guided_hits,
            "guided_misses": stats.guided_misses,
            "guided_refused": stats.guided_refused,
            "guided_compile_seconds": stats.guided_compile_seconds,
            "guided_masks": stats.guided_masks,
            "guided_mask_seconds": stats.guided_mask_seconds,
            "client_disconnects": disconnects,
        }
        if stats.lora_slots:
            values |= {
                "lora_loads": stats.lora_loads,
                "lora_load_seconds": stats.lora_load_seconds,
                "lora_evictions": stats.lora_evictions,
            }
        for name, value in values.items():
            counter = CounterMetricFamily(PREFIX + name, HELP[name], labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), float(value))
            yield counter

    def _lora_info(self, reading: MetricsReading) -> Metric:
        """Which adapters are here, for routers: the names in labels, the time as the value, as vLLM has it."""
        labels = {
            **self._labels,
            "max_lora": str(reading.stats.lora_slots),
            "running_lora_adapters": ",".join(reading.running_adapters[:MAX_LISTED_ADAPTERS]),
            "waiting_lora_adapters": ",".join(reading.waiting_adapters[:MAX_LISTED_ADAPTERS]),
        }
        gauge = GaugeMetricFamily(PREFIX + "lora_requests_info", HELP["lora_requests_info"], labels=list(labels))
        gauge.add_metric(list(labels.values()), time.time())
        return gauge

    def _by_label(self, name: str, label: str, counts: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, HELP[name], labels=[*self._labels, label])
        for value, count in counts.items():
            counter.add_metric([*self._labels.values(), value], float(count))
        return counter


class MetricsPage:
    """The text of `/metrics`; with `shared` that of all front ends together."""

    def __init__(
        self,
        metrics: Metrics,
        client: EngineClient,
        admission: Admission,
        model_name: str,
        shared: SharedReadings | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(metrics, client, admission, model_name, shared))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


HELP = {
    "num_requests_running": "Requests that hold a slot of the engine.",
    "num_requests_waiting": "Requests that wait in the engine's queue.",
    "num_requests_late": "Of the requests that wait, those that cannot meet --target_ttft_ms any more.",
    "num_requests_open": "Requests the server has taken and not answered in full.",
    "num_requests_limit": "Open requests beyond which new ones are answered 429.",
    "kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
    "kv_cache_tokens": "Tokens the KV cache can hold.",
    "kv_granules": "Granules of the KV cache, the units of its memory.",
    "kv_granules_used": "Granules in use by live requests.",
    "kv_granules_cached": "Granules that hold prompts of the prompt cache and nothing else.",
    "kv_granules_shared": "Granules saved by sharing: users of a granule beyond its first, summed.",
    "kv_granules_swapped": "Granules of the prompt cache that were moved to host memory.",
    "kv_tokens_unused": "Tokens that live requests hold room for and have not written.",
    "kv_map_seconds_p99": "99th percentile of the latest calls that map memory, in seconds.",
    "last_step_age_seconds": "Seconds since the engine's last step or heartbeat.",
    "engine_up": "1 while the engine lives, else 0.",
    "lora_slots": "Adapters that the device holds at most, --max_loras.",
    "lora_slots_used": "Of these the ones that requests use now.",
    "num_requests_waiting_for_lora": "Requests that wait for their adapter.",
    "lora_requests_info": "When it was asked for, in seconds; the adapters of open requests are in the labels.",
    "lora_loads": "Adapters brought to the device.",
    "lora_load_seconds": "Seconds from asking for an adapter to having it, summed.",
    "lora_evictions": "Adapters that had to leave the device for others.",
    "prompt_tokens": "Prompt tokens the engine has processed, cached ones included.",
    "prompt_tokens_cached": "Those of them that the prompt cache had.",
    "generation_tokens": "Tokens the engine has generated.",
    "num_preemptions": "Requests put back into the queue because the KV cache was full.",
    "engine_steps": "Steps the engine has run.",
    "engine_step_seconds": "Seconds the engine has spent in steps.",
    "kv_maps": "Calls that mapped memory of the KV cache.",
    "kv_map_wait_seconds": "Seconds that steps have waited for memory to be mapped.",
    "kernel_compiles_after_ready": "Kernels compiled since the engine was ready; each delayed a step.",
    "guided_cache_bytes": "Bytes of the compiled constraints that are kept.",
    "guided_hits": "Requests whose constraint was compiled already, or being compiled.",
    "guided_misses": "Requests whose constraint had to be compiled.",
    "guided_refused": "Requests refused for their constraint by the engine.",
    "guided_compile_seconds": "Seconds that threads have spent compiling constraints.",
    "guided_masks": "Masks of allowed tokens, one a token of a constrained request.",
    "guided_mask_seconds": "Seconds the engine has spent filling them.",
    "client_disconnects": "Requests whose client went away before the end of its answer.",
    "request_success": "Requests that ended, by finish reason.",
    "requests_rejected": "Requests that were refused before they ran, by reason.",
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "request_time_per_output_token_seconds": "A request's mean time between tokens.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival until the engine took it up.",
    "request_prefill_time_seconds": "From there to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From being taken up to the last token.",
    "request_prompt_tokens": "Prompt lengths.",
    "request_generation_tokens": "Answer lengths.",
    "request_params_n": "Choices a request asks for.",
    "request_params_max_tokens": "max_tokens of requests, cut to what fits.",
    "iteration_tokens_total": "Tokens of an engine step, prompt and generated together.",
}


def _histogram(name: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(PREFIX + name, HELP[name], bounds)
