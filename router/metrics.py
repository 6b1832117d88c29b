"""The router's metrics: of requests under the names that vLLM users know where the meaning is the same, everything else as headrace_*.

Owns names and labels; knows nothing of how requests run. Invariant: label values come from the cluster's own names, never from clients.
"""

import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from protocol.errors import ERRORS
from router.membership import Membership
from router.replies import Usage
from router.view import WorkerView

MAX_WORKER_COUNTERS = 128
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TTFT = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_ITL = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E = (0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model = model
        name = ["model_name"]
        self._running = Gauge("vllm:num_requests_running", "Requests between arrival and end", name, registry=registry).labels(model)
        self._success = Counter("vllm:request_success", "Answers given in full", [*name, "finished_reason"], registry=registry)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of finished requests", name, registry=registry).labels(model)
        self._generation = Counter("vllm:generation_tokens", "Tokens generated", name, registry=registry).labels(model)
        self._queries = Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the caches", name, registry=registry).labels(model)
        self._hits = Counter("vllm:prefix_cache_hits", "Prompt tokens reused from earlier requests", name, registry=registry).labels(model)
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token", name, buckets=_TTFT, registry=registry).labels(model)
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Between two tokens", name, buckets=_ITL, registry=registry).labels(model)
        self._e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", name, buckets=_E2E, registry=registry).labels(model)
        self._responses = Counter("headrace_requests", "Requests by outcome: ok, cancelled or the error's code", ["outcome"], registry=registry)
        self._retries = Counter("headrace_retries", "Requests placed again before their first token", ["code"], registry=registry)
        self._migrations = Counter("headrace_migrations", "Requests moved to another worker within their answer", ["code"], registry=registry)
        self._resorts = Counter("headrace_last_resorts", "Placements for which a rule gave way", ["rule"], registry=registry)
        self._incomplete = Counter("headrace_incomplete_handoffs", "Prefills whose blocks did not all reach the decode node", registry=registry)
        self._adapter_calls = Counter("headrace_adapter_calls", "Adapters loaded and unloaded, one for each worker", ["action", "outcome"], registry=registry)
        ProcessCollector(registry=registry)

    def watch(self, membership: Membership) -> None:
        self._registry.register(WorkerCollector(membership))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def started(self) -> None:
        self._running.inc()

    def ended(self, outcome: str) -> None:
        self._running.dec()
        self._responses.labels(outcome).inc()

    def refused(self, code: str) -> None:
        self._responses.labels(code).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came together, `seconds` after the last ones."""
        for _ in range(num_tokens):
            self._itl.observe(seconds / num_tokens)

    def finished(self, finish_reason: str, usage: Usage, seconds: float) -> None:
        self._success.labels(self._model, finish_reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._queries.inc(usage.prompt_tokens)
        self._hits.inc(usage.cached_tokens)
        self._e2e.observe(seconds)

    def generated(self, num_tokens: int) -> None:
        self._generation.inc(num_tokens)

    def retry(self, code: str) -> None:
        self._retries.labels(_bounded(code)).inc()

    def migration(self, code: str) -> None:
        self._migrations.labels(_bounded(code)).inc()

    def last_resort(self, rule: str) -> None:
        self._resorts.labels(rule).inc()

    def incomplete_handoff(self) -> None:
        self._incomplete.inc()

    def adapter_call(self, action: str, outcome: str) -> None:
        self._adapter_calls.labels(action, outcome if outcome == "ok" else _bounded(outcome)).inc()


class WorkerCollector:
    """Gauges and counters of every worker, read from the last status when somebody asks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        workers = self._membership.view().workers
        yield self._gauge("healthy", "1 when the worker takes requests", workers, lambda worker: float(worker.healthy))
        yield self._gauge("sequences", "Sequences there, those sent since its last status included", workers, lambda worker: worker.sequences)
        yield self._gauge("waiting_tokens", "Prompt tokens not yet computed", workers, lambda worker: worker.waiting_tokens)
        yield self._gauge("blocks_total", "Blocks of the pool", workers, lambda worker: worker.blocks_total)
        yield self._gauge("blocks_free", "Free blocks", workers, lambda worker: worker.blocks_free)
        yield self._gauge("blocks_cached", "Evictable blocks with a reusable prefix", workers, lambda worker: worker.blocks_cached)
        counters = CounterMetricFamily("headrace_worker", "Counters of the worker", labels=["worker", "role", "counter"])
        for worker in workers:
            names = [name for name in sorted(worker.counters) if _NAME.fullmatch(name)][:MAX_WORKER_COUNTERS]
            for name in names:
                counters.add_metric([worker.name, worker.role, name], worker.counters[name])
        yield counters
        failures = CounterMetricFamily("headrace_registry_failures", "Looks at the registry that got no answer")
        failures.add_metric([], self._membership.registry_failures)
        yield failures

    def _gauge(self, name: str, words: str, workers: tuple[WorkerView, ...], value: Callable[[WorkerView], float]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"headrace_worker_{name}", words, labels=["worker", "role"])
        for worker in workers:
            gauge.add_metric([worker.name, worker.role], value(worker))
        return gauge


def _bounded(code: str) -> str:
    return code if code in ERRORS else "unknown"
