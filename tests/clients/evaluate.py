"""lm-eval's local-completions against the server at the address given: a task of three questions, made here.

It sends prompts as token ids with `echo`, `logprobs: 1` and `max_tokens: 1`; what it reads out of the answers must be
what /generate says of the same tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import requests
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "runtime/bundled/niwaki-tiny"
QUESTIONS = [
    {"question": "The cat sat on the", "choices": [" mat", " mind"], "answer": 0},
    {"question": "Lena is a nurse from Dresden. Lena lives in", "choices": [" Dresden", " Lisbon"], "answer": 0},
    {"question": "12 plus 31 is", "choices": [" seven", " 43"], "answer": 1},
]


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "questions.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "niwaki-tiny",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(MODEL),
                "tokenized_requests": True,
                "max_length": 512,
            },
            tasks=[
                {
                    "task": "three_questions",
                    "dataset_path": "json",
                    "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
                    "test_split": "test",
                    "output_type": "multiple_choice",
                    "doc_to_text": "{{question}}",
                    "doc_to_choice": "{{choices}}",
                    "doc_to_target": "answer",
                    "target_delimiter": "",
                    "metric_list": [{"metric": "acc"}],
                }
            ],
            bootstrap_iters=0,
        )
    samples = found["samples"]["three_questions"]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        for choice, [(likelihood, _)] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            expected = log_likelihood(url, sample["doc"]["question"], choice)
            assert abs(float(likelihood) - expected) < 1e-3, (sample["doc"], choice, likelihood, expected)
    print(f"lm-eval: works, accuracy {found['results']['three_questions']['acc,none']:.2f}")


def log_likelihood(url: str, question: str, choice: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known = tokenizer.encode(question, add_special_tokens=False)
    ids = tokenizer.encode(question + choice, add_special_tokens=False)
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    told = requests.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]["input_token_logprobs"]
    return sum(logprob for logprob, _, _ in told[len(known) :])


if __name__ == "__main__":
    main(sys.argv[1])
