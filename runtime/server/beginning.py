"""What a request begins on a thread, and waits for no longer than the server has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from niwaki.runtime.api import EngineStopped


class Beginning:
    """Used on the event loop, for one beginning."""

    def __init__(self) -> None:
        self._waited: asyncio.Future[None] | None = None
        self._is_left = False
        self._reason: EngineStopped | None = None

    async def wait(self, beginning: Awaitable[None]) -> None:
        """Wait for it, or until it is left. Then it goes on by itself, if it has begun, as what tokenizes or compiles
        on a thread does: what it brings is to be ended there.

        Raises: what it failed with, or what `leave` was given, before or meanwhile.
        """
        self._waited = asyncio.ensure_future(beginning)
        try:
            await self._waited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_left or (task is not None and task.cancelling()):
                raise
        finally:
            self._waited = None
        if self._reason is not None:
            raise self._reason

    def leave(self, reason: EngineStopped | None = None) -> None:
        """Nobody waits for it any more; for this reason, or as nothing of it is wanted."""
        self._is_left = True
        self._reason = self._reason or reason
        if self._waited is not None:
            self._waited.cancel()
