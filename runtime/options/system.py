"""Which operating systems an engine runs on."""

from __future__ import annotations

import sys

from niwaki.runtime.api import ConfigError


def check_system() -> None:
    """Raises ConfigError where an engine has not what it is made of: POSIX's file locks, sockets, timers and limits."""
    if sys.platform == "win32":
        raise ConfigError(
            "niwaki's engine does not run on Windows; run it in WSL, or let programs ask a service: "
            "backend=RuntimeEndpoint(url) or OpenAI(model)"
        )
