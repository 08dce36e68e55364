"""Times compiling, masks and sampling on a synthetic vocabulary; run it as `python tests/benchmarks/bench_masks.py`.

Prints microseconds (best of several rounds). Options: --vocab 2048 131072, --batch 1 32 256.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from niwaki.runtime.api import Choices, Constraint, ConstraintError, Regex, SamplingParams
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.sampling.sampler import SampleRow, sample

RECORD = (
    r'\{"name": "[^"\\\n]{1,40}", "age": (null|[0-9]{1,3}), "city": "[^"\\\n]{1,40}", '
    r'"email": "[a-z0-9.]{1,30}@[a-z0-9.]{1,30}", "role": "[^"\\\n]{1,40}"\}'
)
PATTERNS = {
    "date": r"\d{4}-\d\d-\d\d",
    "ip": r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)",
    "identifier": r"[A-Za-z_][A-Za-z0-9_]{0,30}",
    "words": r"\w+( \w+)*",
    "any text": r".*",
    "contains": r".*needle.*",
    "record": RECORD,
}


def synthetic_vocabulary(size: int) -> Vocabulary:
    """All single bytes and random words over frequent letters, the last id the end token: shaped like a BPE's."""
    rng = random.Random(0)
    texts = [bytes([b]) for b in range(256)]
    known = set(texts)
    while len(texts) < size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9)))
        word = rng.choice(["", " ", " ", '"', word[0].upper()]) + word
        if rng.random() < 0.02:
            word = rng.choice(['", "', '": "', "': ", "12", "2024", "},", "été", "名前"]) + word[:2]
        text = word.encode()
        if text not in known:
            known.add(text)
            texts.append(text)
    return Vocabulary([*texts, None], {size - 1})


def best_of(run: Callable[[], object], rounds: int = 5) -> float:
    """Microseconds of the fastest run after a first one that compiles kernels."""
    run()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def bench_constraints(size: int) -> None:
    began = time.perf_counter()
    vocabulary = synthetic_vocabulary(size)
    print(f"\nvocabulary of {size}: {len(vocabulary.node_depths)} trie nodes, {time.perf_counter() - began:.2f} s")
    rng = random.Random(1)
    cases: dict[str, Constraint] = {name: Regex(pattern) for name, pattern in PATTERNS.items()}
    for count in (200, 10_000):
        texts = {"".join(rng.choices("abcdefghijklm ", k=rng.randint(4, 24))) for _ in range(count)}
        cases[f"{count} choices"] = Choices(tuple(sorted(texts)))
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    compiler.compile(Regex("(a|b)*a"))  # the process runs, the kernels are compiled
    row = np.zeros(vocabulary.num_words, np.uint32)
    print(f"{'':16}{'compile ms':>12}{'states':>9}{'KB':>8}{'mask us':>12}{'p99':>8}{'known us':>10}{'accept us':>11}")
    for name, constraint in cases.items():
        began = time.perf_counter()
        try:
            compiled = compiler.compile(constraint)
        except ConstraintError as error:
            print(f"{name:16}{error}")
            continue
        compile_ms = (time.perf_counter() - began) * 1e3
        masks: list[float] = []
        accepts: list[float] = []
        for _ in range(20):
            matcher = compiled.matcher()
            for remaining in range(40, 0, -1):
                began = time.perf_counter()
                matcher.fill_mask(row)
                masks.append((time.perf_counter() - began) * 1e6)
                matcher.fill_mask_within(row, remaining)
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                allowed = allowed[allowed != size - 1]
                if len(allowed) == 0:
                    break
                token = int(rng.choice(allowed))
                began = time.perf_counter()
                matcher.accept(token)
                accepts.append((time.perf_counter() - began) * 1e6)
        matcher = compiled.matcher()
        known = best_of(lambda matcher=matcher: [matcher.fill_mask(row) for _ in range(100)]) / 100  # type: ignore[misc]
        print(
            f"{name:16}{compile_ms:12.1f}{compiled.num_states:9}{compiled.num_bytes / 1024:8.0f}"
            f"{np.median(masks):12.1f}{np.percentile(masks, 99):8.0f}{known:10.2f}{np.median(accepts):11.2f}"
        )
    compiler.close()


def bench_sampler(size: int, batches: Sequence[int]) -> None:
    words = (size + 31) // 32
    few = np.zeros(words, np.uint32)
    few[[3, words // 2]] = 7
    many = np.full(words, 0xFFFFFFFF, np.uint32)
    many[::7] = 0x0F0F0F0F
    greedy, plain = SamplingParams(temperature=0.0), SamplingParams()
    ids = np.arange(300)
    rows: dict[str, SampleRow] = {
        "greedy": SampleRow(greedy, 1, 0),
        "temperature": SampleRow(plain, 1, 0),
        "top_k 50": SampleRow(SamplingParams(top_k=50), 1, 0),
        "top_p 0.9": SampleRow(SamplingParams(top_p=0.9), 1, 0),
        "min_p 0.05": SampleRow(SamplingParams(min_p=0.05), 1, 0),
        "greedy, few": SampleRow(greedy, 1, 0, few),
        "temp., few": SampleRow(plain, 1, 0, few),
        "greedy, many": SampleRow(greedy, 1, 0, many),
        "temp., many": SampleRow(plain, 1, 0, many),
        "penalties": SampleRow(SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1), 1, 0, None, ids, ids),
        "logprobs 5": SampleRow(SamplingParams(return_logprob=True, top_logprobs_num=5), 1, 0),
    }
    print(f"\nsampling, vocabulary of {size}, us a call:" + "".join(f"{f'batch {batch}':>12}" for batch in batches))
    for name, row in rows.items():
        times = []
        for batch in batches:
            # A few likely tokens above a long tail, as a language model's logits have.
            logits = torch.randn(batch, size, generator=torch.Generator().manual_seed(0)) * 2
            logits[:, :: max(1, size // 12)] += 12
            mates = [row] * batch
            times.append(best_of(lambda logits=logits, mates=mates: sample(logits, mates)))  # type: ignore[misc]
        print(f"    {name:40}" + "".join(f"{value:12.0f}" for value in times))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 131_072])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for size in options.vocab:
        bench_constraints(size)
        bench_sampler(size, options.batch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
