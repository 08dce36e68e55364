"""From a config to a backend that runs: reads the model's folder, sizes the pool, starts the engine's thread."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from niwaki.kernels.compile_notice import saying_when_long
from niwaki.kernels.fixed import FixedOps
from niwaki.runtime.api import BackendInfo, ConfigError, ModelError
from niwaki.runtime.checkpoint import bundled
from niwaki.runtime.checkpoint.loader import ModelFolder, open_checkpoint, read_model_folder
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.checkpoint.weights_digest import weights_fingerprint
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.forward.runner import Runner, resolve_device
from niwaki.runtime.host.local import LocalBackend
from niwaki.runtime.kv.cache_file import Layout
from niwaki.runtime.kv.memory import (
    check_pool,
    chunk_tokens,
    is_small,
    keys_per_token,
    most_logits,
    pool_tokens,
    streaming_tokens,
)
from niwaki.runtime.kv.tiers import DiskStore, MemoryStore, PageStore, Tiers
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.config import DISK_CACHE_BYTES, EngineConfig
from niwaki.runtime.requests.drafts import DRAFT_ROWS


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A backend whose thread runs, and what was found out on the way. `config` says what was left to the model."""

    config: EngineConfig
    tokenizer: Tokenizer
    backend: LocalBackend
    info: BackendInfo
    layout: Layout
    vocab_size: int  # rows of logits: may exceed the tokenizer's own, where a model pads its embeddings
    pool_tokens: int


def load(config: EngineConfig) -> LoadedEngine:
    """Raises ConfigError, ModelError: in one line."""
    folder = Path(bundled.MODEL_DIR if config.model is None else config.model)
    contents = read_model_folder(folder)
    tokenizer = Tokenizer(folder)
    _check(config, contents, tokenizer)
    config = _with_piece_sizes(config, contents)
    num_pages = _num_pages(config, contents)
    runner = _runner(config, folder, num_pages)
    weights = weights_fingerprint(folder)
    vocabulary = Vocabulary(
        tokenizer.token_bytes, frozenset(runner.config.eos_ids), runner.config.vocab_size, tokenizer.special_ids
    )
    boundaries = Boundaries(vocabulary, tokenizer.plain_ids)
    layout = _layout(config, runner, weights)
    info = BackendInfo(
        "niwaki-tiny" if config.model is None else folder.name,
        runner.config.context_length,
        contents.generation_defaults,
        weights=weights.hex(),
    )
    device = resolve_device(config.device)
    core = EngineCore(
        runner,
        tokenizer,
        config,
        num_pages,
        _tiers(config, layout),
        boundaries=boundaries,
        runs_ahead=runner.is_on_gpu,
        keys_per_token=keys_per_token(contents.config, device),
        draft_rows=1 if is_small(contents.config, device) else DRAFT_ROWS,
    )
    size = num_pages * config.page_size  # of the pool, in tokens
    backend = LocalBackend(
        core,
        tokenizer,
        ConstraintCompiler(vocabulary),
        info,
        pool_tokens=size,
        seed=config.seed,
        boundaries=boundaries,
    )
    return LoadedEngine(config, tokenizer, backend, info, layout, runner.config.vocab_size, size)


def _check(config: EngineConfig, contents: ModelFolder, tokenizer: Tokenizer) -> None:
    """That the parts belong together, before anything large is read."""
    num_tokens, vocab_size = len(tokenizer.token_bytes), contents.config.vocab_size
    if num_tokens > vocab_size:
        raise ModelError(
            f"{contents.path / 'tokenizer.json'} has {num_tokens} tokens, and the vocab_size of config.json is "
            f"{vocab_size}; the two are of different models"
        )
    if config.deterministic and resolve_device(config.device).type != "cpu":
        raise ConfigError("deterministic=True runs on the CPU only: give device='cpu'")
    if config.deterministic and contents.config.latent is not None:
        raise ConfigError(f"deterministic=True is not there for {contents.config.architecture}")


def _with_piece_sizes(config: EngineConfig, contents: ModelFolder) -> EngineConfig:
    """How long the pieces of prompts are, where that was left to the model."""
    device = resolve_device(config.device)
    if config.chunked_prefill_size is None:
        config = replace(config, chunked_prefill_size=chunk_tokens(contents.config, device, config.dtype))
    if config.streaming_prefill_size is None:
        config = replace(config, streaming_prefill_size=streaming_tokens(contents.config, device, config.dtype))
    return config


def _num_pages(config: EngineConfig, contents: ModelFolder) -> int:
    """Of the KV pool. Raises ConfigError: memory has no room for as many."""
    tokens = _wanted_tokens(config, contents)
    check_pool(contents.config, resolve_device(config.device), config.dtype, config.kv_dtype, tokens)
    return -(-tokens // config.page_size)


def _runner(config: EngineConfig, folder: Path, num_pages: int) -> Runner:
    """The loaded model, its memory taken and its kernels compiled."""
    runner = Runner.load(
        folder,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        num_pages=num_pages,
        page_size=config.page_size,
        tree_attention=config.tree_attention and not config.deterministic,
        ops=FixedOps() if config.deterministic else None,
    )
    runner.reserve(config.step_tokens + config.max_running_requests)
    if runner.is_on_gpu:
        from niwaki.runtime.forward.warm_up import warm_up  # loads Triton, which CPUs do without

        with saying_when_long("niwaki: compiling kernels for this GPU (once; the first time takes a minute) ..."):
            warm_up(runner)
    return runner


def _wanted_tokens(config: EngineConfig, contents: ModelFolder) -> int:
    """Tokens of the KV pool: as many as were asked for, or as memory has room for."""
    if config.kv_tokens:
        return config.kv_tokens
    device = resolve_device(config.device)
    of_prompts = min(config.step_tokens, most_logits(contents.config.vocab_size))
    return pool_tokens(
        contents.config,
        device,
        config.dtype,
        config.kv_memory,
        weights=config.weights,
        stored=open_checkpoint(contents, device).code_bytes() if contents.config.quantization else {},
        kv_dtype=config.kv_dtype,
        step_tokens=config.step_tokens + config.max_running_requests,
        step_logits=of_prompts + config.max_running_requests,
    )


def _layout(config: EngineConfig, runner: Runner, weights: bytes) -> Layout:
    """Of a saved page. Whatever changes its numbers is in the fingerprint."""
    small = {"weights": config.weights, "kv": config.kv_dtype}
    kept = "".join(f" {what} {kind}" for what, kind in small.items() if kind != "auto")
    said = f"{runner.dtype} {config.page_size}{kept}{' deterministic' if config.deterministic else ''}"
    fingerprint = hashlib.blake2b(weights + said.encode(), digest_size=16).digest()
    return Layout(fingerprint, config.page_size, config.page_size * runner.kv_bytes_per_token)


def _tiers(config: EngineConfig, layout: Layout) -> Tiers | None:
    """The stores that the config names, in order; None without any."""
    stores: list[PageStore] = []
    if config.host_cache_bytes:
        stores.append(MemoryStore(config.host_cache_bytes))
    if config.disk_cache_dir is not None:
        try:
            stores.append(DiskStore(Path(config.disk_cache_dir), config.disk_cache_bytes or DISK_CACHE_BYTES))
        except (OSError, ValueError) as error:  # a NUL in its name is the latter
            raise ConfigError(f"disk_cache_dir {config.disk_cache_dir} cannot be used: {error}") from error
    return Tiers(stores, layout.fingerprint, layout.page_size) if stores else None
