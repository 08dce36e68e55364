"""How many real schemas are enforced rightly, by split and by keyword, and which keyword each refusal points at.

    python tests/benchmarks/bench_schemas.py --sample 150            # JSONSchemaBench, drawn evenly over its splits
    python tests/benchmarks/bench_schemas.py --suite                 # the JSON Schema Test Suite, 2020-12, required
    python tests/benchmarks/bench_schemas.py --sample 0 --keywords --refusals --wrong --json figures.json

"Right": compiled, and every instance judged rightly, written compactly with its keys in the schema's order; or refused
because no value satisfies it, where no instance does. "Wrong": compiled, yet an invalid instance is accepted or a valid
one refused. Times are the clock's: part of the work is another process's. The data are looked for in NIWAKI_TEST_DATA,
or in ../shared/data.
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
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.keywords import KEYWORDS

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
    empty: int = 0  # of the right: refused since nothing satisfies them
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    accepted_invalid: int = 0
    refused_valid: int = 0
    compile_ms: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.right += other.right
        self.empty += other.empty
        self.wrong += other.wrong
        self.refused += other.refused
        self.accepted_invalid += other.accepted_invalid
        self.refused_valid += other.refused_valid
        self.compile_ms += other.compile_ms
        self.refusals += other.refusals

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
    began = time.perf_counter()
    try:
        compiled = compiler.compile(JsonSchema(json.dumps(case.schema)))
    except ConstraintError as error:
        if "admits no text" in str(error) and not any(is_valid for is_valid, _ in case.tests):
            tally.right += 1
            tally.empty += 1
        else:
            tally.refused[reason(str(error))] += 1
            tally.refusals.append(f"{case.name}: {str(error)[:200]}")
        return
    tally.compile_ms.append(1000 * (time.perf_counter() - began))
    orders = orders_of(normalise(json.dumps(case.schema)).schema)
    faults = []
    for is_valid, instance in case.tests:
        found = accepts(compiled, instance, compiler.vocabulary)
        if (
            is_valid and not found
        ):  # of alternatives with the same keys the first or the last may be the one that is met
            ordered = (in_order(instance, listed) for listed in (orders, orders[::-1]))
            found = any(accepts(compiled, value, compiler.vocabulary) for value in ordered)
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


def keywords_of(schema: Json) -> set[str]:
    """The keywords of validation and of application that a schema uses anywhere."""
    found: set[str] = set()
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        if isinstance(node, dict):
            found |= node.keys() & KNOWN_KEYWORDS
            stack += node.values()
    return found


KNOWN_KEYWORDS = set(KEYWORDS) | {"unevaluatedProperties", "unevaluatedItems"}


def print_table(tallies: dict[str, Tally]) -> None:
    print(
        f"{'':28} {'schemas':>8} {'right':>7} {'of 100':>7} {'wrong':>6} {'refused':>8} "
        f"{'bad accepts':>12} {'bad refusals':>13} {'p50 ms':>7} {'p99 ms':>7}"
    )
    for name, tally in tallies.items():
        print(
            f"{name:28} {tally.total:8} {tally.right:7} {100 * tally.right / max(1, tally.total):7.1f} "
            f"{len(tally.wrong):6} {tally.refused.total():8} {tally.accepted_invalid:12} {tally.refused_valid:13} "
            f"{percentile(tally.compile_ms, 0.5):7.1f} {percentile(tally.compile_ms, 0.99):7.1f}"
        )


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[int(share * (len(ordered) - 1))]


def figures(tally: Tally) -> dict[str, Json]:
    return {
        "schemas": tally.total,
        "right": tally.right,
        "unsatisfiable": tally.empty,
        "wrong": len(tally.wrong),
        "refused": dict(tally.refused),
        "accepted_invalid": tally.accepted_invalid,
        "refused_valid": tally.refused_valid,
        "compile_ms_p50": percentile(tally.compile_ms, 0.5),
        "compile_ms_p99": percentile(tally.compile_ms, 0.99),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--sample", type=int, default=150, help="schemas of JSONSchemaBench, 0 for all")
    add("--seed", type=int, default=0)
    add("--suite", action="store_true", help="the test suite instead")
    add("--keywords", action="store_true", help="a second table, by the keywords that the schemas use")
    add("--refusals", action="store_true", help="print every refusal")
    add("--wrong", action="store_true", help="print what was judged wrongly")
    add("--json", type=Path, help="write the figures to this file, too")
    given = parser.parse_args()
    if not DATA.exists():
        print(f"no data at {DATA}; set NIWAKI_TEST_DATA", file=sys.stderr)
        return 2
    tokens = Tokenizer(Path(bundled.MODEL_DIR)).token_bytes
    vocabulary = Vocabulary(tokens, {next(i for i, text in enumerate(tokens) if text is None)})
    compiler = ConstraintCompiler(vocabulary, seconds=10, max_bytes=1)
    groups: dict[str, Tally] = defaultdict(Tally)
    keywords: dict[str, Tally] = defaultdict(Tally)
    whole = Tally()
    compiler.compile(JsonSchema("{}"))  # the first one also reads the vocabulary
    for case in suite_cases() if given.suite else bench_cases(given.sample, given.seed):
        one = Tally()
        judge(case, compiler, one)
        used = [keywords[name] for name in keywords_of(case.schema)]
        for tally in (groups[case.group], whole, *used):
            tally.add(one)
    compiler.close()
    print_table({**dict(sorted(groups.items())), "all": whole})
    if given.keywords:
        print()
        print_table(dict(sorted(keywords.items())))
    for why, count in whole.refused.most_common():
        print(f"  refused {count:4}  {why}")
    if whole.empty:
        print(f"  {whole.empty} of the right were refused because nothing satisfies them")
    for line in whole.refusals if given.refusals else ():
        print("  refused ", line)
    for line in whole.wrong if given.wrong else ():
        print("  wrong   ", line)
    if given.json is not None:
        parts = {"all": whole, **groups, **{f"keyword {name}": tally for name, tally in keywords.items()}}
        given.json.write_text(json.dumps({name: figures(tally) for name, tally in parts.items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
