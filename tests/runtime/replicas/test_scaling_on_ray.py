"""The number of replicas follows the queue: `make test-ray`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from niwaki.runtime.api import SamplingParams
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.replicas.engines import RayEngines

pytestmark = [
    pytest.mark.skipif(not os.environ.get("NIWAKI_RAY"), reason="make test-ray runs it"),
    pytest.mark.filterwarnings("ignore"),  # those of Ray
]
LONG = SamplingParams(max_new_tokens=1000, ignore_eos=True)


def seconds_until(is_so: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < 150
        time.sleep(0.2)
    return time.monotonic() - began


def test_a_queue_brings_a_replica_and_its_end_takes_it_away() -> None:
    config = ReplicaConfig(1, 2, target_requests=4, busy_seconds=2, idle_seconds=2, cpus=0.5)
    with RayEngines(None, {"kv_tokens": 32768}, config) as engines:
        is_over = False

        def ask(number: int) -> int:
            count = 0
            while not is_over:
                (output,) = engines.backend.start(np.arange(number, number + 64, dtype=np.int32), LONG).result(120)
                count += len(output.token_ids)
            return count

        assert len(engines.process_ids()) == 1
        with ThreadPoolExecutor(12) as clients:
            asked = [clients.submit(ask, 100 * number) for number in range(12)]
            more = seconds_until(lambda: len(engines.process_ids()) == 2)
            is_over = True
        counts = [one.result() for one in asked]
        assert all(count and count % 1000 == 0 for count in counts)
        fewer = seconds_until(lambda: len(engines.process_ids()) == 1)
        print(f"a second replica after {more:.0f} s of 12 clients, one less {fewer:.0f} s behind them")
