"""Constraints that requests bring, compiled where nobody else waits for it. Knows a compiler; no branch, no engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from niwaki.runtime.api import Constraint, EngineStopped, Generation, SamplingParams, StopRegex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.automaton import ByteDfa


@dataclass(slots=True)
class _Counts:
    grammars_compiled: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_cache_hits: int = 0


class Compilations:
    """Compiles on the caller's thread, or on one of its own where the caller must not wait. Thread-safe."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        """`compiler` is closed with this."""
        self._compiler = compiler
        self._counts = _Counts()
        self._lock = threading.Lock()  # the counts
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="niwaki-compile")

    @property
    def vocabulary(self) -> Vocabulary:
        return self._compiler.vocabulary

    def counts(self) -> Mapping[str, float]:
        """How many since the start, how long they took, and how many were known."""
        return asdict(self._counts)

    def forget_counts(self) -> None:
        """Count from here on."""
        with self._lock:
            self._counts = _Counts()

    def start(
        self, compile_and_submit: Callable[[], None], params: SamplingParams, generation: Generation, *, stalls: bool
    ) -> None:
        """Do it, which compiles what `params` ask for: at once, and raise what it raises; or later where there is
        something to compile and the caller `stalls` others, or an event loop: then `generation` fails with it.

        Raises:
            EngineStopped: closed before.
        """
        if self._knows(params) or not (stalls or _is_on_event_loop()):
            compile_and_submit()
            return

        def run() -> None:
            try:
                compile_and_submit()
            except Exception as error:  # whatever it is, somebody waits for it
                generation.fail(error)

        def tell(future: Future[None]) -> None:
            if future.cancelled():
                generation.fail(EngineStopped("the engine was shut down before the constraint was compiled"))

        try:
            self._beside.submit(run).add_done_callback(tell)
        except RuntimeError:  # it takes no more work
            raise EngineStopped("the engine was shut down") from None

    def matchers(self, constraint: Constraint | None, count: int) -> list[Matcher | None]:
        if constraint is None:
            return [None] * count
        compiled = self._compiler.known(constraint)
        if compiled is not None:
            with self._lock:
                self._counts.grammar_cache_hits += 1
        else:
            began = time.perf_counter()
            compiled = self._compiler.compile(constraint)
            with self._lock:
                self._counts.grammars_compiled += 1
                self._counts.grammar_compile_seconds += time.perf_counter() - began
        return [compiled.matcher() for _ in range(count)]

    def stop_ends(self, params: SamplingParams) -> ByteDfa | None:
        """Where the first match of `params.stop_regex` ends."""
        return None if params.stop_regex is None else self._compiler.first_match(params.stop_regex)

    def close(self) -> None:
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    def _knows(self, params: SamplingParams) -> bool:
        stop = None if params.stop_regex is None else StopRegex(params.stop_regex)
        return all(one is None or self._compiler.is_known(one) for one in (params.constraint, stop))


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
