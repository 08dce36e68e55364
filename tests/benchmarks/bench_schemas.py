"""How many real schemas are enforced rightly, and which keyword each refusal points at.

    python tests/benchmarks/bench_schemas.py --sample 150            # JSONSchemaBench, drawn evenly over its splits
    python tests/benchmarks/bench_schemas.py --suite                 # the JSON Schema Test Suite, 2020-12, required

"Right": compiled, and every instance judged rightly, written compactly with its keys in the schema's order. "Silently
wrong": compiled, yet an invalid instance is accepted or a valid one refused. The data are looked for in
NIWAKI_TEST_DATA, or in ../shared/data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from niwaki.runtime import bundled
from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("NIWAKI_TEST_DATA", ROOT.parent / "shared" / "data"))

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Case:
    group: str
    name: str
    schema: Json
    tests: tuple[tuple[bool, Json], ...]  # (is it valid, the instance)


@dataclass(slots=True)
class Tally:
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    accepted_invalid: int = 0
    refused_valid: int = 0
    compile_ms: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.right + len(self.wrong) + self.refused.total()


def bench_cases(sample: int, seed: int) -> Iterator[Case]:
    with gzip.open(DATA / "jsonschemabench" / "dev.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    by_split: dict[str, list[dict[str, Json]]] = defaultdict(list)
    for row in rows:
        if row["tests"]:
            by_split[row["split"]].append(row)
    rng = random.Random(seed)
    share = -(-sample // len(by_split)) if sample else len(rows)
    for split, found in sorted(by_split.items()):
        for row in rng.sample(found, min(share, len(found))):
            tests = tuple((bool(test["valid"]), test["data"]) for test in row["tests"])  # type: ignore[union-attr,index,call-overload]
            yield Case(split, str(row["name"]), row["schema"], tests)


def suite_cases() -> Iterator[Case]:
    for path in sorted((DATA / "json-schema-test-suite" / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            tests = tuple((test["valid"], test["data"]) for test in group["tests"])
            yield Case(path.stem, f"{path.stem}: {group['description']}", group["schema"], tests)


def in_order(value: Json, orders: list[list[str]]) -> Json:
    """The value with the keys of each object as the normal form orders those of the object that is most like it."""
    if isinstance(value, list):
        return [in_order(item, orders) for item in value]
    if isinstance(value, dict):
        order = max(orders, key=lambda names: len(value.keys() & set(names)), default=[])
        ranks = {name: rank for rank, name in enumerate(order)}
        keys = sorted(value, key=lambda key: ranks.get(key, len(ranks)))
        return {key: in_order(value[key], orders) for key in keys}
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1.0 is written 1
    return value


def orders_of(schema: Json) -> list[list[str]]:
    """The keys of every object that the normal form lists, in their order."""
    found: list[list[str]] = []
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += reversed(node)
        if isinstance(node, dict):
            properties, constants = node.get("properties"), node.get("enum")
            listed = [properties, *(constants if isinstance(constants, list) else ())]
            found += [list(names) for names in listed if isinstance(names, dict)]
            stack += reversed(node.values())
    return found


def accepts(compiled: CompiledConstraint, value: Json, vocabulary: Vocabulary) -> bool:
    matcher: Matcher = compiled.matcher()
    ids = {text: index for index, text in enumerate(vocabulary.token_bytes) if text and len(text) == 1}
    for byte in json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"):
        try:
            matcher.accept(ids[bytes([byte])])
        except ConstraintError:
            return False
    return matcher.can_end


def judge(case: Case, compiler: ConstraintCompiler, tally: Tally) -> None:
    began = time.process_time()
    try:
        compiled = compiler.compile(JsonSchema(json.dumps(case.schema)))
    except ConstraintError as error:
        tally.refused[reason(str(error))] += 1
        if os.environ.get("SHOW_REFUSALS"):
            print("REFUSED", case.name, "::", str(error)[:200])
        return
    tally.compile_ms.append(1000 * (time.process_time() - began))
    orders = orders_of(normalise(json.dumps(case.schema)).schema)
    faults = []
    for is_valid, instance in case.tests:
        found = accepts(compiled, instance, compiler.vocabulary)
        if is_valid and not found:
            found = accepts(compiled, in_order(instance, orders), compiler.vocabulary)
        if found != is_valid:
            faults.append(f"{'refuses valid' if is_valid else 'ACCEPTS INVALID'} {json.dumps(instance)[:150]}")
            tally.refused_valid += is_valid
            tally.accepted_invalid += not is_valid
    if faults:
        tally.wrong.append(f"{case.name}: {'; '.join(faults[:3])}")
    else:
        tally.right += 1


def reason(message: str) -> str:
    """What a refusal points at: the last keyword of its pointer, or the message."""
    place = re.match(r"schema at (\S*): (.*)", message)
    if place is None:
        return message[:110]
    words = [part for part in place[1].split("/") if part and not part.isdigit()]
    return f"{words[-1] if words else 'root'}: {place[2][:60]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=150, help="schemas of JSONSchemaBench, 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", action="store_true", help="the test suite instead")
    parser.add_argument("--wrong", action="store_true", help="print what was judged wrongly")
    given = parser.parse_args()
    if not DATA.exists():
        print(f"no data at {DATA}; set NIWAKI_TEST_DATA", file=sys.stderr)
        return 2
    tokens = Tokenizer(Path(bundled.MODEL_DIR)).token_bytes
    vocabulary = Vocabulary(tokens, {next(i for i, text in enumerate(tokens) if text is None)})
    compiler = ConstraintCompiler(vocabulary, seconds=10, max_bytes=1)
    tallies: dict[str, Tally] = defaultdict(Tally)
    whole = Tally()
    for case in suite_cases() if given.suite else bench_cases(given.sample, given.seed):
        one = Tally()
        judge(case, compiler, one)
        for tally in (tallies[case.group], whole):
            tally.right += one.right
            tally.wrong += one.wrong
            tally.refused += one.refused
            tally.accepted_invalid += one.accepted_invalid
            tally.refused_valid += one.refused_valid
            tally.compile_ms += one.compile_ms
    compiler.close()
    print(f"{'':28} {'schemas':>8} {'right':>7} {'wrong':>6} {'refused':>8} {'bad accepts':>12} {'bad refusals':>13}")
    for name, tally in [*sorted(tallies.items()), ("all", whole)]:
        print(
            f"{name:28} {tally.total:8} {tally.right:7} {len(tally.wrong):6} {tally.refused.total():8} "
            f"{tally.accepted_invalid:12} {tally.refused_valid:13}"
        )
    times = sorted(whole.compile_ms) or [0.0]
    print(f"compile, processor ms: p50 {times[len(times) // 2]:.1f}, p99 {times[int(0.99 * (len(times) - 1))]:.1f}")
    for why, count in whole.refused.most_common():
        print(f"  refused {count:4}  {why}")
    if given.wrong:
        for line in whole.wrong:
            print("  wrong   ", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
