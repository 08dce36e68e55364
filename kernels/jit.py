"""How kernels are compiled and how many threads they use. The only file that touches Numba's global settings."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Literal, ParamSpec, TypeVar

import numba
from numba.core import config as numba_config
from numba.core import event
from numba.core.caching import CacheImpl
from numba.misc.appdirs import AppDirs

from niwaki.kernels.kept_code import keep_by_types

log = logging.getLogger("niwaki.kernels")

P = ParamSpec("P")
R = TypeVar("R")

# Products and sums may fuse. Not "nnan" and "ninf": a NaN in one request's row must come out as NaN, so that the engine
# can fail that request and no other. Not "reassoc": Numba optimises a function anew inside each caller, and may then
# order its sums differently; only the reductions of numeric.py ask for it, because they vectorise by nothing else.
FASTMATH = frozenset({"contract", "arcp", "nsz"})
REDUCTION = FASTMATH | {"reassoc"}

# Numba's own pool instead of its OpenMP layer, unless the user chose one: torch brings a second OpenMP runtime, and the
# two spin against each other. Measured on 2 cores beside one busy process, an empty parallel loop of 2 threads: 8 ms
# on OpenMP, 0.05 ms on the pool. The pool ends the process when two threads enter it at once; parallel kernels
# therefore keep the interpreter lock (no `nogil`), which serializes them across all engines of a process.
SETTINGS = vars(numba_config)
if SETTINGS["THREADING_LAYER"] == "default":
    SETTINGS["THREADING_LAYER"] = "workqueue"

# Whoever has no home (a user of a container without an entry), or an XDG_CACHE_HOME that is empty or begins with "~",
# would get a folder wherever the process stands, and run the code that somebody else has put into one there.
caches = AppDirs("numba", False).user_cache_dir  # type: ignore[no-untyped-call]  # Numba has no types
if not os.path.isabs(caches):
    places = CacheImpl._locator_classes
    places[:] = [place for place in places if not place.__name__.endswith("UserWideCacheLocator")]


class _Uncollected(event.Listener):
    """While a function of ours is compiled, on whatever thread, Python looks for no cycles: to go through all that
    torch and Numba hold, again and again, took a sixth of the time. It takes 110 MB more at its highest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0  # one is compiled inside another
        self._was_enabled = False

    def on_start(self, event: event.Event) -> None:
        if is_ours(event):
            with self._lock:
                self._depth += 1
                if self._depth == 1:
                    self._was_enabled = gc.isenabled()
                    gc.disable()

    def on_end(self, event: event.Event) -> None:
        if is_ours(event):
            with self._lock:
                self._depth = max(0, self._depth - 1)  # Numba tells the end also where an interrupt cut the start off
                if self._depth == 0 and self._was_enabled:
                    gc.enable()


def is_ours(event: event.Event) -> bool:
    """Whether the function that is being compiled is one of ours."""
    module = event.data["dispatcher"].py_func.__module__  # None: made by `exec`, by somebody else
    return module is not None and module.startswith("niwaki.")


event.register("numba:compile", _Uncollected())  # type: ignore[no-untyped-call]  # Numba has no types


def compiles_for_this_processor() -> bool:
    """Whether kernels may use all that this processor can: nobody told Numba to compile for another one."""
    return not SETTINGS["CPU_NAME"] and not SETTINGS["CPU_FEATURES"]


def jit(
    *, parallel: bool = False, nogil: bool = False, inline: bool = False, fastmath: frozenset[str] = FASTMATH
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile for the CPU on first call, kept on disk where a directory for it can be written. `nogil` is for kernels
    of one thread, which never enter the pool. `inline`: into each caller, so that no references to arrays are counted,
    which takes some 10 ns for each array of a call."""
    how: Literal["always", "never"] = "always" if inline else "never"

    def compile_lazily(function: Callable[P, R]) -> Callable[P, R]:
        try:
            kept = numba.njit(cache=True, parallel=parallel, nogil=nogil, inline=how, fastmath=set(fastmath))(function)
        except RuntimeError:  # "no locator available": neither the package folder nor the user's cache is writable
            return numba.njit(parallel=parallel, nogil=nogil, inline=how, fastmath=set(fastmath))(function)
        keep_by_types(kept)
        return _mended(kept)

    return compile_lazily


def _mended(kernel: Callable[P, R]) -> Callable[P, R]:
    """The same; what a crash has torn of it on the disk is compiled again, where Numba would raise at each call."""
    cache = kernel._cache  # type: ignore[attr-defined]  # of Numba's dispatcher
    load = cache.load_overload

    def load_if_whole(signature: object, target: object) -> object:
        try:
            return load(signature, target)
        except Exception as error:
            log.warning("%s is compiled again: what was kept of it cannot be read (%s)", kernel.__name__, error)
            with suppress(OSError):  # a folder that may only be read
                cache.flush()
            return None

    cache.load_overload = load_if_whole
    return kernel


class _Mode(threading.local):
    is_one_of_several = False


_mode = _Mode()


@contextmanager
def one_of_several() -> Iterator[None]:
    """Inside, this thread works side by side with others: its kernels take one core, and those that `for_any_thread`
    made leave the interpreter to the others."""
    threads = get_num_threads()
    set_num_threads(1)
    _mode.is_one_of_several = True
    try:
        yield
    finally:
        _mode.is_one_of_several = False
        set_num_threads(threads)


def for_any_thread(kernel: Callable[P, R]) -> Callable[P, R]:
    """A kernel of `jit()` in two forms: with the interpreter lock, and without it inside `one_of_several`.

    Not without it everywhere: a thread that computes in Python would take the lock between any two kernels, a hundred
    times a step, and keep it for 5 ms.
    """
    source: FunctionType = kernel.py_func  # type: ignore[attr-defined]  # the function that was compiled
    twin = FunctionType(source.__code__, source.__globals__, source.__name__, source.__defaults__)
    twin.__qualname__ = f"{source.__qualname__}_unlocked"  # it is kept on disk by this name
    unlocked = jit(nogil=True)(twin)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (unlocked if _mode.is_one_of_several else kernel)(*args, **kwargs)

    return call


def set_num_threads(count: int) -> None:
    """Threads of the next parallel kernels, at most what the machine had when Numba started. Costs about 1 us."""
    numba.set_num_threads(max(1, min(count, SETTINGS["NUMBA_NUM_THREADS"])))


def num_cores() -> int:
    """Of this process."""
    return int(SETTINGS["NUMBA_DEFAULT_NUM_THREADS"])


def get_num_threads() -> int:
    return int(numba.get_num_threads())
