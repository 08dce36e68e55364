"""What all tests share: seeded property tests, and one engine on the bundled model for those that need a real one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from niwaki.runtime.options.config import EngineConfig

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine

# Triton decides at its first import whether it interprets, and torch may be who imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every machine and in every run; a slow machine is no failure.
hypothesis.settings.register_profile("niwaki", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("niwaki")


# A shell's background jobs ignore Ctrl-C, and so would these tests, which press it, and what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def seeded_engines() -> Iterator[None]:
    """Requests without a seed draw the same in every run, where the test does not start its engine elsewhere."""
    plain = EngineConfig.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "of", lambda model, options: plain(model, {"seed": 0} | options))
        yield


@pytest.fixture(scope="session")
def bundled_engine() -> Iterator[Engine]:
    """The bundled model, loaded once for the whole run."""
    from niwaki.runtime.engine import Engine  # loads torch, which most tests do without

    with Engine() as engine:
        yield engine
