"""The options of replicas: one frozen object, checked once. Loads nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.runtime.api import ConfigError


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """How many replicas there are, what each may use, and when there are to be more."""

    lowest: int = 1  # that there always are
    highest: int = 1  # that there may be
    target_requests: int = 32  # that run or wait at a replica; with more of them replicas are started, up to `highest`
    busy_seconds: float = 30.0  # that there are more before one is started
    idle_seconds: float = 600.0  # that there are too few before one is ended
    cpus: float = 1.0  # of one replica
    gpus: float = 0.0  # of one replica
    address: str | None = None  # of a Ray cluster; None: a Ray of our own on this machine, which ends with us

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest <= 1000:
            raise ConfigError(f"replicas must be N or LOW-HIGH from 1 to 1000, got {self.lowest}-{self.highest}")
        if self.target_requests < 1:
            raise ConfigError(f"replica requests must be at least 1, got {self.target_requests}")
        if not (0 <= self.busy_seconds <= 86400 and 0 <= self.idle_seconds <= 86400):
            raise ConfigError(
                f"busy and idle seconds must be from 0 to 86400, got {self.busy_seconds} and {self.idle_seconds}"
            )
        if not (0 <= self.cpus <= 1000 and 0 <= self.gpus <= 1000):
            raise ConfigError(f"a replica's cpus and gpus must be from 0 to 1000, got {self.cpus} and {self.gpus}")
