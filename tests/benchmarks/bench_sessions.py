"""Sessions: the time to the first token of turn 10, on 4,000 tokens of history, against turn 1 on the same new text.

    python -m tests.benchmarks.bench_sessions [--json FILE]

The bundled model's weights with room for 8,192 positions: what it says does not matter here, only when.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, table, write_json

NUM_HISTORY = 4000  # tokens before turn 10
NUM_NEW = 160  # tokens of a turn's new text, more or less
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


def measure(pairs: int) -> Comparison:
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
            first, tenth = ((words(number, NUM_NEW) for number in itertools.count()) for _ in range(2))
            return compare(
                "session",
                f"{used} tokens of history, {NUM_NEW} new",
                ("turn 1", turns(client, fresh, first)),
                ("turn 10", turns(client, grown, tenth)),
                aim=AIM,
                pairs=pairs,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2 * MIN_PAIRS + 1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = [measure(arguments.pairs)]
    print(table(found))
    if arguments.json is not None:
        write_json(arguments.json, found, {})


if __name__ == "__main__":
    main()
