"""What the bundled model writes in float32, by itself and in the examples: on the CPU, and the same on a GPU.

`python -m tests.benchmarks.gpu_examples PATH` writes what it is on this CPU. bench_gpu.py takes that file with
`--expected`, else it asks the CPU of the GPU's machine, which first compiles its kernels. Of the examples `service` and
`engine` are left out, which start engines of their own, and `rag`, which wants another package.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Collection, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import torch

from niwaki.kernels.triton.ops import TritonOps
from tests.benchmarks.gpu_lines import greedy_tokens
from tests.benchmarks.isolated import Json

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
ELSEWHERE: Final = {"engine", "rag", "service"}
TYPED: Final = "My code is 4182.\nWhat is my code?\n"  # to the chat
GREEDY_STEPS: Final = 32
INBOX: Final = "inbox"  # not a file: all of its messages through `extract`


def names() -> list[str]:
    return [*sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ELSEWHERE), INBOX]


def said_on(device: str, some: Collection[str]) -> dict[str, str]:
    """What these examples print there, or the error that ends them."""
    import niwaki as nw  # needs packages that the rest of the benchmark does without

    with nw.Engine(device=device, dtype="float32", seed=0) as engine:
        nw.set_default_backend(engine)
        try:
            return {name: _said(name) for name in some}
        finally:
            nw.set_default_backend(None)


def _said(name: str) -> str:
    said, argv, stdin = io.StringIO(), sys.argv, sys.stdin
    sys.argv, sys.stdin = [name], io.StringIO(TYPED)
    try:
        with redirect_stdout(said):
            if name == INBOX:
                _read_inbox()
            else:
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except Exception as error:
        said.write(f"{type(error).__name__}: {error}")
    finally:
        sys.argv, sys.stdin = argv, stdin
    return said.getvalue()


def _read_inbox() -> None:
    extract = runpy.run_path(str(EXAMPLES / "extract.py"))["extract"]
    messages = (EXAMPLES / "data" / "inbox.txt").read_text("utf-8").split("\n---\n")
    for state in extract.run_batch([{"text": message.strip()} for message in messages]):
        print(state["contact"])


def example_lines(device: str, expected: Path | None, some: Collection[str]) -> Iterator[Json]:
    """A line for each example that prints something else there than on a CPU, and one for all."""
    right = said_on("cpu", some) if expected is None else _read(expected)["examples"]
    got = said_on(device, some)
    other = [name for name in some if got[name] != right[name]]
    for name in other:
        yield {"work": f"example {name}", "same tokens": "NO", "printed": got[name], "on the CPU": right[name]}
    same = f"{len(some) - len(other)} of {len(some)} print what they print on the CPU"
    yield {"work": "examples, float32", "same tokens": "NO" if other else "yes", "examples": same}


def greedy_lines(device: torch.device, steps: int, expected: Path | None) -> Iterator[Json]:
    """Whether the bundled model writes the CPU's tokens, no engine around it."""
    right = greedy_tokens("cpu", steps) if expected is None else _read(expected)["greedy tokens"]
    same = greedy_tokens(device.type, steps, TritonOps()) == [row[:steps] for row in right]
    yield {"model": "niwaki-tiny", "work": "greedy, as the CPU in float32", "same tokens": "yes" if same else "NO"}


def _read(expected: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(expected.read_text("utf-8"))
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    found = {"greedy tokens": greedy_tokens("cpu", GREEDY_STEPS), "examples": said_on("cpu", names())}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
