"""W8 beside another engine: records of one JSON schema, most of whose text is determined, by the bundled model.

    python -m tests.benchmarks.bench_json --peer vllm=build/peers/vllm/bin/python

vLLM masks by xgrammar and, as here, allows no blanks between tokens. The engines cut texts into tokens in their own
ways, so neither texts nor tokens are equal: what is compared is the time of as many whole records, which the schema
makes about equally long. How many fit their schema is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime import bundled
from niwaki.runtime.api import Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from tests.benchmarks.bench_constraints import FORCED
from tests.benchmarks.bench_peers import LOGS, Peer
from tests.benchmarks.harness import Comparison, table, write_json

PEER = Path(__file__).parent / "peers" / "json_peer.py"
MAX_TOKENS = 400  # enough for whoever writes a token a character


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=PYTHON", help="vllm")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the results there as well")
    options = parser.parse_args(argv)
    model = Path(bundled.MODEL_DIR)
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode([Segment(f"Customer {n}, as JSON: ")], at_start=True) for n in range(options.rows)]
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work.json")
        work.write_text(json.dumps({"schema": FORCED, "prompts": prompts, "max_tokens": MAX_TOKENS}), "utf-8")
        peers = []
        for given in (f"niwaki={sys.executable}", *options.peer):
            name, python = given.split("=", 1)
            with (LOGS / f"{name}.log").open("wb") as log:
                arguments = [str(PEER), name, str(model), str(work), str(options.threads)]
                peers.append(Peer(name, python, arguments, options.threads, log))
        results = _compared(peers, options.rows, options.rounds)
        for peer in peers:
            peer.close()
    print(table(results))
    if options.json is not None:
        write_json(options.json, results, {"threads": options.threads, "rows": options.rows})
    return 0


def _compared(peers: Sequence[Peer], rows: int, rounds: int) -> list[Comparison]:
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for peer in peers:  # the warm-up shows what is written
        texts = peer.ask("")["texts"]
        assert isinstance(texts, list)
        length = statistics.mean(map(len, texts))
        print(f"{peer.name}: {sum(map(_is_whole, texts))} of {rows} fit, {length:.0f} characters", flush=True)
    for number in range(rounds):
        for peer in [*peers[number % len(peers) :], *peers[: number % len(peers)]]:
            seconds[peer.name].append(float(str(peer.ask("")["seconds"])))
    own = seconds[peers[0].name]
    found = []
    for other in peers[1:]:
        ratios = [b / a for a, b in zip(own, seconds[other.name], strict=True)]
        found.append(
            Comparison(
                "W8", f"{rows} x JSON", peers[0].name, other.name, rounds, statistics.median(own),
                statistics.median(seconds[other.name]), statistics.median(ratios), min(ratios), max(ratios), ">= 3", {},
            )
        )  # fmt: skip
    return found


def _is_whole(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), FORCED)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
