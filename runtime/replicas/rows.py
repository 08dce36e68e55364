"""Many lines through workers on a Ray cluster, by Ray Data: it starts the workers, feeds them and keeps the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from niwaki.runtime.replicas.ray_cluster import connected

BATCH = 64  # lines that a worker is given at once


class Worker(Protocol):
    """What Ray starts, from a class and its arguments."""

    def run(self, lines: list[str]) -> list[str]:
        """A line for each line."""
        ...


def map_lines(
    lines: Iterable[str], worker: type[Worker], arguments: dict[str, Any], count: int, address: str | None
) -> Iterator[str]:
    """What `count` workers, made as `worker(**arguments)`, give for each line, in order. Ends the Ray that it starts.

    All lines are read before the first one is given out.

    Raises:
        ConfigError: Ray is not installed, or not at `address`. EngineStopped: it did not start here.
    """
    with connected(address):
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        given = ray.data.from_items([{"line": line} for line in lines])
        results = given.map_batches(
            _Mapper,
            fn_constructor_kwargs={"worker": worker, "arguments": arguments},
            batch_size=BATCH,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=count),
        )
        for row in results.iter_rows():
            yield row["line"]


class _Mapper:
    """The form that Ray Data asks for."""

    def __init__(self, worker: type[Worker], arguments: dict[str, Any]) -> None:
        self._worker = worker(**arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"line": self._worker.run([str(line) for line in batch["line"]])}
