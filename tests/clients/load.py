"""locust against the server at the address given: eight users and a hundred requests, as load tools ask.

Streams with `ignore_eos`, `max_completion_tokens` and usage in every chunk, and /health beside them. Exit code 0 when
nothing failed and every answer had as many tokens as were asked for.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import gevent
from locust import HttpUser, constant, events, task

NUM_TOKENS = 16
NUM_REQUESTS = 100


class Talker(HttpUser):
    wait_time = constant(0)

    @task(8)
    def chat(self) -> None:
        body = {
            "model": "niwaki-tiny",
            "messages": [{"role": "user", "content": f"Count to {random.randint(2, 99)}."}],
            "max_completion_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            counts = [
                json.loads(line[6:])["usage"]["completion_tokens"]
                for line in answer.iter_lines()
                if line.startswith(b"data: {")
            ]
            if counts != sorted(counts) or counts[-1] != NUM_TOKENS:
                answer.failure(f"{counts}")

    @task(1)
    def health(self) -> None:
        self.client.get("/health")


@events.init.add_listener
def end_when_enough(environment: object, **more: object) -> None:
    def count(**request: object) -> None:
        if environment.stats.total.num_requests == NUM_REQUESTS:
            gevent.spawn(environment.runner.quit)

    environment.events.request.add_listener(count)


@events.quitting.add_listener
def report(environment: object, **more: object) -> None:
    total = environment.stats.total
    print(f"locust: {total.num_requests} requests, {total.num_failures} failed, median {total.median_response_time} ms")
    environment.process_exit_code = 0 if total.num_requests >= NUM_REQUESTS and not total.num_failures else 1


def main(url: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "locust", "-f", str(Path(__file__).resolve()), "--headless", "--only-summary",
            "--users", "8", "--spawn-rate", "8", "--run-time", "120s", "--host", url, "--loglevel", "WARNING",
        ]  # fmt: skip
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
