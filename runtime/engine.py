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
from niwaki.runtime.api.faults import file_faults, path_of
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
    are those of `EngineConfig`. Use it in a `with` block, or call `shutdown()`.

    Raises:
        ConfigError: an option is unknown or impossible.
        ModelError: the folder cannot be read.
        EngineStopped: this process is a fork of one that has an engine.
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

        `sampling_params` is a dict of the options of a generation, or one for each prompt. Each result is a dict with
        "text", "output_ids" and "meta_info"; a list of prompts gives a list of them in its order. With n > 1 there are
        n results for each prompt, and a list also for a single one; type checkers cannot see that, so give the prompt
        in a list then. `logprob_start_len` is the first position of the prompt whose log-probability is wanted (-1:
        none). With `stream`, which takes one prompt, the result is an iterator of results whose text grows; the last
        one is what it would be without `stream`.

        Raises:
            RequestError: a field is not valid. Raised, as those below, before anything runs.
            ConstraintError: the constraint cannot be enforced.
            CapacityError: a prompt needs more tokens than the context or the pool has.
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
        """`generate` without blocking the event loop. If the task is cancelled, what it started ends."""
        check_options(unknown)
        asked = (return_logprob, logprob_start_len, top_logprobs_num)
        running = self._start(prompt, sampling_params, input_ids, *asked, stream=stream)
        return await (running.stream_async() if stream else running.results_async())

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number. It may exceed the tokenizer's, since some models pad their vocabulary."""
        return self._loaded.vocab_size

    def stats(self) -> Mapping[str, float]:
        """Tokens prefilled, cached and generated since the start; pages free, in the tree and held; queues."""
        return self.backend.usage()

    def tree(self, *, namespace: str = "", limit: int = DEFAULT_NODES) -> TreeView:
        """The radix tree as it is now, as data: at most `limit` nodes, those used last first."""
        nodes = self.backend.outline(limit, namespace)
        return TreeView(self._loaded.info.model, [TreeNode.of(node, self.tokenizer) for node in nodes], self.stats())

    def show_tree(self, path: str | os.PathLike[str] | None = None, *, namespace: str = "") -> Picture:
        """The radix tree as a picture that a notebook shows; with `path`, it is also written there as one HTML file."""
        picture = draw(self.tree(namespace=namespace))
        if path is not None:
            picture.save(path)
        return picture

    def watch_tree(self, *, namespace: str = "") -> AbstractContextManager[None]:
        """In a `with` block: draw the radix tree in the terminal, four times a second."""
        from niwaki.runtime.pictures.tree_terminal import watching  # loads rich

        return watching(lambda: self.tree(namespace=namespace))

    def flush_cache(self) -> bool:
        """Forget every cached prefix that nothing runs on, also in the tiers, whichever engine left it there."""
        return self.backend.flush()

    def save_cache(self, path: str | Path) -> int:
        """Write the prefix cache to a file, for `load_cache` of an engine with the same model, dtype and page size.

        Returns the number of tokens. Nothing else runs meanwhile. After an error the file is as it was before.

        Raises:
            NiwakiError: the file cannot be written. It is an OSError, too.
        """
        with file_faults():
            return self.backend.save_cache(path_of("the saved cache", path), self._loaded.layout)

    def load_cache(self, path: str | Path) -> int:
        """Take up a cache that `save_cache` wrote, as far as the pool has free pages. Returns the number of tokens.

        A damaged file is used up to the damage, with one warning.

        Raises:
            ConfigError: the file is not a saved cache, or one of another model, dtype or page size.
            NiwakiError: the file cannot be read. It is an OSError, too.
        """
        with file_faults():
            return self.backend.load_cache(path_of("the saved cache", path), self._loaded.layout)

    def get_server_info(self) -> dict[str, object]:
        """The model, and the engine's settings as they are in effect."""
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
        """End the engine's thread. What still runs fails with EngineStopped. You may call it twice."""
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
