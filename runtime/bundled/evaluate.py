"""Measures niwaki-tiny on niwaki's own engine: greedy, unconstrained, exact match, on the test side of the generator.

    python -m niwaki.runtime.bundled.evaluate [--count 200] [--out eval.json] [--model DIR] [--wrong]

Prints a row a task, writes task -> score and count, and exits 1 where a row falls short.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.trials import BEYOND, FAR_TASKS, TRIALS, Trial, trials

FAR_SHARE = 0.2  # of the trials of FAR_TASKS have their text 1,500 tokens back
EXTRA = 4  # tokens beyond the expected ones, so that an answer that does not end shows

Complete = Callable[[Sequence[list[int]], Sequence[int]], list[list[int]]]
"""Prompts and the most new tokens of each -> new tokens, greedy, up to the end of turn."""


@dataclass(frozen=True, slots=True)
class Row:
    task: str
    score: float
    count: int
    threshold: float
    far_score: float | None
    far_count: int
    wrong: tuple[str, ...]

    @property
    def is_met(self) -> bool:
        """Overall, and for the far trials too (allowing one miss in their small number)."""
        far_met = self.far_score is None or round((1 - self.far_score) * self.far_count) <= max(
            1, (1 - self.threshold) * self.far_count
        )
        return self.score >= self.threshold and far_met


class Marker:
    """Asks for completions and marks them against the trials."""

    def __init__(self, tokenizer: Tokenizer, complete: Complete) -> None:
        self.tokenizer = tokenizer
        self.complete = complete
        self.end = tokenizer.token_to_id("<|end|>")

    def row(self, task: str, threshold: float, count: int, seed: int) -> Row:
        asked = trials(task, count, seed, far=FAR_SHARE if task in FAR_TASKS else 0.0)
        right, wrong = self.mark(asked)
        far = [good for trial, good in zip(asked, right, strict=True) if trial.far]
        far_score = sum(far) / len(far) if far else None
        return Row(task, sum(right) / count, count, threshold, far_score, len(far), tuple(wrong))

    def mark(self, asked: Sequence[Trial]) -> tuple[list[bool], list[str]]:
        """Whether each trial held, and a line on every check that did not."""
        checks = [(index, *check) for index, trial in enumerate(asked) for check in trial.checks]
        prompts = [self._ids(prompt) for _, prompt, _ in checks]
        expected = [self._ids(answer) for _, _, answer in checks]
        said = self.complete(prompts, [len(answer) + EXTRA for answer in expected])
        right, wrong = [True] * len(asked), []
        for (index, prompt, _), answer, output in zip(checks, expected, said, strict=True):
            if not self.is_right(answer, output):
                right[index] = False
                told, wanted = (self.tokenizer.decode(ids, skip_special_tokens=False) for ids in (output, answer))
                wrong.append(f"{prompt[-400:]!r}\n    expected {wanted!r}\n    said     {told!r}")
        return right, wrong

    def is_right(self, expected: list[int], output: list[int]) -> bool:
        """A chat answer must end where it should; plain text must begin as expected."""
        if expected[-1] != self.end:
            return output[: len(expected)] == expected
        return output == expected or output == expected[:-1]  # engines differ in whether they return the end token

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def engine_complete(folder: Path) -> tuple[Complete, Callable[[], None]]:
    """Completions by the engine, and what closes it."""
    from niwaki.runtime.engine import Engine  # loads torch; not needed to read results

    engine = Engine(str(folder), dtype="float32", kv_tokens=65_536)

    def complete(prompts: Sequence[list[int]], budgets: Sequence[int]) -> list[list[int]]:
        sampling = [{"temperature": 0, "max_new_tokens": budget} for budget in budgets]
        results = engine.generate(input_ids=list(prompts), sampling_params=sampling)
        assert isinstance(results, list)
        return [result["output_ids"] for result in results]

    return complete, engine.shutdown


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'task':<20}{'score':>8}{'count':>7}{'at least':>10}{'1,500 back':>12}{'count':>7}"]
    for row in rows:
        least = f"{row.threshold:.0%}" if row.threshold else ""
        far = "" if row.far_score is None else f"{row.far_score:.1%}"
        mark = "" if row.is_met else "  short"
        line = f"{row.task:<20}{row.score:>8.1%}{row.count:>7}{least:>10}{far:>12}{row.far_count or '':>7}{mark}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> str:
    report: dict[str, dict[str, float | int]] = {}
    for row in rows:
        report[row.task] = {"score": row.score, "count": row.count, "threshold": row.threshold}
        if row.far_score is not None:
            report[f"{row.task}/far"] = {"score": row.far_score, "count": row.far_count, "threshold": row.threshold}
    return json.dumps(report, indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="trials a task")
    parser.add_argument("--out", type=Path, default=Path("eval.json"))
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--wrong", action="store_true", help="show what went wrong")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count}: at least 1")
    complete, close = engine_complete(options.model)
    try:
        marker = Marker(Tokenizer.from_file(str(options.model / "tokenizer.json")), complete)
        asked = TRIALS | dict.fromkeys(BEYOND, 0.0)
        rows = [marker.row(task, least, options.count, options.seed) for task, least in asked.items()]
    finally:
        close()
    if options.wrong:
        print("".join(f"[{row.task}] {line}\n" for row in rows for line in row.wrong))
    print(table(rows))
    options.out.write_text(as_json(rows))
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
