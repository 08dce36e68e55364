"""The options of replicas: one frozen object, checked once. Loads nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.runtime.api import ConfigError
from niwaki.runtime.options.config import check_number, check_whole


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """How many replicas there are, what each may use, and when there are to be more."""

    lowest: int = 1  # replicas that there always are
    highest: int = 1  # replicas that there may be at most
    target_requests: int = 32  # requests that run or wait at a replica; with more, another one starts
    busy_seconds: float = 30.0  # how long there must be more before one starts
    idle_seconds: float = 600.0  # how long there must be too few before one ends
    cpus: float = 1.0  # CPUs of a replica
    gpus: float = 0.0  # GPUs of a replica
    address: str | None = None  # a Ray cluster; None: one is started on this machine, and ends with us

    def __post_init__(self) -> None:
        for name in ("lowest", "highest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number from 1 to 1000, got {value!r}")
        if not 1 <= self.lowest <= self.highest <= 1000:
            raise ConfigError(f"replicas must be N or LOW-HIGH from 1 to 1000, got {self.lowest}-{self.highest}")
        check_whole("target_requests", self.target_requests, 1, 1_000_000)
        for name in ("busy_seconds", "idle_seconds"):
            check_number(name, getattr(self, name), 0, 86400, "seconds")
        for name in ("cpus", "gpus"):
            check_number(name, getattr(self, name), 0, 1000)
