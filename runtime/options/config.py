"""The engine's options: one frozen object, resolved and checked once at the door. Nothing below reads flags."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from niwaki.runtime.api import ConfigError
from niwaki.runtime.api.names import ENGINE, hint

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "int8", "fp8")
WEIGHTS = ("auto", "int8", "int4", "fp8")
POLICIES = ("lpm", "fcfs")
EVICTIONS = ("lru", "returning", "lfu", "priority")
LEAST_CHUNK = 512  # tokens of a step, where nothing is said
DISK_CACHE_BYTES = 4 * 2**30  # where nothing is said


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of `Engine`. `model=None` is the bundled model; `kv_tokens=None` sizes the pool from free memory."""

    model: str | Path | None = None  # a folder; None: the bundled one
    device: str = "auto"  # "cpu" or "cuda"; "auto": the CPU
    dtype: str = "auto"  # type of the computation; "auto": the checkpoint's own
    weights: str = "auto"  # form of the weights in memory; "auto": as the checkpoint stores them
    kv_dtype: str = "auto"  # type of the KV cache; "auto": the computation's
    kv_tokens: int | None = None  # tokens that the KV cache holds; None: by free memory
    kv_memory: float | int | None = None  # size of the KV cache: a share (0.5) of the memory left, or bytes (2 << 30)
    page_size: int = 16  # tokens in a page, the unit in which the KV cache is handed out
    max_running_requests: int = 256  # sequences in a step at most; others wait
    chunked_prefill_size: int | None = None  # tokens in a step at most; None: 512 to 2048, on a GPU 2048 to 8192
    streaming_prefill_size: int | None = None  # of them prompts, while a stream is read; None: by model and device
    schedule_policy: str = "lpm"  # who goes first: in a short pool the longest cached prefix; "fcfs": who came first
    eviction_policy: str = "lru"  # which leaves of the prefix cache go first: least recently, least often used, ...
    host_cache_bytes: int = 0  # memory for pages that were evicted from the KV cache; 0: none
    disk_cache_dir: str | Path | None = None  # a folder for pages that leave that memory; shared between runs
    disk_cache_bytes: int | None = None  # size of the files in that folder; None: 4 GiB
    enable_prefix_cache: bool = True  # False: nothing is shared or kept
    tree_attention: bool = True  # read keys that rows share once a step, where that pays
    deterministic: bool = False  # give a request the same bits whatever runs beside it; slower
    force_tokens: bool = True  # write what a constraint determines without asking the model
    draft_tokens: int = 15  # tokens that are guessed at once where the text repeats itself; 0: none
    seed: int | None = None  # from which requests without a seed are given one; None: at random

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model must be the path of a folder, or None for the bundled one, got {self.model!r}")
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("schedule_policy", self.schedule_policy, POLICIES)
        _one_of("eviction_policy", self.eviction_policy, EVICTIONS)
        check_whole("page_size", self.page_size, 1, 1024)
        check_whole("max_running_requests", self.max_running_requests, 1, 100_000)
        check_whole("draft_tokens", self.draft_tokens, 0, 256)
        check_whole("host_cache_bytes", self.host_cache_bytes, 0, 2**50)
        folder = self.disk_cache_dir
        if folder is not None and not (isinstance(folder, Path) or (isinstance(folder, str) and folder)):
            raise ConfigError(f"disk_cache_dir must be the path of a folder, got {folder!r}")
        if self.disk_cache_bytes is not None:
            check_whole("disk_cache_bytes", self.disk_cache_bytes, 1, 2**50)
            if folder is None:
                raise ConfigError(
                    f"disk_cache_bytes={self.disk_cache_bytes} bounds the files in disk_cache_dir, which is not given; "
                    "name a folder, or leave it out"
                )
        for name in ("chunked_prefill_size", "streaming_prefill_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 16, 1_000_000)
        if self.kv_tokens is not None:
            if isinstance(self.kv_tokens, str | float):
                raise ConfigError(
                    f"kv_tokens counts tokens, as in kv_tokens=65536, got {self.kv_tokens!r}; kv_memory takes bytes, "
                    "as in kv_memory=8 * 2**30, or a share of what is free, as in kv_memory=0.5"
                )
            check_whole("kv_tokens", self.kv_tokens, self.page_size, 2**40)
        _kv_memory(self.kv_memory, self.kv_tokens)
        if self.seed is not None:
            check_whole("seed", self.seed, 0, 2**63 - 1)
        for name in ("enable_prefix_cache", "tree_attention", "deterministic", "force_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not self.enable_prefix_cache and (self.host_cache_bytes or folder is not None):
            raise ConfigError(
                "host_cache_bytes and disk_cache_dir keep what leaves the prefix cache, and with "
                "enable_prefix_cache=False there is none; leave them out"
            )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most: longer prompts are split, so that decoding rows never wait long."""
        return self.chunked_prefill_size or LEAST_CHUNK

    @property
    def streaming_tokens(self) -> int:
        """Tokens of prompts in a step while somebody reads a stream: each of its tokens waits for a whole step."""
        return self.streaming_prefill_size or LEAST_CHUNK

    @classmethod
    def of(cls, model: str | Path | None, options: dict[str, object]) -> EngineConfig:
        """A config from keyword options; None leaves one at its default. Raises ConfigError for an unknown one, naming
        those that exist."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                said = hint(name, ENGINE, known) or f"; it has {', '.join(known)}"
                raise ConfigError(f"Engine has no option {name!r}{said}")
        given = {name: value for name, value in options.items() if value is not None}
        return cls(model=model, **given)  # type: ignore[arg-type]  # __post_init__ checks the values


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _kv_memory(value: object, kv_tokens: int | None) -> None:
    if value is None:
        return
    if kv_tokens is not None:
        raise ConfigError("give kv_tokens or kv_memory, not both: either sizes the pool")
    is_share = isinstance(value, float) and 0.0 < value <= 1.0
    is_bytes = isinstance(value, int) and not isinstance(value, bool) and value > 1
    if not (is_share or is_bytes):
        hint = "; write 8 GiB as 8 * 2**30" * isinstance(value, str)
        raise ConfigError(f"kv_memory must be a share above 0.0 and up to 1.0, or bytes, got {value!r}{hint}")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigError, where an option is no whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float, unit: str = "") -> None:
    """Raises ConfigError, where an option is no number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}{unit and ' ' + unit}, got {value!r}")
