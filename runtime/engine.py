"""The engine for users: a model in this process that answers in plain dicts, as SGLang's engine does.

Programs run on its `backend`; `generate` is for those who want no language around it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Self, TypeAlias, overload

from niwaki.kernels.compile_notice import announce_compiling
from niwaki.kernels.compile_time import on_compiling
from niwaki.runtime.api import ProgramError, RequestError, SamplingOptions
from niwaki.runtime.api.names import ATTRIBUTES, hint
from niwaki.runtime.api.readiness import readiness
from niwaki.runtime.host.exits import let_daemons_go_silently
from niwaki.runtime.host.forked import check_not_forked
from niwaki.runtime.host.load import load
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.system import check_system
from niwaki.runtime.pictures.picture import Picture
from niwaki.runtime.pictures.tree_page import draw
from niwaki.runtime.pictures.tree_view import DEFAULT_NODES, TreeNode, TreeView
from niwaki.runtime.requests.asked import check_options, first_position, params_of, prompts_of
from niwaki.runtime.requests.results import Result
from niwaki.runtime.requests.running import Running

Given: TypeAlias = Mapping[str, object] | Sequence[Mapping[str, object]] | None  # sampling_params


class Engine:
    """A model in this process.

    `Engine()` runs the bundled model, `Engine("path")` any Hugging Face folder of a supported architecture. Options
    are those of `EngineConfig`; an unknown one is a ConfigError. A context manager; or call `shutdown()`.

    Raises:
        ConfigError, ModelError: at construction, in one line. EngineStopped: in a fork of a process that has an engine.
    """

    def __init__(self, model: str | Path | None = None, **options: object) -> None:
        check_system()
        check_not_forked()
        announce_compiling()
        on_compiling(readiness.begin, readiness.end)
        self._loaded = load(EngineConfig.of(model, options))
        self.config = self._loaded.config
        self.tokenizer = self._loaded.tokenizer
        self.backend = self._loaded.backend
        # Also at the interpreter's end: a thread inside torch while the process goes down aborts it.
        self._close = weakref.finalize(self, self.backend.shutdown)
        let_daemons_go_silently()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._loaded.info.model}>"

    if not TYPE_CHECKING:  # a type checker is to see that there is no such thing

        def __getattr__(self, name: str) -> object:
            known = [one for one in dir(self) if not one.startswith("_")]
            remedy = "" if name.startswith("_") else hint(name, ATTRIBUTES, known, 0.75)
            raise AttributeError(f"an engine has no attribute {name!r}{remedy}")

        def __add__(self, content: object) -> NoReturn:
            raise ProgramError(
                "an engine is no text to add to; a program is, @nw.function def f(s): s += ..., and runs on it: "
                "f.run(backend=engine)"
            )

        __radd__ = __add__

    def __reduce__(self) -> NoReturn:
        raise ProgramError(
            "an engine belongs to its process and cannot be pickled or copied; make one in each process, or let them "
            "share a server by RuntimeEndpoint"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompt: str,
        sampling_params: Given = None,
        *,
        input_ids: None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str],
        sampling_params: Given = None,
        *,
        input_ids: None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompt: None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int],
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[Sequence[int]],
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[True],
    ) -> Iterator[Result]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Result | list[Result] | Iterator[Result]: ...

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        **unknown: object,
    ) -> Result | list[Result] | Iterator[Result]:
        """Generate from one prompt or a list of them, all in one continuous batch.

        Each result is `{"text", "output_ids", "meta_info"}` in the order of the prompts. With n > 1 there are n of them
        for each, and a list for a single prompt, too. No type of a dict tells that: give the prompt in a list then.
        `logprob_start_len` is the first prompt position whose log-probability is wanted (-1: none). With `stream`, an
        iterator of results whose text grows; the last one is as it is without `stream`.

        Raises:
            RequestError, ConstraintError, CapacityError: before anything runs, naming the field or the size needed.
        """
        check_options(unknown)
        asked = (return_logprob, logprob_start_len, top_logprobs_num)
        running = self._start(prompt, sampling_params, input_ids, *asked, stream=stream)
        return running.stream() if stream else running.results()

    @overload
    async def async_generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompt: str,
        sampling_params: Given = None,
        *,
        input_ids: None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> Result: ...

    @overload
    async def async_generate(
        self,
        prompt: Sequence[str],
        sampling_params: Given = None,
        *,
        input_ids: None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> list[Result]: ...

    @overload
    async def async_generate(
        self,
        prompt: None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int],
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> Result: ...

    @overload
    async def async_generate(
        self,
        prompt: None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[Sequence[int]],
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
    ) -> list[Result]: ...

    @overload
    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[True],
    ) -> AsyncIterator[Result]: ...

    @overload
    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Result | list[Result] | AsyncIterator[Result]: ...

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Given = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        **unknown: object,
    ) -> Result | list[Result] | AsyncIterator[Result]:
        """`generate` without blocking the event loop. Cancelling the task ends what it started."""
        check_options(unknown)
        asked = (return_logprob, logprob_start_len, top_logprobs_num)
        running = self._start(prompt, sampling_params, input_ids, *asked, stream=stream)
        return await (running.stream_async() if stream else running.results_async())

    @property
    def vocab_size(self) -> int:
        """Rows of logits: token ids are below this. May exceed the tokenizer's own, where a model pads it."""
        return self._loaded.vocab_size

    def stats(self) -> Mapping[str, float]:
        """Tokens prefilled, cached and generated since the start; pages free, in the tree and held; queues."""
        return self.backend.usage()

    def tree(self, *, namespace: str = "", limit: int = DEFAULT_NODES) -> TreeView:
        """The radix tree as it stands, as data: at most `limit` nodes, those used last first."""
        nodes = self.backend.outline(limit, namespace)
        return TreeView(self._loaded.info.model, [TreeNode.of(node, self.tokenizer) for node in nodes], self.stats())

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
        """Forget every cached prefix that nothing runs on, in the tiers as well, whichever engine left it there."""
        return self.backend.flush()

    def save_cache(self, path: str | Path) -> int:
        """Write the prefix cache to a file, for `load_cache` of an engine with the same model, dtype and page size.

        Returns the number of tokens. Nothing else runs meanwhile; on an error the file is as it was.

        Raises:
            OSError: it cannot be written.
        """
        return self.backend.save_cache(Path(path), self._loaded.layout)

    def load_cache(self, path: str | Path) -> int:
        """Take up a cache that `save_cache` wrote, as far as the pool has free pages. Returns the number of tokens.

        A damaged file is used up to the damage, with one warning.

        Raises:
            ConfigError: it is no saved cache, or one of another model, dtype or page size.
            OSError: it cannot be read.
        """
        return self.backend.load_cache(Path(path), self._loaded.layout)

    def get_server_info(self) -> dict[str, object]:
        """The model and the engine's settings, resolved."""
        return {
            "model": self._loaded.info.model,
            "context_length": self._loaded.info.context_length,
            "kv_tokens": self._loaded.pool_tokens,
            "kv_bytes_per_token": self._loaded.layout.page_bytes // self.config.page_size,
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
        sampling_params: Given,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        return_logprob: bool,
        logprob_start_len: int,
        top_logprobs_num: int,
        *,
        stream: bool,
    ) -> Running:
        prompts, is_batch = prompts_of(prompt, input_ids, self.tokenizer, self.vocab_size)
        if stream and is_batch:
            raise RequestError("stream=True takes one prompt; start several streams for several prompts")
        asked = SamplingOptions(return_logprob=return_logprob or None, top_logprobs_num=top_logprobs_num or None)
        params = params_of(sampling_params, len(prompts), asked, self._loaded.info.defaults)
        logits_from = first_position(return_logprob, logprob_start_len, prompts)
        running = Running([], params, logits_from, is_batch)
        program = self.backend.new_program()
        try:
            with self.backend.together():
                for ids, one in zip(prompts, params, strict=True):
                    started = self.backend.start(ids, one, logits_from=logits_from, program=program)
                    running.generations.append(started)
        except BaseException:  # the first of them may run already
            running.cancel()
            raise
        return running


class Runtime(Engine):
    """An engine under SGLang's name, with SGLang's name for the model's folder; programs run on it as on any engine."""

    def __init__(self, model_path: str | Path | None = None, **options: object) -> None:
        super().__init__(model_path, **options)
