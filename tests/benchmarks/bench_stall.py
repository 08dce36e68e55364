"""How long the engine's loop is held up between two forward passes while texts decode beside many new schemas.

    python -m tests.benchmarks.bench_stall --requests 1000
    python -m tests.benchmarks.bench_stall --requests 100 --running 16     # shorter
    python -m tests.benchmarks.bench_stall --hostile                       # what stopped other engines, four at a time

Free texts decode all the while; then as many requests come, each with a schema that nobody has seen, from several
threads. Printed are the milliseconds of each step that are not the model's, alone and beside them, the share of steps
above the aim, 5 ms, and how long the loop's thread itself worked: in the rest it waited for a processor, for the
interpreter's lock or for masks. The rows' own host time is in it: `--running` says how many decode at once. With
`--hostile` one text is streamed, alone and beside them in turn, and printed are the milliseconds between its pieces,
the model's in them; of steps where several pieces come of one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from niwaki.runtime.api import Constraint, ConstraintError, JsonSchema, Regex
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.loop.core import EngineCore
from tests.runtime.test_hostile_kinds import HOSTILE

AIM_MS = 5.0
FREE_TEXTS = 4
MAX_STEP_MS = 50.0  # beside hostile requests
TURNS = 6  # of a stream alone and beside a part of the hostile requests
ALONE_SECONDS = 1.0  # each
TOGETHER_MS = 0.05  # pieces within this come of one step


class Clock:
    """Tells the host's share of every step. One engine at a time."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.worked: list[float] = []
        self._model = self._model_worked = 0.0
        step, forward = EngineCore.step, Runner.forward

        def timed_step(core: EngineCore) -> None:
            self._model = self._model_worked = 0.0
            began, worked = time.perf_counter(), time.thread_time()
            step(core)
            self.milliseconds.append(1000 * (time.perf_counter() - began - self._model))
            self.worked.append(1000 * (time.thread_time() - worked - self._model_worked))

        def timed_forward(runner: Runner, rows: Sequence[Row] | Batch) -> torch.Tensor:
            began, worked = time.perf_counter(), time.thread_time()
            try:
                return forward(runner, rows)
            finally:
                self._model += time.perf_counter() - began
                self._model_worked += time.thread_time() - worked

        EngineCore.step, Runner.forward = timed_step, timed_forward  # type: ignore[method-assign,assignment]

    def taken_raw(self) -> tuple[list[float], list[float]]:
        """The steps since the last call: seconds outside the model, and of them at work."""
        found, worked = self.milliseconds, self.worked
        self.milliseconds, self.worked = [], []
        return [one / 1000 for one in found], [one / 1000 for one in worked]

    def taken(self) -> str:
        """The steps since the last call."""
        found, worked = (1000 * np.array(seconds) for seconds in self.taken_raw())
        above = float(np.mean(found > AIM_MS))
        return (
            f"{len(found):6} steps, outside the model p50 {np.percentile(found, 50):.2f} ms, "
            f"p99 {np.percentile(found, 99):.2f}, longest {found.max():.1f}, above {AIM_MS:g} ms {above:.2%}; "
            f"at work p50 {np.percentile(worked, 50):.2f}, p99 {np.percentile(worked, 99):.2f}, "
            f"longest {worked.max():.1f}"
        )


