"""What a service tells Prometheus: calls, seconds, tokens, and how it is when it is asked.

Labels have few values that the code fixes: never a run, a digest, a worker, or what a caller sent.
"""

import time
from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from storage.records import Record
from tasks.errors import Permanent, Transient
from tasks.service_contract import Health

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Bounds of the histogram: a step of `addition` to a step of a large model."""
STATUSES = ("starting", "ready", "failed", "ending")
TOKENS = ("prompt_tokens", "completion_tokens")
"""Metrics of a stage record that count tokens."""

Refusal = Literal["token", "malformed", "too large", "not admitted", "not now"]


class ServiceMetrics:
    """Counts the calls of one service; `health` is asked at each scrape."""

    def __init__(self, health: Callable[[], Health]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._calls = Counter(
            "rollbook_service_calls",
            "Calls answered. reused: the record was there already, no work was done.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rollbook_service_call_seconds",
            "Seconds that the engine's thread worked on a call, its wait in the queue left out.",
            ["kind"],
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "rollbook_service_tokens",
            "Tokens of answered calls, as their records count them; reused records add none.",
            ["kind", "what"],
            registry=registry,
        )
        self._refused = Counter(
            "rollbook_service_refused",
            "Requests that never reached the engine.",
            ["reason"],
            registry=registry,
        )
        registry.register(_HealthNow(health))
        ProcessCollector(registry=registry)

    def counted(self, run: Callable[[Record], Record], request: Record) -> Record:
        """Returns what `run` returns for `request`, or raises what it raises, and counts it."""
        kind, outcome = type(request).__name__, "failed"
        began = time.monotonic()
        try:
            result = run(request)
            outcome = "reused" if getattr(result, "reused", False) else "done"
        except (Transient, Permanent) as error:
            outcome = "transient" if isinstance(error, Transient) else "permanent"
            raise
        finally:
            self._seconds.labels(kind).observe(time.monotonic() - began)
            self._calls.labels(kind, outcome).inc()
        if outcome == "done":
            self._count_tokens(kind, result)
        return result

    def refused(self, reason: Refusal) -> None:
        """Counts a request that never reached the engine."""
        self._refused.labels(reason).inc()

    def exposition(self) -> bytes:
        """Returns all of it in Prometheus' text format, `MEDIA_TYPE`."""
        return generate_latest(self._registry)

    def _count_tokens(self, kind: str, result: Record) -> None:
        record = getattr(result, "record", None)
        metrics = record.metrics if record is not None else {}
        for name in TOKENS:
            self._tokens.labels(kind, name.removesuffix("_tokens")).inc(metrics.get(name) or 0.0)


class _HealthNow(Collector):
    """Reads the service's health when Prometheus asks, so that no number is older than that."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering asks no engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        health = self._health()
        status = GaugeMetricFamily(
            "rollbook_service_status", "1 for the status that it has.", labels=["status"]
        )
        for name in STATUSES:
            status.add_metric([name], float(name == health.status))
        yield status
        for name, text, value in (
            ("ready", "1 if the engine takes calls.", float(health.status == "ready")),
            ("in_flight", "1 while the engine works on a call.", float(health.busy_s is not None)),
            ("queue", "Calls that wait for the one that the engine works on.", health.queue),
            ("busy_seconds", "How long the present call takes so far.", health.busy_s or 0.0),
            ("progress", "Grows while the engine works.", health.progress),
            ("tokens_per_second", "Of the last call with tokens.", health.tokens_per_s),
            ("policy_version", "Policy version that it serves, proven.", health.policy_version),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"rollbook_service_{name}", text, value=value)
