"""The way to Ray: loaded late, connected or started, and left again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from niwaki.runtime.api import ConfigError, EngineStopped

MAX_STARTS = 4  # Ray gives its processes 30 s to come up, which they exceed where the machine is busy
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster; without an address to one of this machine that ends with the block.

    Raises:
        ConfigError: Ray is not installed, or not at that address. EngineStopped: it did not start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers over the network
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # for the first of its processes, by default 30
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}; install niwaki[ray]") from error
    if address is None:
        _start(ray)
    else:
        try:
            ray.init(address, **QUIET)
        except ConnectionError as error:
            # Not set unasked: where the cluster knows no token, a driver that wants one waits for ever.
            hint = "" if "RAY_AUTH_MODE" in os.environ else "; if it asks for a token, set RAY_AUTH_MODE=token"
            raise ConfigError(f"no Ray cluster at {address}: {error}{hint}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _start(ray: Any) -> None:
    for is_last in (False,) * (MAX_STARTS - 1) + (True,):
        try:
            ray.init("local", **QUIET)
        except Exception as error:  # Ray's own are of no other class where its processes do not come up
            ray.shutdown()  # of what did come up
            if is_last:
                raise EngineStopped(f"Ray did not start: {error}") from error
        else:
            return
