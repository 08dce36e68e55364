"""How many tokens the KV pool holds, a share of the memory that is left or so many bytes; and how many a step.

On a GPU what is left is counted before anything is loaded: free memory, less the weights, the activations of the
largest step and what CUDA's libraries and graphs take. A pool of that size never runs the device out of memory later,
because steps are admitted by pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from niwaki.kernels.tiles import has_matrix_unit
from niwaki.runtime.api import ConfigError
from niwaki.runtime.kv.host_memory import available_bytes, total_bytes
from niwaki.runtime.models.config import DTYPE_BYTES, ModelConfig
from niwaki.runtime.models.weights import expected_tensors
from niwaki.runtime.options.config import LEAST_CHUNK

# A laptop's user has other programs open, so a quarter; and a pool of more tokens than this, or than one whole context,
# helps no batch that a CPU can run.
HOST_SHARE = 0.25
MAX_HOST_TOKENS = 65_536
# A GPU is there for the model alone; the rest is for fragments of the allocator.
DEVICE_SHARE = 0.95
# Of a product's weight in codes, its share of scales included.
CODE_BYTES = {"int8": 1.05, "fp8": 1.05, "int4": 0.65}
LIBRARIES = 2 << 30  # bytes for cuBLAS, compiled kernels and graphs: a guess, not measured
# Weights of latent attention that are put together, to be laid out otherwise.
LATENT = ("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight")
NONE: Mapping[str, int] = {}

# Multiply-adds of a step on a CPU: some 100 ms on two cores. Whoever decodes waits so long for a step of prompts, and
# fewer and larger ones are sooner done: see docs/benchmarks.md.
STEP_WORK = 32_000_000_000
UNIT_STEP_WORK = 96_000_000_000  # the same where a matrix unit multiplies
MOST_CHUNK = 2048
# While somebody reads a stream, a step takes this share of it in prompts, but no fewer tokens than this, and as much
# less as they stand deep in their text (`keys_per_token`): docs/benchmarks.md has what that costs and brings.
STREAMING_SHARE = 16
LEAST_STREAMING = 64
# Multiply-adds of a product in the time of one of attention. niwaki-tiny, whose products are small, took 0.042 ms of
# processor time for a token, and 0.00004 ms more for each one before it, in pieces of 16 to 128 (2026-11-23, Zen 4).
PROMPT_SPEED = 1.5

# The same of a GPU, by arithmetic: some 130 ms at 500 TFLOP/s. A step of prompts is some ten launches a layer, 5 to 10
# ms of the host, and 512 tokens of a model of 0.6 billion weights are 1 ms of a GPU: it would wait for the host.
GPU_STEP_WORK = 32_000_000_000_000
GPU_CHUNKS = 2048, 8192
GPU_STREAMING_SHARE = 4

# Weights below which a step of a few tokens takes a CPU no longer than the host takes to plan it. Of niwaki-tiny, 5
# million, two rows take 0.56 ms and with four guesses each 0.72, of L15 1.39 and 1.48; by what whole texts take, a
# planned step costs the host some 0.4 ms more than one of a steady batch (EPYC, Zen 4, 2026-11-28).
SMALL_MODEL = 10_000_000

# Numbers of a step's logits, but for one row of each request: 523 rows of a vocabulary of 128,256, and a quarter of a
# gigabyte in float32. Whoever asks for the probabilities of a long prompt wants a row for each of its tokens.
STEP_LOGITS = 1 << 26

KvMemory = float | int | None  # a share of what is left (float), bytes (int), or the default share


def pool_tokens(
    config: ModelConfig,
    device: torch.device,
    dtype: str,
    kv_memory: KvMemory,
    *,
    weights: str = "auto",
    stored: Mapping[str, int] = NONE,
    kv_dtype: str = "auto",
    step_tokens: int,
    step_logits: int,
) -> int:
    """Tokens of a pool on `device`. `stored`: what weights take that come in codes, by `Checkpoint.code_bytes`.
    `step_tokens` and `step_logits`: of the largest step.

    Raises:
        ConfigError: the weights and one step do not fit the device.
    """
    is_gpu = device.type == "cuda"
    if isinstance(kv_memory, int):
        budget = kv_memory
    elif is_gpu:
        free, _ = torch.cuda.mem_get_info()
        needed = bytes_beside_pool(
            config, dtype, weights=weights, stored=stored, step_tokens=step_tokens, step_logits=step_logits
        )
        if needed >= free:
            raise ConfigError(
                f"the weights and one step take {needed / 2**30:.1f} GiB, the GPU has {free / 2**30:.1f} GiB free; "
                "use a smaller model, or a smaller chunked_prefill_size"
            )
        budget = int((free - needed) * (kv_memory or DEVICE_SHARE))
    else:
        budget = int(available_bytes() * (kv_memory or HOST_SHARE))
    tokens = budget // config.kv_bytes_per_token(dtype, kv_dtype)
    if kv_memory is None and not is_gpu:
        tokens = min(tokens, max(MAX_HOST_TOKENS, config.context_length))
    return max(tokens, min(config.context_length, 2048))


def check_pool(config: ModelConfig, device: torch.device, dtype: str, kv_dtype: str, tokens: int) -> None:
    """Raises ConfigError for a pool that a CPU's machine could never fill. One that is merely more than is left now may
    never be filled."""
    needed, there = tokens * config.kv_bytes_per_token(dtype, kv_dtype), total_bytes()
    if device.type == "cpu" and needed > there:
        raise ConfigError(
            f"a pool of {tokens} tokens takes {needed / 2**30:.1f} GiB, this machine has {there / 2**30:.1f} GiB; "
            f"lower kv_tokens or kv_memory to {there // config.kv_bytes_per_token(dtype, kv_dtype)} tokens at most"
        )


def chunk_tokens(config: ModelConfig, device: torch.device, dtype: str = "auto") -> int:
    """Tokens of a step at most, where nothing is said: the least number of the device, and more of a small model."""
    num_weights = _num_weights(config)
    if device.type != "cpu":
        least, most = GPU_CHUNKS
        return max(least, min(GPU_STEP_WORK // num_weights // 256 * 256, most))
    has_unit = (config.dtype if dtype == "auto" else dtype) == "bfloat16" and has_matrix_unit()
    work = UNIT_STEP_WORK if has_unit else STEP_WORK
    return max(LEAST_CHUNK, min(work // num_weights // 256 * 256, MOST_CHUNK))


def streaming_tokens(config: ModelConfig, device: torch.device, dtype: str = "auto") -> int:
    """Tokens of prompts in a step while a stream is read."""
    if device.type != "cpu":
        return chunk_tokens(config, device, dtype) // GPU_STREAMING_SHARE
    return max(LEAST_STREAMING, chunk_tokens(config, device, dtype) // STREAMING_SHARE)


def keys_per_token(config: ModelConfig, device: torch.device) -> float | None:
    """How many keys a prompt's token attends to in the time of its products. None where keys cost next to nothing."""
    if device.type != "cpu":
        return None
    num_weights = _num_weights(config)
    attended = 2 * config.num_layers * config.num_heads * config.head_dim  # multiply-adds for a token and a key
    return num_weights / attended / PROMPT_SPEED


