"""What /metrics tells: times as clients see them, answers by status, and the engine's own counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from niwaki.runtime.api import Cancelled, Generation, Output

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = ("pages_", "requests_")  # all else that the engine tells are counters
TIER_GAUGES = ("_pages", "_bytes")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One server's numbers, in a registry of their own: several servers may live in one process."""

    def __init__(self, usage: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self.first_piece = Histogram(
            "niwaki_time_to_first_token_seconds", "From a request's arrival to its first text.",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self.between_pieces = _Times("niwaki_inter_token_seconds", "Between one piece of streamed text and the next.")
        self._registry.register(self.between_pieces)
        self.whole = Histogram(
            "niwaki_request_seconds", "From a request's arrival to its end.", buckets=SECONDS, registry=self._registry
        )
        self.queued = Histogram(
            "niwaki_queue_seconds", "From a sequence's arrival at the engine to its first step.",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self.aborted = Counter(
            "niwaki_aborted_sequences", "Sequences whose clients left before their end.", registry=self._registry
        )
        self.failed = Counter(
            "niwaki_failed_sequences", "Sequences that failed, by error.", labelnames=("error",),
            registry=self._registry,
        )  # fmt: skip
        self.refused = Counter(
            "niwaki_refused_requests", "Requests that were refused for want of room or by a limit, by code.",
            labelnames=("code",), registry=self._registry,
        )  # fmt: skip
        self.answers = Counter(
            "niwaki_http_responses", "Answers by status.", labelnames=("status",), registry=self._registry
        )
        self.in_flight = Gauge(
            "niwaki_sequences_in_flight", "Sequences that clients wait for.", registry=self._registry
        )
        self._registry.register(_EngineCollector(usage))

    def ended(self, generation: Generation) -> None:
        """Count a generation of a program that is over, and whose pieces nobody read, by the engine's own clock."""
        error = generation.error()
        if error is None:
            self.gave(generation.result())
        else:
            self.lost(error)

    def gave(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self.queued.observe(output.queued_seconds)
            self.first_piece.observe(output.first_seconds)
            self.whole.observe(output.seconds)

    def lost(self, error: BaseException) -> None:
        if isinstance(error, Cancelled):
            self.aborted.inc()
        else:
            self.failed.labels(type(error).__name__).inc()

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


class _Times(Collector):
    """A histogram for what happens once a token, on one thread: it takes no lock and knows no labels."""

    def __init__(self, name: str, about: str) -> None:
        self._name = name
        self._about = about
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = (*map(floatToGoString, SECONDS), "+Inf")
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for, and says what share of the cache is used and hit."""

    def __init__(self, usage: Callable[[], Mapping[str, float]]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        usage = self._usage()
        for name, value in usage.items():
            about = f"The engine's {name.replace('_', ' ')}."
            if name.startswith(GAUGES) or (name.startswith("tier_") and name.endswith(TIER_GAUGES)):
                yield GaugeMetricFamily(f"niwaki_{name}", about, value)
            else:
                yield CounterMetricFamily(f"niwaki_{name}", about, value)
        pages = [usage.get(f"pages_{where}", 0.0) for where in ("free", "tree", "held")]
        used = _share(sum(pages[1:]), sum(pages))
        yield GaugeMetricFamily("niwaki_kv_use", "The share of the KV cache's pages that hold something.", used)
        hits = GaugeMetricFamily(
            "niwaki_hit_rate", "The share of prompt tokens that the cache gave since the start.", labels=("tier",)
        )
        cached, restored = usage.get("cached_tokens", 0.0), usage.get("tier_restored_tokens", 0.0)
        asked = cached + usage.get("prefilled_tokens", 0.0)
        hits.add_metric(("device",), _share(max(0.0, cached - restored), asked))
        if "tier_restored_tokens" in usage:
            hits.add_metric(("lower",), _share(restored, asked))  # host memory and disk
        yield hits


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
