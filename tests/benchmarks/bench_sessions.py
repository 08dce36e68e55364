"""Sessions: the time to the first token of turn 10, on 4,000 tokens of history, against turn 1 on the same new text.

    python -m tests.benchmarks.bench_sessions [--new 160] [--json FILE]

The bundled model's weights with room for 8,192 positions: what it says does not matter here, only when. The second row
is the same work on the engine alone, without server and session: what lies between the two is theirs, and the rest is
the model's attention to 4,000 tokens more. Both in wall and in processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx2

from niwaki.runtime.api import Segment
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, table, write_json

NUM_HISTORY = 4000  # tokens before turn 10
POSITIONS = 8192
AIM = "<= 1.2"


def first_token(client: httpx2.Client, session: str, text: str) -> None:
    """Begin a turn, read up to the first text of its answer, and leave: the turn is not stored."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 64, "ignore_eos": True, "stream": True}
    with client.stream("POST", f"/v1/sessions/{session}/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return
    raise AssertionError("no text came")


def turns(client: httpx2.Client, sessions: list[str], texts: Iterator[str]) -> Callable[[], None]:
    """Each call begins a turn of another session, with another text."""
    unused = iter(sessions)
    return lambda: first_token(client, next(unused), next(texts))


def words(number: int, count: int) -> str:
    return " ".join(f"{number * 37 + step}" for step in range(count // 3))


def long_session(client: httpx2.Client) -> tuple[str, int]:
    """Nine turns of NUM_HISTORY tokens in all; the session and its tokens."""
    session, used = str(client.post("/v1/sessions", json={}).json()["id"]), 0
    for number in range(9):
        missing = NUM_HISTORY - used
        text = words(number + 1000, missing // (9 - number) - 20)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True}
        answer = client.post(f"/v1/sessions/{session}/chat/completions", json=body)
        used = answer.json()["usage"]["total_tokens"]
    return session, used


def alone(engine: Engine, history: int, num_new: int) -> Callable[[], None]:
    """Each call generates a first token behind `history` cached tokens and new ones."""
    draw = random.Random(history)
    trunk = draw.choices(range(100, 1000), k=history)
    return lambda: consume(engine, trunk + draw.choices(range(100, 1000), k=num_new))


def consume(engine: Engine, ids: list[int]) -> None:
    engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "ignore_eos": True})


def both_clocks(
    workload: str, shape: str, a: tuple[str, Callable[[], None]], b: tuple[str, Callable[[], None]], pairs: int
) -> Comparison:
    """In wall time; in the notes the same ratio in processor time of this process, which holds server and engine."""
    seconds: dict[str, list[float]] = {a[0]: [], b[0]: []}

    def timed(name: str, run: Callable[[], None]) -> None:
        began = time.process_time()
        run()
        seconds[name].append(time.process_time() - began)

    def notes() -> dict[str, float]:
        first, tenth = (statistics.median(seconds[name][1:]) for name in (a[0], b[0]))
        return {f"cpu ms {a[0]}": first * 1e3, f"cpu ms {b[0]}": tenth * 1e3, "cpu ratio": tenth / first}

    sides = [(name, partial(timed, name, run)) for name, run in (a, b)]
    return compare(workload, shape, *sides, aim=AIM, pairs=pairs, notes=notes)


def measure(pairs: int, num_new: int) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(MODEL_DIR, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
        with (
            Engine(model, kv_tokens=4 * POSITIONS) as engine,
            serving(engine) as url,
            httpx2.Client(base_url=url, timeout=300) as client,
        ):
            fresh = [str(client.post("/v1/sessions", json={}).json()["id"]) for _ in range(pairs + 1)]
            trunk, used = long_session(client)
            grown = [str(client.post(f"/v1/sessions/{trunk}/branch", json={}).json()["id"]) for _ in range(pairs + 1)]
            first, tenth = ((words(number, num_new) for number in itertools.count()) for _ in range(2))
            first_ids = engine.tokenizer.encode([Segment(words(0, num_new))], at_start=False)
            shape = f"{used} tokens of history, {len(first_ids)} new"
            sides = ("turn 1", turns(client, fresh, first)), ("turn 10", turns(client, grown, tenth))
            session = both_clocks("session", shape, *sides, pairs)
            sides = ("turn 1", alone(engine, 0, len(first_ids))), ("turn 10", alone(engine, used, len(first_ids)))
            return [session, both_clocks("engine", shape, *sides, pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2 * MIN_PAIRS + 1)
    parser.add_argument("--new", type=int, default=160, help="tokens of a turn's new text, more or less")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.pairs, arguments.new)
    print(table(found))
    if arguments.json is not None:
        write_json(arguments.json, found, {})


if __name__ == "__main__":
    main()
