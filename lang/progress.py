"""What a batch says while it runs: rows a second and the time left (tqdm's), tokens a second, what the cache saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

# The counters of a backend: "generated_tokens", "cached_tokens", "prefilled_tokens". None: it is not there yet.
Counters: TypeAlias = Callable[[], Mapping[str, float] | None]

SECONDS_BETWEEN_READS = 0.5  # of the counters: those of a server cost a request


def hit_rate(usage: Mapping[str, float]) -> float:
    """The share of prompt tokens that were not computed again."""
    cached = usage.get("cached_tokens", 0.0)
    return cached / max(1.0, cached + usage.get("prefilled_tokens", 0.0))


def speed(usage: Mapping[str, float], seconds: float) -> str:
    return f"{usage.get('generated_tokens', 0.0) / max(seconds, 1e-9):,.0f} tok/s, {hit_rate(usage):.0%} cached"


class Meter:
    """The backend's counters since the meter was made. What else runs on that backend meanwhile counts, too."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._before = dict(counters() or {})
        self._began = self._read_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._read_at >= SECONDS_BETWEEN_READS

    def read(self) -> str:
        """May take as long as a request to the backend."""
        self._read_at = time.monotonic()
        now = self._counters() or {}
        since = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        return speed(since, self._read_at - self._began)


def with_progress_bar(results: Iterator[T], rows: object, counters: Counters | None = None) -> Iterator[T]:
    """The same results, and a bar on stderr for as long as they are read. `rows`: what they come from."""
    meter = None if counters is None else Meter(counters)
    with _bar(rows) as bar:
        for result in results:
            if meter is not None and meter.is_due:
                bar.set_postfix_str(meter.read(), refresh=False)
            bar.update()
            yield result
        if meter is not None:
            bar.set_postfix_str(meter.read())


async def with_async_progress_bar(
    results: AsyncGenerator[T, None], rows: object, counters: Counters | None = None
) -> AsyncGenerator[T, None]:
    """`with_progress_bar` for `async for`; the counters are read beside the event loop."""
    meter = None if counters is None else Meter(counters)
    try:
        with _bar(rows) as bar:
            async for result in results:
                if meter is not None and meter.is_due:
                    bar.set_postfix_str(await asyncio.to_thread(meter.read), refresh=False)
                bar.update()
                yield result
            if meter is not None:
                bar.set_postfix_str(await asyncio.to_thread(meter.read))
    finally:
        await results.aclose()


def _bar(rows: object) -> tqdm[None]:
    from tqdm import tqdm  # heavy, and most callers show no bar

    total = len(rows) if isinstance(rows, Sequence) else None
    return cast("tqdm[None]", tqdm(total=total, unit="row", dynamic_ncols=True))