def schema_of(number: int) -> str:
    """A schema of its own for each number, some ten parts large."""
    names = [f"{word}_{number}" for word in ("name", "age", "city", "tags", "role")]
    values: list[object] = [
        {"type": "string", "maxLength": 8},
        {"type": "integer", "minimum": number, "maximum": number + 99},
        {"enum": [f"city {number}", f"town {number}"]},
        {"type": "array", "items": {"enum": ["a", "b", str(number)]}, "maxItems": 2},
        {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    ]
    properties = dict(zip(names, values, strict=True))
    return json.dumps({"properties": properties, "required": names, "additionalProperties": False, "type": "object"})


def stream_beside_hostile() -> None:
    waits: list[float] = []
    is_over = threading.Event()
    with Engine(kv_tokens=8192) as engine:

        def stream() -> None:
            while not is_over.is_set():
                began = time.perf_counter()
                for _ in engine.generate("A steady stream", {"max_new_tokens": 200, "ignore_eos": True}, stream=True):
                    waits.append(1000 * (time.perf_counter() - began))
                    began = time.perf_counter()

        def ask(constraint: Constraint) -> None:
            with contextlib.suppress(ConstraintError):
                engine.generate("x", {"constraint": constraint, "max_new_tokens": 4})

        def shown(found: Sequence[float]) -> str:
            apart = [one for one in found if one > TOGETHER_MS]
            return (
                f"{len(found):6} pieces, milliseconds p50 {np.percentile(found, 50):.2f}, "
                f"p99 {np.percentile(found, 99):.2f}, longest {max(found):.1f}, "
                f"above {MAX_STEP_MS:g} {sum(one > MAX_STEP_MS for one in found)}; "
                f"of {len(apart)} steps p50 {np.percentile(apart, 50):.2f}, p99 {np.percentile(apart, 99):.2f}"
            )

        def at_rest(turn: int) -> None:
            """Both compile processes run and have nothing to do: what was killed is replaced."""
            list(pool.map(ask, [Regex(f"(a|b)*b{turn}{number}") for number in range(2)]))

        ask(JsonSchema("{}"))  # compiles kernels, starts threads
        ask(Regex("(a|b)*a"))
        gc.collect()
        gc.freeze()
        background = threading.Thread(target=stream)
        background.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, [Regex(f"(a|b)*a{number}") for number in range(8)]))  # loads what mixed batches need
                alone, beside = [], []
                for turn in range(TURNS):  # the machine's own speed swings within seconds
                    waits.clear()
                    time.sleep(ALONE_SECONDS)
                    alone += waits
                    waits.clear()
                    list(pool.map(ask, [*HOSTILE.values()][turn::TURNS]))
                    at_rest(turn)
                    beside += waits
            print("alone  ", shown(alone))
            print("beside ", shown(beside), f"({len(HOSTILE)} hostile ones)")
            print(f"p99 beside is {np.percentile(beside, 99) / np.percentile(alone, 99):.2f} times that alone")
        finally:
            is_over.set()
            background.join()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--running", type=int, default=32, help="requests that decode at once")
    parser.add_argument("--threads", type=int, default=8, help="that ask")
    parser.add_argument("--hostile", action="store_true", help="one text streamed beside hostile requests instead")
    given = parser.parse_args(arguments)
    if given.hostile:
        stream_beside_hostile()
        return 0
    clock = Clock()
    is_over = threading.Event()
    free = {"temperature": 0, "max_new_tokens": 256, "ignore_eos": True}
    with Engine(kv_tokens=32_768, max_running_requests=given.running) as engine:

        def decode_free() -> None:
            while not is_over.is_set():
                engine.generate([f"Tell me about {n}." for n in range(FREE_TEXTS)], free)

        def ask(number: int) -> None:
            options = {"json_schema": schema_of(number), "temperature": 0, "max_new_tokens": 120}
            result = engine.generate(f"Person {number}, as JSON: ", options)
            assert isinstance(result, dict)
            json.loads(str(result["text"]))

        ask(-1)  # compiles kernels, starts threads
        gc.collect()
        gc.freeze()  # as the engine's process under a server does
        background = threading.Thread(target=decode_free)
        background.start()
        try:
            time.sleep(1)
            clock.taken()
            time.sleep(4)
            print("alone  ", clock.taken(), flush=True)
            with ThreadPoolExecutor(given.threads) as pool:
                list(pool.map(ask, range(given.requests)))
            print("beside ", clock.taken())
        finally:
            is_over.set()
            background.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
