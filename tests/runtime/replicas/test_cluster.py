"""The way to a Ray cluster, without Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from niwaki.runtime.api import ConfigError
from niwaki.runtime.replicas.ray_cluster import connected


@pytest.mark.parametrize("mode", [None, "token"])
def test_a_cluster_that_cannot_be_reached_may_want_a_token(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says of one that does not know its client only that it could not connect."""

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Failed to connect")

    for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "RAY_gcs_server_port_wait_time_s"):
        monkeypatch.setenv(name, mode or "")  # and taken out again behind the test
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=refuse, shutdown=lambda: None))
    with pytest.raises(ConfigError) as told:
        connected("head:6379").__enter__()
    hint = "" if mode else "; if it asks for a token, set RAY_AUTH_MODE=token"
    assert str(told.value) == f"no Ray cluster at head:6379: Failed to connect{hint}"
