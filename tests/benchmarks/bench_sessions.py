"""Sessions: the time to the first token of turn 10, on 4,000 tokens of history, against turn 1 on the same new text.

    python -m tests.benchmarks.bench_sessions [--model L60] [--new 148] [--json FILE]

A server in its own two processes, as `niwaki serve` starts it, asked over HTTP; the clock stops at the first token of a
streamed answer. Turn 1 is the same system message and the same new text in a new session. The second row is the same
work on an engine alone, without server and session: what lies between the two is theirs, and the rest is the model's
attention to 4,000 tokens more. Models get room for 8,192 positions: what they say does not matter here, only when.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2

from niwaki.runtime.api import Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_server import our_server
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, number_of_pairs, table, write_json
from tests.benchmarks.shapes import LARGE, RANDOM, model_folder

NUM_HISTORY = 4000  # tokens before turn 10
POSITIONS = 8192
KV_TOKENS = 2 * POSITIONS
AIM = "<= 1.2"
SYSTEM = "You are helpful. Answer in one short sentence, please."


class Asker:
    """A client of a server whose model has this tokenizer."""

    def __init__(self, client: httpx2.Client, tokenizer: Tokenizer) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._reading = ExitStack()

    def session(self) -> str:
        return str(self._client.post("/v1/sessions", json={}).json()["id"])

    def branch(self, session: str) -> str:
        return str(self._client.post(f"/v1/sessions/{session}/branch", json={}).json()["id"])

    def text(self, number: int, num_tokens: int) -> str:
        """Of so many tokens; another one for each number."""
        words = Segment(" ".join(f"{number * 37 + step}" for step in range(num_tokens)))
        return self._tokenizer.decode(self._tokenizer.encode([words], at_start=False)[:num_tokens])

    def turn(self, session: str, text: str, *, is_first: bool) -> int:
        """One whole turn; the session's tokens then."""
        answer = self._client.post(f"/v1/sessions/{session}/chat/completions", json=_body(text, 8, is_first=is_first))
        return int(answer.json()["usage"]["total_tokens"])

    def first_token(self, session: str, text: str, *, is_first: bool) -> None:
        """A turn up to its first token. The rest is read before the next one."""
        self._reading.close()
        # In letters: random weights write pieces of characters, too, and those are told when the character is whole.
        body = _body(text, 2, is_first=is_first) | {"stream": True, "regex": "[a-z]+"}
        stream = self._client.stream("POST", f"/v1/sessions/{session}/chat/completions", json=body)
        answer = self._reading.enter_context(stream)
        came = b""
        pieces = answer.iter_bytes()
        self._reading.callback(lambda: [*pieces])
        while b'"delta":{"content":"' not in came:
            came += next(pieces)

    def long_session(self) -> tuple[str, int]:
        """Nine turns of NUM_HISTORY tokens in all; the session and its tokens."""
        session, used = self.session(), 0
        for number in range(9):
            text = self.text(number + 1000, (NUM_HISTORY - used) // (9 - number) - 12)
            used = self.turn(session, text, is_first=number == 0)
        return session, used


def _body(text: str, max_tokens: int, *, is_first: bool) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}] if is_first else []
    messages.append({"role": "user", "content": text})
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def turns(asker: Asker, sessions: list[str], num_new: int, *, is_first: bool) -> Callable[[], None]:
    """Each call is a turn of another session, with another text."""
    unused = iter([(session, asker.text(number, num_new)) for number, session in enumerate(sessions)])

    def ask() -> None:
        session, text = next(unused)
        asker.first_token(session, text, is_first=is_first)

    return ask


def alone(engine: Engine, history: int, num_new: int) -> Callable[[], None]:
    """Each call generates a first token behind `history` cached tokens and new ones."""
    draw = random.Random(history)
    trunk = draw.choices(range(100, 400), k=history)
    return lambda: consume(engine, trunk + draw.choices(range(100, 400), k=num_new))


def consume(engine: Engine, ids: list[int]) -> None:
    engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "ignore_eos": True})


def roomy(model: Path, folder: Path, positions: int = POSITIONS) -> Path:
    """The model with so many positions, in a new folder."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(name: str, pairs: int, num_new: int) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as temporary:
        model = roomy(model_folder(name), Path(temporary) / name)
        with (
            our_server(model, "--kv-tokens", str(KV_TOKENS)) as (side, _),
            httpx2.Client(base_url=side.url.removesuffix("/v1"), timeout=300) as client,
        ):
            asker = Asker(client, Tokenizer(model))
            fresh = [asker.session() for _ in range(pairs + 1)]
            trunk, used = asker.long_session()
            grown = [asker.branch(trunk) for _ in range(pairs + 1)]
            shape = f"{name}: {used} tokens of history, {num_new} new"
            first = turns(asker, fresh, num_new, is_first=True)
            tenth = turns(asker, grown, num_new, is_first=False)
            yield compare("session", shape, ("turn 1", first), ("turn 10", tenth), aim=AIM, pairs=pairs)
        with Engine(model, kv_tokens=KV_TOKENS) as engine:
            first, tenth = alone(engine, 0, num_new), alone(engine, used, num_new)
            yield compare("engine", shape, ("turn 1", first), ("turn 10", tenth), aim=AIM, pairs=pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("niwaki-tiny", *RANDOM, *LARGE), default="niwaki-tiny")
    parser.add_argument("--pairs", type=number_of_pairs, default=2 * MIN_PAIRS + 1)
    parser.add_argument("--new", type=int, default=148, help="tokens of a turn's new text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = list(measure(arguments.model, arguments.pairs, arguments.new))
    print(table(found))
    if arguments.json is not None:
        write_json(arguments.json, found, {})


if __name__ == "__main__":
    main()
