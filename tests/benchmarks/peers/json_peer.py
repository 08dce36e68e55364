"""One engine in one process, in an environment of its own: writes JSON of a schema, once for each line that it reads.

python json_peer.py ENGINE MODEL_DIR WORK.json THREADS. WORK.json: `schema`, `prompts` (token ids) and `max_tokens`. The
answer is a line of JSON with the seconds and the texts. Imports nothing of niwaki but in the engine of that name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import VLLM_ENVIRONMENT, VLLM_OPTIONS

Run = Callable[[], list[str]]


def niwaki(model: str, work: Any) -> tuple[Run, Callable[[], object]]:
    from niwaki.runtime.engine import Engine

    engine = Engine(model, kv_tokens=65_536)
    params = {"json_schema": work["schema"], "temperature": 0, "max_new_tokens": work["max_tokens"]}

    def run() -> list[str]:
        results: Any = engine.generate(input_ids=work["prompts"], sampling_params=params)
        return [result["text"] for result in results]

    return run, engine.flush_cache


def vllm(model: str, work: Any) -> tuple[Run, Callable[[], object]]:
    os.environ |= VLLM_ENVIRONMENT
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model,
        enforce_eager=True,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **VLLM_OPTIONS,
    )
    asked = StructuredOutputsParams(json=work["schema"])
    params = SamplingParams(temperature=0, max_tokens=work["max_tokens"], structured_outputs=asked)

    def run() -> list[str]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    return run, llm.reset_prefix_cache


ENGINES: dict[str, Callable[[str, Any], tuple[Run, Callable[[], object]]]] = {"niwaki": niwaki, "vllm": vllm}


def main() -> None:
    name, model, file, threads = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr
    run, forget = ENGINES[name](model, json.loads(Path(file).read_text("utf-8")))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for _ in sys.stdin:
        forget()
        began = time.perf_counter()
        texts = run()
        print(json.dumps({"seconds": time.perf_counter() - began, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
