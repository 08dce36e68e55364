"""Who has asked how much: requests and tokens a minute, and requests at once. Knows digests of keys, never keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from niwaki.runtime.api import Output, Score
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.keys import KeyLimits


def tokens_of(outputs: Sequence[Output] = (), scores: Sequence[Score] = ()) -> int:
    """That were computed for the outputs of one prompt, and for scores: as far as the cache did not have them."""
    prompts: list[Output | Score] = [*outputs[:1], *scores]  # all outputs have the same one
    computed = sum(one.prompt_tokens - one.cached_tokens for one in prompts)
    return computed + sum(output.completion_tokens for output in outputs)


class _Bucket:
    """What may still be used: filled up evenly over a minute, and never above a minute's worth. May go below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Until so much is there; 0: it is."""
        self._level = min(float(self._per_minute), self._level + (now - self._at) * self._per_minute / 60)
        self._at = now
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Rates:
    """Counts what the holders of keys use. On the event loop."""

    def __init__(
        self,
        limits: Mapping[bytes, KeyLimits],
        default: KeyLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._default = default
        self._clock = clock
        self._requests: dict[bytes, _Bucket] = {}
        self._tokens: dict[bytes, _Bucket] = {}
        self._running: dict[bytes, int] = {}

    def admit(self, key: bytes) -> None:
        """Count one more request. Raises ApiError: as `check`."""
        self.check(key)
        limits = self._limits.get(key, self._default)
        if limits.requests_per_minute is not None:
            _bucket(self._requests, key, limits.requests_per_minute, self._clock()).take(1)

    def check(self, key: bytes) -> None:
        """Raises ApiError: 429, and when to come back, where `admit` would."""
        limits = self._limits.get(key, self._default)
        now = self._clock()
        if limits.concurrent is not None and self._running.get(key, 0) >= limits.concurrent:
            raise _too_much(f"{limits.concurrent} requests of this key run already", "requests", 1.0)
        if limits.tokens_per_minute is not None:
            wait = _bucket(self._tokens, key, limits.tokens_per_minute, now).seconds_until(1, now)
            if wait > 0:
                raise _too_much(f"this key has used its {limits.tokens_per_minute} tokens a minute", "tokens", wait)
        if limits.requests_per_minute is not None:
            wait = _bucket(self._requests, key, limits.requests_per_minute, now).seconds_until(1, now)
            if wait > 0:
                text = f"this key has made its {limits.requests_per_minute} requests a minute"
                raise _too_much(text, "requests", wait)

    def counts_tokens(self, key: bytes) -> bool:
        return self._limits.get(key, self._default).tokens_per_minute is not None

    def enter(self, key: bytes) -> None:
        """A request of the key runs; it must `leave`."""
        self._running[key] = self._running.get(key, 0) + 1

    def leave(self, key: bytes, num_tokens: int) -> None:
        """It is over and has used so many tokens."""
        left = self._running[key] - 1
        if left:
            self._running[key] = left
        else:
            del self._running[key]
        per_minute = self._limits.get(key, self._default).tokens_per_minute
        if per_minute is not None:
            now = self._clock()
            bucket = _bucket(self._tokens, key, per_minute, now)
            bucket.seconds_until(0, now)
            bucket.take(num_tokens)


def _bucket(buckets: dict[bytes, _Bucket], key: bytes, per_minute: int, now: float) -> _Bucket:
    found = buckets.get(key)
    if found is None:
        found = buckets[key] = _Bucket(per_minute, now)
    return found


def _too_much(message: str, what: str, seconds: float) -> ApiError:
    wait = max(1, math.ceil(seconds))
    return ApiError(429, message, type=what, code="rate_limit_exceeded", retry_after=wait)
