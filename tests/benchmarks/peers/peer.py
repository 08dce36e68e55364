"""One engine in one process, in an environment of its own: runs the workloads that `bench_peers` names, one a line.

python peer.py ENGINE MODEL_DIR WAVES.json THREADS WEIGHTS. WEIGHTS: as niwaki's option; llama.cpp has Q8_0 for int8 and
Q4_0 for int4, the others have none. A line on stdin is a workload's name, the answer a line of JSON with the seconds
and the number of new tokens. Imports nothing of niwaki but in the engine of that name.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Wave = list[tuple[list[int], int]]
Run = Callable[[Wave], int]  # gives the number of new tokens
Forget = Callable[[], object]  # what the run before left in a cache

MAX_ROWS = 32  # of a static batch
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "block_size": 32,  # the smallest that it takes: the finest sharing
    "max_model_len": 2048,
    "disable_log_stats": True,
}


def niwaki(model: str, weights: str, *, enable_prefix_cache: bool = True) -> tuple[Run, Forget]:
    from niwaki.runtime.engine import Engine

    # No drafts: random weights soon repeat themselves, and the peers guess nothing.
    engine = Engine(model, weights=weights, kv_tokens=65_536, enable_prefix_cache=enable_prefix_cache, draft_tokens=0)

    def run(wave: Wave) -> int:
        params = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for _, count in wave]
        results: Any = engine.generate(input_ids=[ids for ids, _ in wave], sampling_params=params)
        return sum(len(result["output_ids"]) for result in results)

    return run, engine.flush_cache


def niwaki_plain(model: str, weights: str) -> tuple[Run, Forget]:
    return niwaki(model, weights, enable_prefix_cache=False)


def vllm(model: str, weights: str, *, is_compiled: bool = False) -> tuple[Run, Forget]:
    assert weights == "auto", "of bfloat16 alone"
    os.environ |= VLLM_ENVIRONMENT
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=not is_compiled,
        **VLLM_OPTIONS,
    )

    def run(wave: Wave) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in wave]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in wave], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run, llm.reset_prefix_cache


def vllm_compiled(model: str, weights: str) -> tuple[Run, Forget]:
    return vllm(model, weights, is_compiled=True)


def transformers(model: str, weights: str) -> tuple[Run, Forget]:
    """Static batches, padded on the left; a batch runs until its longest answer is done."""
    assert weights == "auto", "of bfloat16 alone"
    import torch
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    causal.generation_config.eos_token_id = None
    causal.generation_config.pad_token_id = 0

    def run(wave: Wave) -> int:
        for first in range(0, len(wave), MAX_ROWS):
            batch = wave[first : first + MAX_ROWS]
            longest = max(len(ids) for ids, _ in batch)
            rows = [[0] * (longest - len(ids)) + ids for ids, _ in batch]
            mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch]
            with torch.inference_mode():
                causal.generate(
                    input_ids=torch.tensor(rows),
                    attention_mask=torch.tensor(mask),
                    max_new_tokens=max(count for _, count in batch),
                    do_sample=False,
                )
        return sum(count for _, count in wave)  # what else came is waste

    return run, lambda: None


def ctranslate2(model: str, weights: str) -> tuple[Run, Forget]:
    """Static batches, too; in bfloat16 where it has that on this processor."""
    assert weights == "auto", "of bfloat16 alone"
    import ctranslate2 as ct2

    folder = tempfile.mkdtemp()
    ct2.converters.TransformersConverter(model).convert(folder, force=True)
    has_bfloat16 = "bfloat16" in ct2.get_supported_compute_types("cpu")
    generator = ct2.Generator(
        folder,
        device="cpu",
        compute_type="bfloat16" if has_bfloat16 else "float32",
        intra_threads=int(os.environ["OMP_NUM_THREADS"]),
    )
    tokens = json.loads((Path(folder) / "vocabulary.json").read_text("utf-8"))

    def run(wave: Wave) -> int:
        most = max(count for _, count in wave)
        generator.generate_batch(
            [[tokens[i] for i in ids] for ids, _ in wave],
            max_length=most,
            min_length=most,
            beam_size=1,
            include_prompt_in_result=False,
        )
        return sum(count for _, count in wave)

    return run, lambda: None


def llama_cpp(model: str, weights: str) -> tuple[Run, Forget]:
    from llama_server import llama_server

    servers = llama_server(model, weights)
    running = next(servers)

    def run(wave: Wave) -> int:
        return sum(map(len, running.complete(wave)))

    def forget() -> None:
        nonlocal running
        running = next(servers)

    return run, forget


ENGINES: dict[str, Callable[[str, str], tuple[Run, Forget]]] = {
    "niwaki": niwaki,
    "niwaki-plain": niwaki_plain,
    "niwaki-serial": niwaki_plain,  # asked for branches in turn
    "vllm": vllm,
    "vllm-compiled": vllm_compiled,
    "transformers": transformers,
    "ctranslate2": ctranslate2,
    "llama_cpp": llama_cpp,
}


def main() -> None:
    name, model, file, threads, weights = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr
    run, forget = ENGINES[name](model, weights)
    waves: dict[str, list[Wave]] = json.loads(Path(file).read_text("utf-8"))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        forget()
        began = time.perf_counter()
        new = sum(run(wave) for wave in waves[line.strip()])
        print(json.dumps({"seconds": time.perf_counter() - began, "new_tokens": new}), file=answers, flush=True)


if __name__ == "__main__":
    main()
