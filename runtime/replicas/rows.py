"""Many lines through workers on a Ray cluster, by Ray Data: it starts the workers, feeds them and keeps the order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

from niwaki.runtime.api import EngineStopped
from niwaki.runtime.replicas.ray_cluster import connected

BATCH: Final = 64  # lines that a worker is given at once
# Batches that a worker has at once: while the last rows of one end, those of the next keep its engine busy.
NUM_BATCHES: Final = 2


class Worker(Protocol):
    """What Ray starts, from a class and its arguments."""

    def run(self, lines: list[str]) -> list[str]:
        """A line for each line. Called by `NUM_BATCHES` threads."""
        ...


def map_lines(
    lines: Iterable[str], worker: type[Worker], arguments: dict[str, Any], count: int, address: str | None
) -> Iterator[str]:
    """What `count` workers, made as `worker(**arguments)`, give for each line, in order. Ends the Ray that it starts.

    All lines are read before the first one is given out.

    Raises:
        ConfigError: Ray is not installed, or not at `address`.
        EngineStopped: it did not start here, or a worker failed.
    """
    with connected(address):
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of each run, and that it shows no bars
        items = [{"line": line} for line in lines]
        # What a worker is sent comes back as a whole, so a block is no more than a batch: by default it may be 5,000
        # rows, all of which a kill would lose.
        given = ray.data.from_items(items, override_num_blocks=max(1, -(-len(items) // BATCH)))
        results = given.map_batches(
            _Mapper,
            fn_constructor_kwargs={"worker": worker, "arguments": arguments},
            batch_size=BATCH,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(
                size=count, max_concurrent_calls_per_actor=NUM_BATCHES, enable_true_multi_threading=True
            ),
        )
        rows = iter(results.iter_rows())
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except ray.exceptions.RayError as error:  # its message is the tracebacks of two processes
                raise EngineStopped(
                    f"Ray lost its workers ({type(error).__name__}); the logs of its session tell why"
                ) from error
            if row["failed"]:
                raise EngineStopped(f"a worker on Ray failed: {row['failed']}")
            yield row["line"]


class _Mapper:
    """The form that Ray Data asks for. What fails here is told as a value: an error would reach the other side as the
    text of its traceback, and Ray would start the worker again for ever where it cannot start."""

    def __init__(self, worker: type[Worker], arguments: dict[str, Any]) -> None:
        self._failed = ""
        try:
            self._worker = worker(**arguments)
        except Exception as error:
            self._failed = _told(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        lines = [str(line) for line in batch["line"]]
        if not self._failed:
            try:
                return {"line": self._worker.run(lines), "failed": [""] * len(lines)}
            except Exception as error:
                self._failed = _told(error)
        return {"line": [""] * len(lines), "failed": [self._failed] * len(lines)}


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
