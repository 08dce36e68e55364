"""Runs the model over one ragged batch a step. Owns the model and its KV pool; knows pages by id, and no requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.ops import Ops, Weight, ops_for
from niwaki.kernels.plan import (
    MAX_DECODE_TOKENS,
    AttentionPlan,
    Spans,
    make_plan,
    next_plan,
)
from niwaki.kernels.segments import Int32s
from niwaki.kernels.shared_prefix import costs_for
from niwaki.kernels.small_kv import knows_e4m3
from niwaki.kernels.tile_attention import can_tile, longest_single
from niwaki.kernels.transfer import on_device
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import ConfigError
from niwaki.runtime.checkpoint.loader import open_checkpoint, read_model_folder
from niwaki.runtime.forward.parts import Share, SideBySide, divided
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.decoder import Decoder
from niwaki.runtime.models.projection import Source
from niwaki.runtime.models.weights import expected_tensors

if TYPE_CHECKING:
    from niwaki.kernels.triton.plan import BatchShape
    from niwaki.runtime.forward.graphs import DecodeGraphs
    from niwaki.runtime.forward.pieces import PieceGraphs

log = logging.getLogger("niwaki.engine")

# Multiply-adds of a step below which torch is held to one thread: 20 to 40 ms of work. Its threads wait for each other
# actively, so on a machine that also does something else each of a step's 50 products may lose a time slice of 8 ms.
MIN_PARALLEL_WORK = 2_000_000_000

# What of a step is worth a thread: multiply-adds, some milliseconds of work, and tokens: of few of them a product is
# mostly reading weights, which each part does anew.
PART_WORK = 1_200_000_000
PART_TOKENS = 32
# Multiply-adds of a product in the time of one of attention, measured on L15.
PRODUCT_SPEED = 4.0

MAX_GPU_HEAD = 256  # channels

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Row(msgspec.Struct, frozen=True, gc=False):  # one for each request of a step: a dataclass takes 8 times as long
    """One request's part of a step: q >= 1 new tokens behind `start` tokens whose keys and values are cached."""

    token_ids: Int32s  # [q]
    start: int
    page_ids: Sequence[int]  # its page table, covering start + q tokens
    num_logits: int = 1  # the last positions whose logits are wanted; 0 for a prefill chunk that is not the last

    @property
    def end(self) -> int:
        """Tokens that are computed when it is."""
        return self.start + len(self.token_ids)

    def with_guess(self, guess: Int32s) -> Row:
        """Longer by what may follow, with logits for each of it."""
        if not len(guess):
            return self
        ids = np.concatenate([self.token_ids, guess])
        return msgspec.structs.replace(self, token_ids=ids, num_logits=self.num_logits + len(guess))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows as arrays."""

    token_ids: Int32s  # [tokens]
    spans: Spans
    wanted: npt.NDArray[np.int64] | None  # indices of the tokens whose logits are wanted; None for all
    # The tokens where they were drawn, on the runner's device: `token_ids` then says only how many they are.
    drawn: torch.Tensor | None = None  # int64 [tokens]
    as_computed: bool = False  # logits may be bfloat16, where the model's are that

    def ids_on(self, device: torch.device) -> torch.Tensor:
        """The tokens as int32."""
        return torch.from_numpy(self.token_ids).to(device) if self.drawn is None else self.drawn.to(torch.int32)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """Raises ValueError where num_logits is not from 0 to q."""
        parts = [row.token_ids for row in rows]
        spans = Spans.of_columns([row.start for row in rows], list(map(len, parts)), [row.page_ids for row in rows])
        ids = np.concatenate(parts)
        return cls(ids, spans, _wanted(rows, len(ids)))


class Runner:
    """A loaded model. `forward` and `copy_pages` are called by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], Weight],
        *,
        device: str = "cpu",
        dtype: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        num_pages: int,
        page_size: int = 16,
        tree_attention: bool = True,
        cuda_graphs: bool = True,
        ops: Ops | None = None,
    ) -> None:
        """`read(name)` gives each tensor of `expected_tensors(config)`; it is converted to `dtype`. `weights`: the kind
        of codes that products keep, where theirs do not come in codes; "auto": none. Without `tree_attention` every row
        reads all its keys by itself; without `cuda_graphs` a GPU gets its kernels one by one. `ops`: other kernels than
        the device's.

        Raises:
            ConfigError: an unknown device or dtype, heads that the GPU kernels cannot take, or a `kv_dtype` that is
                not there.
        """
        wanted = config.dtype if dtype == "auto" else dtype
        if wanted not in TORCH_DTYPES:
            raise ConfigError(f"dtype must be auto, {' or '.join(TORCH_DTYPES)}, got {dtype!r}")
        self._device = resolve_device(device)
        refuse_wide_heads(config.head_dim, self._device)
        torch_dtype = TORCH_DTYPES[wanted]
        self.config = config
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = wanted
        if kv_dtype != "auto":
            refuse_small_cache(config, wanted, kv_dtype, self._device)
        self.kv_bytes_per_token = config.kv_bytes_per_token(wanted, kv_dtype)
        chosen = ops or ops_for(self._device)
        self._shares = tree_attention
        self._is_on_device = chosen.reads_device_plan
        shares_here = tree_attention and not self._is_on_device and self._device.type == "cpu"
        self._costs = (
            costs_for(config.num_heads, config.num_kv_heads, config.head_dim, page_size, torch_dtype)
            if shares_here
            else None
        )
        is_plain = ops is None and self._device.type == "cpu" and kv_dtype == "auto"
        has_tiles = is_plain and can_tile(torch_dtype, page_size, config.head_dim)
        self._longest_paged = longest_single if has_tiles else MAX_DECODE_TOKENS
        self._num_weights = sum(math.prod(shape) for shape in expected_tensors(config).values())
        attended = 2 * config.num_layers * config.num_heads * config.head_dim  # multiply-adds for a token and a key
        self._keys_per_token = self._num_weights / attended / PRODUCT_SPEED
        self._model = Decoder(
            config,
            Source(read, self._device, torch_dtype, weights),
            num_pages=num_pages,
            page_size=page_size,
            kv_dtype=kv_dtype,
            ops=chosen,
        )
        self._has_any_size = self._model.has_any_size
        self._kept: tuple[Spans, AttentionPlan] | None = None  # of the last step, where its spans may come again
        self._side_by_side: SideBySide | None = None
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        if cuda_graphs and self.is_on_gpu:
            from niwaki.runtime.forward.graphs import DecodeGraphs  # load Triton, which CPUs do without
            from niwaki.runtime.forward.pieces import PieceGraphs
            from niwaki.runtime.forward.recording import Recorder

            blank, recorder = make_plan((), page_size=page_size, num_pages=num_pages), Recorder(self._device)
            self._graphs = DecodeGraphs(self._model, self._device, blank, recorder)
            self._pieces = PieceGraphs(self._model, self._device, blank, recorder)

    @property
    def is_on_gpu(self) -> bool:
        return self._is_on_device and self._device.type == "cuda"

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        num_pages: int,
        page_size: int = 16,
        tree_attention: bool = True,
        ops: Ops | None = None,
    ) -> Runner:
        """A runner of a Hugging Face folder.

        Raises:
            ModelError: the folder is missing, incomplete, damaged or of an unsupported architecture.
            ConfigError: an unknown device or dtype.
        """
        folder = read_model_folder(model_dir)
        target = resolve_device(device)
        return cls(
            folder.config,
            open_checkpoint(folder, target).weight,
            device=device,
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
            num_pages=num_pages,
            page_size=page_size,
            tree_attention=tree_attention,
            ops=ops,
        )

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtype: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        num_pages: int,
        tree_attention: bool = True,
        ops: Ops | None = None,
    ) -> Runner:
        """A runner of seeded random weights, for tests and benchmarks: matrices scaled to keep activations near 1."""
        shapes = expected_tensors(config)
        generator = torch.Generator().manual_seed(seed)

        def read(name: str) -> torch.Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(shapes[name])
            return torch.randn(shapes[name], generator=generator).div_(shapes[name][-1] ** 0.5)

        return cls(
            config,
            read,
            device=device,
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
            num_pages=num_pages,
            tree_attention=tree_attention,
            ops=ops,
        )

    def reserve(self, tokens: int) -> None:
        """Take the memory of a step of so many tokens now, where graphs are recorded: each keeps what it writes to, so
        what a larger step then grows out of would never be let go."""
        if self._graphs is not None:
            self._model.buffers(tokens)

    def forward(self, rows: Sequence[Row] | Batch) -> torch.Tensor:
        """Run one step: store the keys and values of all new tokens, return the logits asked for.

        Returns:
            float32 [sum of num_logits, vocab_size], in row order, positions ascending within a row; bfloat16 where the
            batch allows it and they are that before anything is done to them.

        Raises:
            ValueError: a row is empty, its pages do not cover it or are outside the pool, num_logits is not from 0 to
                q, or a position is beyond the model's context. Nothing was stored then.
            IndexError: a token id is outside the vocabulary.
        """
        if not isinstance(rows, Batch):
            if not rows:
                return torch.empty((0, self.config.vocab_size), dtype=torch.float32)
            rows = Batch.of(rows)
        num_tokens, threads = len(rows.token_ids), torch.get_num_threads()
        work = num_tokens * self._num_weights
        if not self._has_any_size and self._device.type == "cpu":
            parts = min(threads, num_tokens // PART_TOKENS, work // PART_WORK)
            if parts > 1:
                with OneTorchThread():
                    return self._forward_in_parts(rows, parts)
        plan = self._plan(rows.spans)
        if self._is_on_device:
            return self._forward_on_device(rows, plan)
        token_ids = rows.ids_on(self._device)
        may_be_parallel = threads == 1 or (work >= MIN_PARALLEL_WORK and not self._has_any_size)
        with nullcontext() if may_be_parallel else OneTorchThread():
            return self._model.forward(token_ids, plan, rows.wanted, threads=threads, as_computed=rows.as_computed)

    def _plan(self, spans: Spans) -> AttentionPlan:
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is spans:
            plan = next_plan(kept[1], spans, num_pages=self.num_pages, longest_paged=self._longest_paged)
        else:
            plan = make_plan(
                spans,
                page_size=self.page_size,
                num_pages=self.num_pages,
                longest_paged=self._longest_paged,
                costs=self._costs,
            )
        if not self._is_on_device:
            self._kept = spans, plan
        return plan

    def _forward_in_parts(self, batch: Batch, most: int) -> torch.Tensor:
        if self._side_by_side is None:
            self._side_by_side = SideBySide(self._model)
        shares = []
        ids = batch.ids_on(self._device)
        for tokens, spans in divided(batch.spans, most, self._keys_per_token):
            wanted = batch.wanted
            if wanted is not None:
                wanted = wanted[(wanted >= tokens.start) & (wanted < tokens.stop)] - tokens.start
            shares.append(Share(ids[tokens], self._plan(spans), wanted))
        return self._side_by_side.forward(shares)

    def _forward_on_device(self, batch: Batch, plan: AttentionPlan) -> torch.Tensor:
        """The step by GPU kernels, which address memory by ids and positions unchecked: so they are checked here, but
        for ids that were drawn from this model's vocabulary."""
        from niwaki.kernels.triton.plan import lay_out, packed, plan_in  # an extra: only those who have a GPU load it

        spans, ids = batch.spans, batch.token_ids
        if batch.drawn is None and (ids.min() < 0 or ids.max() >= self.config.vocab_size):
            raise IndexError(f"a token id is outside the vocabulary of {self.config.vocab_size}")
        if plan.positions.max() >= (most := min(self.config.context_length, self.num_pages * self.page_size)):
            raise ValueError(f"position {plan.positions.max()} is beyond the {most} positions of the model")
        arrays, shape = lay_out(
            spans.starts,
            spans.counts,
            plan.page_table,
            ids.astype(np.int32, copy=False),
            plan.positions,
            plan.slots,
            page_size=self.page_size,
            group=self.config.num_heads // self.config.num_kv_heads,
            shares=self._shares,
        )
        logits = self._forward_recorded(batch, arrays, shape)
        if logits is not None:
            return logits
        half = plan_in(on_device(packed(arrays), self._device), shape)
        if batch.drawn is not None:
            half.token_ids.copy_(batch.drawn)
        return self._model.forward(half.token_ids, replace(plan, on_device=half), batch.wanted)

    def _forward_recorded(self, batch: Batch, arrays: Mapping[str, Int32s], shape: BatchShape) -> torch.Tensor | None:
        """The step through CUDA graphs; None for one that there are none for, or none can be recorded."""
        logits = None
        if self._graphs is not None and batch.wanted is None and len(batch.token_ids) == len(batch.spans):
            try:
                with torch.inference_mode():
                    logits = self._graphs.forward(arrays, shape, batch.drawn)
            except RuntimeError as error:
                self._graphs = None
                _tell_given_up("steps of single tokens", error)
        if logits is None and self._pieces is not None:
            try:
                with torch.inference_mode():
                    logits = self._pieces.forward(arrays, shape, batch.wanted, batch.drawn)
            except RuntimeError as error:
                self._pieces = None
                _tell_given_up("steps of few tokens", error)
        return logits

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Carry out copies on write, in order, in all layers."""
        self._model.copy_pages([(copy.src, copy.dst, copy.num_tokens) for copy in copies])

    def host_planes(self) -> npt.NDArray[np.uint8] | None:
        """The pool's memory as bytes [layers x 2, pages, bytes of a page]; None where it is a device's."""
        return self._model.host_planes()

    def read_pages(self, page_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The keys and values of whole pages as bytes [len(page_ids), page_size * kv_bytes_per_token]."""
        return self._model.read_pages(page_ids)

    def write_pages(self, page_ids: Sequence[int], contents: Iterable[npt.NDArray[np.uint8]]) -> int:
        """Put back what `read_pages` gave, of this model in this dtype. Returns how many pages that were."""
        return self._model.write_pages(page_ids, contents)


def _tell_given_up(steps: str, error: RuntimeError) -> None:
    """What cannot be recorded can be launched. A device that is lost says so again when that is tried."""
    log.warning("no CUDA graphs for %s any more, which take longer now: %s", steps, error, exc_info=error)


class OneTorchThread:
    """torch's operators, called inside, take no second thread."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._threads)


def _wanted(rows: Sequence[Row], num_tokens: int) -> npt.NDArray[np.int64] | None:
    """Indices of the tokens whose logits are wanted; None for all."""
    counts = [row.num_logits for row in rows]
    if num_tokens == len(rows) and min(counts) == max(counts) == 1:
        return None  # every row decodes one token
    wanted: list[int] = []
    end = 0
    for row, count in zip(rows, counts, strict=True):
        if not 0 <= count <= len(row.token_ids):
            raise ValueError(f"num_logits must be from 0 to the row's {len(row.token_ids)} tokens, got {count}")
        end += len(row.token_ids)
        wanted.extend(range(end - count, end))
    return None if len(wanted) == num_tokens else np.array(wanted, np.int64)


def refuse_wide_heads(head_dim: int, device: torch.device) -> None:
    """Raises ConfigError where a head, as of latent attention, is wider than what GPU kernels hold in registers."""
    if device.type == "cuda" and head_dim > MAX_GPU_HEAD:
        raise ConfigError(f"heads of {head_dim} channels are wider than the {MAX_GPU_HEAD} of the GPU kernels; use cpu")


def refuse_small_cache(config: ModelConfig, dtype: str, kv_dtype: str, device: torch.device) -> None:
    """Raises ConfigError where a cache of 8 bits has no kernels."""
    if dtype != "bfloat16":
        raise ConfigError(f"kv_dtype={kv_dtype!r} wants dtype='bfloat16', got {dtype}")
    if config.latent is not None:
        what = f"{config.architecture}, whose cache is small by itself"
        raise ConfigError(f"kv_dtype={kv_dtype!r} is not there for {what}")
    if device.type == "cuda" and config.head_dim % 4:
        raise ConfigError(f"kv_dtype={kv_dtype!r} on a GPU wants heads of a multiple of 4, got {config.head_dim}")
    if kv_dtype == "fp8" and not knows_e4m3(device):
        raise ConfigError("kv_dtype='fp8' wants a GPU that knows e4m3 (Ada, Hopper or later); int8 is as small")


def resolve_device(device: str) -> torch.device:
    """auto is the CPU: the kernels for GPUs have been checked in Triton's interpreter alone, so one asks for them.

    Raises:
        ConfigError: no such device, or a GPU without Triton, or where that cannot start kernels.
    """
    has_gpu, has_kernels = torch.cuda.is_available(), find_spec("triton") is not None
    try:
        found = torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda, got {device!r}") from error
    if found.type == "cuda" and found.index not in (None, 0):
        raise ConfigError(f"device={device!r}: a GPU is chosen by CUDA_VISIBLE_DEVICES; then device='cuda' is that one")
    if found.type == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch sees no NVIDIA GPU here; use cpu, or a torch built for CUDA")
    if found.type == "cuda" and not has_kernels:
        raise ConfigError("device is cuda, but the kernels need Triton: pip install 'niwaki[gpu]'")
    if found.type == "cuda":
        check_triton()
    return torch.device(found.type)  # the current one of its kind


def check_triton() -> None:
    """Raises ConfigError where Triton cannot start kernels: it compiles what launches them, in C, and says so only when
    the first one is launched, behind a model that took minutes to load."""
    from triton.runtime.driver import driver

    try:
        driver.active.get_current_target()
    except Exception as error:
        raise ConfigError(
            f"device is cuda, but Triton cannot start kernels here: {type(error).__name__}: {error}. It needs a C "
            "compiler (gcc, clang, or what CC names) and Python's headers (python3-dev)"
        ) from error