def is_small(config: ModelConfig, device: torch.device) -> bool:
    """Whether a step of a few tokens takes the device no longer than planning one takes the host."""
    return device.type == "cpu" and _num_weights(config) < SMALL_MODEL


def _num_weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def most_logits(vocab_size: int) -> int:
    """Rows of logits of a step, but for one of each request."""
    return max(1, STEP_LOGITS // vocab_size)


def bytes_beside_pool(
    config: ModelConfig,
    dtype: str,
    *,
    weights: str = "auto",
    stored: Mapping[str, int] = NONE,
    step_tokens: int,
    step_logits: int,
) -> int:
    """Weights, activations and libraries on a GPU."""
    item = DTYPE_BYTES[config.dtype if dtype == "auto" else dtype]
    qkv = (config.num_heads + config.kv_halves * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + 2 * qkv + 3 * config.intermediate_size
    if config.experts is not None:
        width += config.experts.per_token * (3 * config.experts.width + config.hidden_size)
    kept = _weight_bytes(config, item, weights, stored)
    # Activations twice: their memory is taken when the model is loaded (`Runner.reserve`), and as much again is for
    # what kernels make on the way. The logits are there in the model's type and in float32, which sampling may copy.
    return kept + 2 * step_tokens * width * item + step_logits * config.vocab_size * (item + 8) + LIBRARIES


def _weight_bytes(config: ModelConfig, item: int, weights: str, stored: Mapping[str, int]) -> int:
    turned = LATENT if config.latent is not None else ()
    kept = 0.0
    for name, shape in expected_tensors(config).items():
        # Embeddings are looked up and routers compared: none is kept in codes, nor are experts in float32.
        is_expert = ".experts." in name and not name.endswith("_bias")
        is_product = (len(shape) == 2 or is_expert) and not any(part in name for part in ("embed", "lm_head"))
        is_product = is_product and not name.endswith(f"{config.names.router}.weight")
        is_product = is_product and (not is_expert or item == DTYPE_BYTES["bfloat16"])
        if is_product and item == DTYPE_BYTES["bfloat16"] and name in stored and not name.endswith(turned):
            kept += stored[name]
        else:
            kept += math.prod(shape) * (CODE_BYTES[weights] if is_product and weights != "auto" else item)
    if weights != "auto":  # of the head, beside the tensor that they are made from
        kept += config.vocab_size * config.hidden_size * CODE_BYTES["int8"]
    return math.ceil(kept)
