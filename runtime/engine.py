"""The engine for users: loads a model folder, sizes the pool, and answers in plain dicts, as SGLang's engine does.

Programs run on its `backend`; `generate` is for those who want no language around it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from niwaki.kernels.compile_notice import announce_compiling
from niwaki.kernels.fixed import FixedOps
from niwaki.runtime.api import (
    BackendInfo,
    ConfigError,
    Delta,
    EngineStopped,
    Generation,
    ModelError,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Segment,
)
from niwaki.runtime.checkpoint import bundled
from niwaki.runtime.checkpoint.loader import open_checkpoint, read_model_folder
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.checkpoint.weights_digest import weights_fingerprint
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.forward.runner import Runner, resolve_device
from niwaki.runtime.host.forked import check_not_forked
from niwaki.runtime.host.local import LocalBackend
from niwaki.runtime.kv.cache_file import Layout
from niwaki.runtime.kv.memory import check_pool, chunk_tokens, pool_tokens
from niwaki.runtime.kv.tiers import DiskStore, MemoryStore, PageStore, Tiers
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.from_dict import options_from_dict, spelling_of
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.pictures.picture import Picture
from niwaki.runtime.pictures.tree_page import draw
from niwaki.runtime.pictures.tree_view import DEFAULT_NODES, TreeNode, TreeView
from niwaki.runtime.requests.results import Result, result_of


class Engine:
    """A model in this process.

    `Engine()` runs the bundled model, `Engine("path")` any Hugging Face folder of a supported architecture. Options
    are those of `EngineConfig`; an unknown one is a ConfigError. A context manager; or call `shutdown()`.

    Raises:
        ConfigError, ModelError: at construction, in one line. EngineStopped: in a fork of a process that has an engine.
    """

    def __init__(self, model: str | Path | None = None, **options: object) -> None:
        check_not_forked()
        announce_compiling()
        self.config = EngineConfig.of(model, options)
        is_bundled = self.config.model is None
        folder = Path(bundled.MODEL_DIR if self.config.model is None else self.config.model)
        contents = read_model_folder(folder)
        self.tokenizer = Tokenizer(folder)
        num_tokens, vocab_size = len(self.tokenizer.token_bytes), contents.config.vocab_size
        if num_tokens > vocab_size:
            raise ModelError(
                f"{folder / 'tokenizer.json'} has {num_tokens} tokens, and the vocab_size of config.json is "
                f"{vocab_size}; the two are of different models"
            )
        device = resolve_device(self.config.device)
        if self.config.deterministic and device.type != "cpu":
            raise ConfigError("deterministic=True runs on the CPU only: give device='cpu'")
        if self.config.deterministic and contents.config.latent is not None:
            raise ConfigError(f"deterministic=True is not there for {contents.config.architecture}")
        if self.config.chunked_prefill_size is None:
            self.config = replace(self.config, chunked_prefill_size=chunk_tokens(contents.config, device))
        page_size = self.config.page_size
        tokens = self.config.kv_tokens or pool_tokens(
            contents.config,
            device,
            self.config.dtype,
            self.config.kv_memory,
            weights=self.config.weights,
            stored=open_checkpoint(contents, device).code_bytes() if contents.config.quantization else {},
            kv_dtype=self.config.kv_dtype,
            step_tokens=self.config.step_tokens + self.config.max_running_requests,
            step_logits=self.config.max_running_requests,
        )
        check_pool(contents.config, device, self.config.dtype, self.config.kv_dtype, tokens)
        num_pages = -(-tokens // page_size)
        runner = Runner.load(
            folder,
            device=self.config.device,
            dtype=self.config.dtype,
            weights=self.config.weights,
            kv_dtype=self.config.kv_dtype,
            num_pages=num_pages,
            page_size=page_size,
            tree_attention=self.config.tree_attention and not self.config.deterministic,
            ops=FixedOps() if self.config.deterministic else None,
        )
        model_config = runner.config
        self._vocab_size = model_config.vocab_size  # may exceed the tokenizer's: some models pad their embeddings
        weights = weights_fingerprint(folder)
        self._info = BackendInfo(
            "niwaki-tiny" if is_bundled else folder.name,
            model_config.context_length,
            contents.generation_defaults,
            weights=weights.hex(),
        )
        vocabulary = Vocabulary(
            self.tokenizer.token_bytes,
            frozenset(model_config.eos_ids),
            model_config.vocab_size,
            self.tokenizer.special_ids,
        )
        small = {"weights": self.config.weights, "kv": self.config.kv_dtype}
        kept = "".join(f" {what} {kind}" for what, kind in small.items() if kind != "auto")
        said = f"{runner.dtype} {page_size}{kept}{' deterministic' if self.config.deterministic else ''}"
        self._layout = Layout(
            hashlib.blake2b(weights + said.encode(), digest_size=16).digest(),
            page_size,
            page_size * runner.kv_bytes_per_token,
        )
        boundaries = Boundaries(vocabulary, self.tokenizer.plain_ids)
        self.backend = LocalBackend(
            EngineCore(
                runner,
                self.tokenizer,
                self.config,
                num_pages,
                _tiers(self.config, self._layout),
                boundaries=boundaries,
                runs_ahead=runner.is_on_gpu,
            ),
            self.tokenizer,
            ConstraintCompiler(vocabulary),
            self._info,
            pool_tokens=num_pages * page_size,
            seed=self.config.seed,
            boundaries=boundaries,
        )
        self._pool_tokens = num_pages * page_size
        # Also at the interpreter's end: a thread inside torch while the process goes down aborts it.
        self._close = weakref.finalize(self, self.backend.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Result | list[Result] | Iterator[Result]:
        """Generate from one prompt or a list of them, all in one continuous batch.

        Each result is `{"text", "output_ids", "meta_info"}` in the order of the prompts (n > 1: n results a prompt).
        `logprob_start_len` is the first prompt position whose log-probability is wanted (-1: none). With `stream`, an
        iterator of results whose text grows; the last one is as it is without `stream`.

        Raises:
            RequestError, ConstraintError, CapacityError: before anything runs, naming the field or the size needed.
        """
        asked = (return_logprob, logprob_start_len, top_logprobs_num)
        running = self._start(prompt, sampling_params, input_ids, *asked, stream=stream)
        return self._stream(running) if stream else running.results()

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Result | list[Result] | AsyncIterator[Result]:
        """`generate` without blocking the event loop. Cancelling the task ends what it started."""
        asked = (return_logprob, logprob_start_len, top_logprobs_num)
        running = self._start(prompt, sampling_params, input_ids, *asked, stream=stream)
        if stream:
            return self._astream(running)
        try:
            for generation in running.generations:
                await _finished(generation)
        except asyncio.CancelledError:
            running.cancel()
            raise
        return running.results()

    @property
    def vocab_size(self) -> int:
        """Rows of logits: token ids are below this. May exceed the tokenizer's own, where a model pads it."""
        return self._vocab_size

    def stats(self) -> Mapping[str, float]:
        """Tokens prefilled, cached and generated since the start; pages free, in the tree and held; queues."""
        return self.backend.usage()

    def tree(self, *, namespace: str = "", limit: int = DEFAULT_NODES) -> TreeView:
        """The radix tree as it stands, as data: at most `limit` nodes, those used last first."""
        nodes = self.backend.outline(limit, namespace)
        return TreeView(self._info.model, [TreeNode.of(node, self.tokenizer) for node in nodes], self.stats())

    def show_tree(self, path: str | os.PathLike[str] | None = None, *, namespace: str = "") -> Picture:
        """The radix tree as a page that a notebook shows; with `path`, also written there as one HTML file."""
        picture = draw(self.tree(namespace=namespace))
        if path is not None:
            picture.save(path)
        return picture

    def watch_tree(self, *, namespace: str = "") -> AbstractContextManager[None]:
        """Draws the radix tree in the terminal, four times a second, while a `with` block runs."""
        from niwaki.runtime.pictures.tree_terminal import watching  # loads rich

        return watching(lambda: self.tree(namespace=namespace))

    def flush_cache(self) -> bool:
        """Forget every cached prefix that nothing runs on."""
        return self.backend.flush()

    def save_cache(self, path: str | Path) -> int:
        """Write the prefix cache to a file, for `load_cache` of an engine with the same model, dtype and page size.

        Returns the number of tokens. Nothing else runs meanwhile; on an error the file is as it was.

        Raises:
            OSError: it cannot be written.
        """
        return self.backend.save_cache(Path(path), self._layout)

    def load_cache(self, path: str | Path) -> int:
        """Take up a cache that `save_cache` wrote, as far as the pool has free pages. Returns the number of tokens.

        A damaged file is used up to the damage, with one warning.

        Raises:
            ConfigError: it is no saved cache, or one of another model, dtype or page size.
            OSError: it cannot be read.
        """
        return self.backend.load_cache(Path(path), self._layout)

    def get_server_info(self) -> dict[str, object]:
        """The model and the engine's settings, resolved."""
        return {
            "model": self._info.model,
            "context_length": self._info.context_length,
            "kv_tokens": self._pool_tokens,
            "kv_bytes_per_token": self._layout.page_bytes // self.config.page_size,
            "max_running_requests": self.config.max_running_requests,
            "page_size": self.config.page_size,
            "schedule_policy": self.config.schedule_policy,
            "enable_prefix_cache": self.config.enable_prefix_cache,
            "deterministic": self.config.deterministic,
        }

    def shutdown(self) -> None:
        """End the engine's thread. What still runs fails with EngineStopped. Calling it twice is allowed."""
        self._close()

    # -- between dicts and the backend --------------------------------------------------------------------------------

    def _start(
        self,
        prompt: str | Sequence[str] | None,
        sampling_params: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        return_logprob: bool,
        logprob_start_len: int,
        top_logprobs_num: int,
        *,
        stream: bool,
    ) -> _Running:
        prompts, is_batch = self._prompts(prompt, input_ids)
        if stream and is_batch:
            raise RequestError("stream=True takes one prompt; start several streams for several prompts")
        params = self._all_params(sampling_params, len(prompts), return_logprob, top_logprobs_num)
        logits_from = max(0, logprob_start_len - 1) if return_logprob and logprob_start_len >= 0 else None
        self._check_start(logprob_start_len, prompts)
        running = _Running([], params, logits_from, is_batch)
        try:
            with self.backend.together():
                for ids, one in zip(prompts, params, strict=True):
                    running.generations.append(self.backend.start(ids, one, logits_from=logits_from))
        except BaseException:  # the first of them may run already
            running.cancel()
            raise
        return running

    def _prompts(
        self, prompt: str | Sequence[str] | None, input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    ) -> tuple[list[TokenIds], bool]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("give either a prompt or input_ids")
        if prompt is not None:
            is_list = isinstance(prompt, Sequence) and all(isinstance(text, str) for text in prompt)
            if not is_list:
                raise RequestError("a prompt must be a string or a list of strings; token ids are given as input_ids=")
            texts = [prompt] if isinstance(prompt, str) else list(prompt)
            encoded = [self.tokenizer.encode([Segment(text)], at_start=True) for text in texts]
            return [np.array(ids, dtype=np.int32) for ids in encoded], not isinstance(prompt, str)
        assert input_ids is not None
        is_batch = len(input_ids) > 0 and not isinstance(input_ids[0], int | np.integer)
        try:
            rows = [np.array(ids) for ids in (input_ids if is_batch else [input_ids])]
        except (TypeError, ValueError, OverflowError):
            raise RequestError("input_ids must be a list of whole numbers, or a list of such lists") from None
        return [self._token_ids(row) for row in rows], is_batch

    def _token_ids(self, given: npt.NDArray[np.generic]) -> TokenIds:
        if given.ndim == 1 and (given.dtype.kind in "iu" or not len(given)):
            ids = given.astype(np.int64, copy=False)
            if not len(ids) or ids.view(np.uint64).max() < self._vocab_size:  # below 0 is above all without a sign
                return ids.astype(np.int32)
        raise RequestError(f"input_ids must be whole numbers from 0 to {self._vocab_size - 1}")

    def _all_params(
        self,
        given: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
        count: int,
        return_logprob: bool,
        top_logprobs_num: int,
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, Mapping):
            given = [given or {}] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
            raise RequestError(f"sampling_params must be a mapping or a list of them, got {given!r}")
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts; give one, or one a prompt")
        asked = SamplingOptions(return_logprob=return_logprob or None, top_logprobs_num=top_logprobs_num or None)
        known: dict[object, SamplingParams] = {}  # many prompts mostly ask for few kinds of answers
        return [self._params(one, asked, known) for one in given]

    def _params(
        self, given: Mapping[str, object], asked: SamplingOptions, known: dict[object, SamplingParams]
    ) -> SamplingParams:
        key = spelling_of(given)
        found = known.get(key)
        if found is None:
            found = asked.over(options_from_dict(given)).over(self._info.defaults).resolve()
            if key is not None:
                known[key] = found
        return found

    def _check_start(self, logprob_start_len: int, prompts: Sequence[TokenIds]) -> None:
        shortest = min((len(ids) for ids in prompts), default=0)
        if logprob_start_len > shortest:
            raise RequestError(
                f"logprob_start_len {logprob_start_len} is behind the end of a prompt of {shortest} tokens"
            )

    def _stream(self, running: _Running) -> Iterator[Result]:
        text, ids = "", list[int]()
        (generation,) = running.generations
        try:
            for delta in generation.deltas():
                text += delta.text
                ids += delta.token_ids
                yield {"text": text, "output_ids": list(ids), "meta_info": {"completion_tokens": len(ids)}}
            yield running.first()
        finally:
            generation.cancel()  # a reader that stops early stops the generation; after the end this does nothing

    async def _astream(self, running: _Running) -> AsyncIterator[Result]:
        loop = asyncio.get_running_loop()
        (generation,) = running.generations
        arrived: asyncio.Queue[Delta | None] = asyncio.Queue()

        def tell(item: Delta | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        generation.add_delta_callback(tell)
        generation.add_done_callback(lambda: tell(None))
        text, ids = "", list[int]()
        try:
            while (delta := await arrived.get()) is not None:
                text += delta.text
                ids += delta.token_ids
                yield {"text": text, "output_ids": list(ids), "meta_info": {"completion_tokens": len(ids)}}
            yield running.first()
        finally:
            generation.cancel()


@dataclass(frozen=True, slots=True)
class _Running:
    """What a call of `generate` started: a generation and its params for each prompt."""

    generations: list[Generation]
    params: Sequence[SamplingParams]
    logits_from: int | None
    is_batch: bool

    def cancel(self) -> None:
        for generation in self.generations:
            with suppress(EngineStopped):
                generation.cancel()

    def results(self) -> Result | list[Result]:
        """Waits for all. Raises what one failed with; the others are cancelled then, and where the waiting ends."""
        try:
            self._wait()
            failed = next((one.error() for one in self.generations if one.error() is not None), None)
            if failed is not None:
                raise failed
        except BaseException:
            self.cancel()
            raise
        results = [
            result_of(output, one, self.logits_from)
            for generation, one in zip(self.generations, self.params, strict=True)
            for output in generation.result()
        ]
        return results if self.is_batch or self.params[0].n > 1 else results[0]

    def _wait(self) -> None:
        """Until all are done, or one has failed. To wait for each in turn is to be woken, and to want the interpreter
        while the engine has it, for many of them."""
        done: list[Generation] = []
        is_over = threading.Event()

        def tell(generation: Generation) -> None:
            done.append(generation)
            if len(done) == len(self.generations) or generation.error() is not None:
                is_over.set()

        for generation in self.generations:
            generation.add_done_callback(partial(tell, generation))
        if self.generations:
            is_over.wait()

    def first(self) -> Result:
        return result_of(self.generations[0].result()[0], self.params[0], self.logits_from)


class Runtime(Engine):
    """An engine under SGLang's name, with SGLang's name for the model's folder; programs run on it as on any engine."""

    def __init__(self, model_path: str | Path | None = None, **options: object) -> None:
        super().__init__(model_path, **options)


def _tiers(config: EngineConfig, layout: Layout) -> Tiers | None:
    """The stores that the config names, in order; None without any."""
    stores: list[PageStore] = []
    if config.host_cache_bytes:
        stores.append(MemoryStore(config.host_cache_bytes))
    if config.disk_cache_dir is not None:
        try:
            stores.append(DiskStore(Path(config.disk_cache_dir), config.disk_cache_bytes))
        except OSError as error:
            raise ConfigError(f"disk_cache_dir {config.disk_cache_dir} cannot be used: {error}") from error
    return Tiers(stores, layout.fingerprint, layout.page_size) if stores else None


async def _finished(generation: Generation) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(done.set)

    generation.add_done_callback(tell)
    await done.wait()
