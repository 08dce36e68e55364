"""Which backend runs a program that names none, and how branches are given back."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import queue
import threading
from collections.abc import Mapping
from os import PathLike
from typing import Protocol, TypeAlias, cast, runtime_checkable

from niwaki.runtime.api import Backend, Branch, ConfigError, UnsupportedByBackend
from niwaki.runtime.api.readiness import readiness

log = logging.getLogger("niwaki.lang")


@runtime_checkable
class HasBackend(Protocol):
    """An engine: what owns a backend, and is told of by its own name."""

    @property
    def backend(self) -> Backend: ...


@runtime_checkable
class Administered(Protocol):
    """What `flush_cache` and `get_server_info` ask of a backend or of the engine that owns it."""

    def flush_cache(self) -> object: ...

    def get_server_info(self) -> Mapping[str, object]: ...


Host: TypeAlias = Backend | HasBackend


def backend_of(host: Host) -> Backend:
    """The backend itself: `host`, or what the engine `host` owns.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(host, type):
        raise ConfigError(f"{host.__name__} is a class and no backend; give an object of it: {host.__name__}(...)")
    owned = cast("Backend", getattr(host, "backend", host))  # isinstance takes 10 us, and every run asks
    missing = [name for name in ("open", "fork", "append", "generate", "score") if not hasattr(owned, name)]
    if missing:
        remedy = "use an Engine, a ScriptedBackend, or another object with the methods of niwaki.runtime.api.Backend"
        if isinstance(host, str | PathLike):
            is_address = str(host).startswith(("http:", "https:"))
            remedy = f"use {'RuntimeEndpoint' if is_address else 'Engine'}({str(host)!r})"
            if not is_address and not os.path.exists(host):
                remedy += f" for a model's folder, or OpenAI({str(host)!r}) for a service's model"
        raise ConfigError(f"{host!r} is no backend (it has no {', '.join(missing)}); {remedy}")
    return owned


def set_default_backend(backend: Host | None) -> None:
    """Choose what programs run on without a `backend=`. None: the bundled model, loaded when it is first needed."""
    if backend is not None:
        backend_of(backend)
    with _default.lock:
        _default.host = backend


def default_host() -> Host:
    """The default backend. Loads the bundled model the first time that nothing was set."""
    with _default.lock:
        if _default.host is None:
            # By name: a static import would make the language depend on the engine, and load torch with it.
            with readiness:
                _default.host = importlib.import_module("niwaki").Engine()  # it ends with the process
        host = _default.host
    assert host is not None
    return host


def is_default_ready() -> bool:
    """Whether `default_host` answers at once. Never waits, not even for one that is being loaded."""
    return _default.host is not None


def model_identity(host: object) -> str:
    """Tells the model behind `host` from others: by its weights where they are known, else by its name. None: behind
    the default, which is not loaded for the question."""
    if host is None and _default.host is None:
        # By name, as in `default_host`.
        bundled: bytes = importlib.import_module("niwaki.runtime.checkpoint.weights_digest").weights_fingerprint(None)
        return bundled.hex()
    info = backend_of(cast("Host", host) if host is not None else default_host()).info()
    return info.weights or info.model


def usage_of(host: object) -> Mapping[str, float] | None:
    """The counters of `host`'s backend; None: the default, which is not loaded for the question."""
    if host is None and _default.host is None:
        return None
    return backend_of(cast("Host", host) if host is not None else default_host()).usage()


def flush_cache(backend: Host | None = None) -> bool:
    """Empty the prefix cache of a backend; None: of the default one. False: it was busy and kept its cache."""
    return _administered(backend).flush_cache() is not False


def get_server_info(backend: Host | None = None) -> Mapping[str, object]:
    """The model, settings and counters of a backend; None: of the default one."""
    return _administered(backend).get_server_info()


def _administered(backend: Host | None) -> Administered:
    host = default_host() if backend is None else backend
    if isinstance(host, Administered):
        return host
    raise UnsupportedByBackend(f"{type(host).__name__} has no flush_cache and no get_server_info")


class _Default:
    """The process-wide choice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.host: Host | None = None


_default = _Default()


# ---------------------------------------------------------------------------------------------------------------
# Giving branches back
# ---------------------------------------------------------------------------------------------------------------


_Retired: TypeAlias = "queue.SimpleQueue[tuple[Backend, Branch] | None]"


class _Closer:
    """Closes branches on a thread of its own.

    A state that nobody holds any more is found by the garbage collector, which may run anywhere: on the engine's own
    thread, or inside a lock of the backend. Only putting into a SimpleQueue is safe there.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Also in a fork, which has no threads of its parent. What leases of the parent give back there stays in the
        parent's queue: the branches are the parent's, who may still use them."""
        self._branches: _Retired = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> _Retired:
        """Where branches of this process are given back. Called where they are opened: a thread cannot be started from
        inside the garbage collector."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, args=(self._branches,), name="niwaki-closer", daemon=True
                    )
                    self._thread.start()
                    # The thread may hold the last reference to an engine. One that is still freeing tensors when the
                    # interpreter ends is killed inside C++, which aborts the process.
                    atexit.register(self._stop, self._thread, self._branches)
        return self._branches

    def _stop(self, thread: threading.Thread, branches: _Retired) -> None:
        branches.put(None)
        thread.join(timeout=5)  # a backend that hangs must not keep the process from ending

    def _run(self, branches: _Retired) -> None:
        while (retired := branches.get()) is not None:
            backend, branch = retired
            try:
                backend.close(branch)
            except Exception:  # a backend that is shut down holds nothing any more; others must still be closed
                log.debug("closing a branch failed", exc_info=True)
            del retired, backend, branch  # or the last one closed would live until the next


closer = _Closer()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=closer._begin)


class Lease:
    """A branch that a state holds. Dropping the lease closes the branch, soon and on the closer's thread."""

    __slots__ = ("_retire", "backend", "branch")

    def __init__(self, backend: Backend, branch: Branch) -> None:
        self.backend = backend
        self.branch = branch
        self._retire = closer.start().put  # bound here: module globals may be gone when the interpreter ends

    def __del__(self) -> None:
        self._retire((self.backend, self.branch))
