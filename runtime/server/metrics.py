"""What /metrics tells: times as clients see them, answers by status, and the engine's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One server's numbers, in a registry of their own: several servers may live in one process."""

    def __init__(self, usage: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self.first_piece = Histogram(
            "niwaki_time_to_first_token_seconds", "From a request's arrival to its first text.",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self.between_pieces = Histogram(
            "niwaki_inter_token_seconds", "Between one piece of streamed text and the next.",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self.whole = Histogram(
            "niwaki_request_seconds", "From a request's arrival to its end.", buckets=SECONDS, registry=self._registry
        )
        self.answers = Counter(
            "niwaki_http_responses", "Answers by status.", labelnames=("status",), registry=self._registry
        )
        self.in_flight = Gauge(
            "niwaki_sequences_in_flight", "Sequences that clients wait for.", registry=self._registry
        )
        self._registry.register(_EngineCollector(usage))

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for."""

    def __init__(self, usage: Callable[[], Mapping[str, float]]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, value in self._usage().items():
            about = f"The engine's {name.replace('_', ' ')}."
            if name.startswith(("pages_", "requests_")):
                yield GaugeMetricFamily(f"niwaki_{name}", about, value)
            else:
                yield CounterMetricFamily(f"niwaki_{name}", about, value)
