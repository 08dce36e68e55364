"""What an engine in another process is to the server, wherever that process runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient


class RemoteEngine(ABC):
    """`start` it, use its `backend`, `shutdown` it; a context manager does both. Fields are there once it started."""

    tokenizer: Tokenizer
    loaded: frames.Loaded
    backend: EngineClient

    @abstractmethod
    def start(self) -> None:
        """Returns when its model is loaded. What failed to start is shut down by the caller."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it; who still waits gets EngineStopped. Calling it twice is allowed."""

    def read_on(self, loop: asyncio.AbstractEventLoop | None) -> None:  # noqa: B027  # by default results come as before
        """Hand over results on this event loop, which spares a thread's wake-ups; None, said on that loop: no more."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.shutdown()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
