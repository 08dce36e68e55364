"""Whether constraints cost quality: the bundled model's exact-match on its tasks, each answer under the form that its
task asks for, beside the same answers without.

    python -m tests.benchmarks.bench_quality --count 200
    python -m tests.benchmarks.bench_quality --count 100 --tasks extraction tools --wrong

The form says what any answer to the task may look like and nothing of the right one: the keys that were asked for, the
labels, the tools, one line of text, a number. Greedy, on the trials of `niwaki.runtime.bundled.evaluate`. Exits 1 where
a constrained score is below the free one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from tokenizers import Tokenizer

from niwaki.runtime.api import Choices, Constraint, Grammar, JsonSchema, Regex, Tool, ToolCalls
from niwaki.runtime.api.calls import NIWAKI
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.evaluate import EXTRA, FAR_SHARE
from niwaki.runtime.bundled.trials import BEYOND, FAR_TASKS, TRIALS, Check, trials
from niwaki.runtime.engine import Engine

END, NEWLINE = "<|end|>", "\n"
TOOL = re.compile(r"^- (\w+)\((.*?)\): ", re.MULTILINE)
SCALAR = {"type": ["string", "integer", "null"]}


def form_of(task: str, check: Check, labels: Sequence[str]) -> Constraint:
    """What an answer to the task may look like. `labels` are those of a classification, as its answers write them."""
    prompt, answer = check
    text = answer.removesuffix(END)
    before, after = text.startswith(" "), text.endswith("\n")
    if task == "tools":
        return ToolCalls(tuple(Tool(name, parameters(given)) for name, given in TOOL.findall(prompt)), NIWAKI)
    if task == "classification":
        return Choices(tuple(label for label in labels if (label[0] == " ", label[-1] == "\n") == (before, after)))
    if task == "react":
        return Regex(r"Thought: [^\n]+\n[A-Z][a-z ]+: [^\n]+\n")
    if text.strip().startswith("{"):
        schema = json.dumps(closed(dict.fromkeys(json.loads(text), SCALAR)))
        if not (before or after):
            return JsonSchema(schema)
        inner = json.dumps(json.loads(schema) | {"x-guidance": {"whitespace_flexible": False}})
        return Grammar(f"start: {json.dumps(' ' * before)} object {json.dumps(NEWLINE * after)}\nobject: %json {inner}")
    if text.startswith(NEWLINE):
        return Regex(r"(\n[^\n]+)+")
    if re.fullmatch(r"[\s\d,]+", text):
        return Regex(r"[ \n,0-9]+")
    return Regex(f"{' ' * before}[^\\n]+{NEWLINE * after}")


def closed(properties: dict[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def parameters(given: str) -> str:
    """The schema of `name: type, name: type`."""
    pairs = (pair.split(": ") for pair in given.split(", "))
    return json.dumps(closed({name: {"type": kind} for name, kind in pairs}))


def scores(
    engine: Engine, tokenizer: Tokenizer, task: str, count: int, seed: int, *, shows: bool
) -> tuple[float, float]:
    """(constrained, free): the shares of trials of which all checks hold."""
    asked = trials(task, count, seed, far=FAR_SHARE if task in FAR_TASKS else 0.0)
    checks = [(place, check) for place, trial in enumerate(asked) for check in trial.checks]
    labels = sorted({answer.removesuffix(END) for _, (_, answer) in checks})
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for _, (prompt, _) in checks]
    lengths = [len(tokenizer.encode(answer, add_special_tokens=False).ids) + EXTRA for _, (_, answer) in checks]
    found = []
    for is_constrained in (True, False):
        sampling: list[dict[str, object]] = [{"temperature": 0, "max_new_tokens": length} for length in lengths]
        if is_constrained:
            for options, (_, check) in zip(sampling, checks, strict=True):
                options["constraint"] = form_of(task, check, labels)
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert isinstance(results, list)
        failed = set()
        for (place, (_, answer)), result in zip(checks, results, strict=True):
            output = [int(token) for token in result["output_ids"]]
            said = tokenizer.decode(output, skip_special_tokens=False)
            if not is_right(answer, said):
                failed.add(place)
                if shows and is_constrained:
                    print(f"[{task}] expected {answer!r}, said {said!r}")
        found.append(1 - len(failed) / len(asked))
    return found[0], found[1]


def is_right(answer: str, said: str) -> bool:
    """A chat answer must end where it should, with its end token or by its constraint; plain text must begin so."""
    if answer.endswith(END):
        return said.removesuffix(END) == answer.removesuffix(END)
    return said.startswith(answer)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="trials a task")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--tasks", nargs="+", choices=[*TRIALS, *BEYOND], default=[*TRIALS, *BEYOND], metavar="TASK")
    parser.add_argument("--wrong", action="store_true", help="show what went wrong under a constraint")
    given = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    is_worse = False
    print(f"{'task':<20}{'count':>7}{'constrained':>13}{'free':>8}")
    with Engine(dtype="float32", kv_tokens=65_536) as engine:
        for task in given.tasks:
            constrained, free = scores(engine, tokenizer, task, given.count, given.seed, shows=given.wrong)
            is_worse |= constrained < free
            print(f"{task:<20}{given.count:>7}{constrained:>13.1%}{free:>8.1%}", flush=True)
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
