"""HTTP to one server: connections that are kept, calls that answer at once, and calls whose answer is a stream."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from niwaki.lang.remote_wire import Json, error_at, read_object
from niwaki.runtime.api import Cancelled, ConfigError, EngineStopped, NiwakiError, TimedOut

# A connection on which nothing came for 60 s is asked whether the other end is there, and is lost 30 s later.
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class LongCall:
    """One call that takes its time. Cancelling closes its connection, by which the server knows that nobody waits."""

    def __init__(self, begun: Callable[[], None] | None = None) -> None:
        """`begun` is called where the answer begins to come, on the thread that reads it."""
        self.begun = begun
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def runs_on(self, connection: http.client.HTTPConnection) -> None:
        """Raises Cancelled: it was cancelled before."""
        with self._lock:
            self.check()
            self._socket = connection.sock

    def end(self) -> None:
        """The connection is somebody else's from now on. Raises Cancelled: it was cut off."""
        with self._lock:
            self._socket = None
        self.check()

    def check(self) -> None:
        """Raises Cancelled."""
        if self.is_cancelled:
            raise Cancelled("the request was cancelled") from None

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._socket is not None:
                with suppress(OSError):  # closed already
                    self._socket.shutdown(socket.SHUT_RDWR)


class ServerLink:
    """Thread-safe. `timeout` bounds every call but the long ones.

    Raises:
        ConfigError: `url` is no http or https address.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = _address(url)
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key must be a text of printable ASCII characters, without the line end of its file")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._timeout = timeout
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._is_shut_down = False
        self._begin()
        _links.add(self)

    def _begin(self) -> None:
        """Also in a fork: its parent's connections are not for two, who would read each other's answers."""
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def __str__(self) -> str:
        return f"RuntimeEndpoint({self._host}:{self._port})"

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Raises the error that the answer is; EngineStopped, TimedOut: there was none."""
        try:
            connection, response = self._ask(method, path, body, LongCall(), self._timeout)
            with response:
                content = response.read()
        except TimeoutError:
            raise TimedOut(f"{self} did not answer {method} {path} within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        self._keep(connection)
        if response.status != 200:
            raise error_at(response.status, content)
        is_json = response.headers.get_content_type() == "application/json"
        return read_object(content if is_json else b"{}")

    def events(self, call: LongCall, path: str, body: Json) -> Iterator[Json]:
        """Post, and give the events of the answer, or the one object that it is, as they come.

        Raises:
            Cancelled: the call was. The error that the answer is. EngineStopped: there was none.
        """
        connection: http.client.HTTPConnection | None = None
        try:
            connection, response = self._ask("POST", path, body, call, None)
            with response:
                if response.status != 200:
                    raise error_at(response.status, response.read())
                if response.headers.get_content_type() == "application/json":
                    yield read_object(response.read())
                else:
                    if call.begun is not None:
                        call.begun()
                    for line in response:
                        if line.startswith(b"data: "):
                            yield read_object(line[6:])
            call.end()
            self._keep(connection)
            connection = None
        except Exception as error:
            call.check()
            raise error if isinstance(error, NiwakiError) else self._unreachable(error) from error
        finally:
            if connection is not None:  # cut off in the middle
                connection.close()

    def shutdown(self) -> None:
        """Keep no connection open from now on."""
        with self._lock:
            self._is_shut_down = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(
        self, method: str, path: str, body: Json | None, call: LongCall, timeout: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send, and read the head of the answer."""
        content = None if body is None else json.dumps(body)
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        for connection in (idle, self._connection()):
            if connection is None:
                continue
            try:
                connection.timeout = timeout
                if connection.sock is None:
                    connection.connect()
                    _keep_alive(connection)
                connection.sock.settimeout(timeout)
                call.runs_on(connection)
                connection.request(method, path, content, self._headers)
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                is_stale = connection is idle and isinstance(error, OSError | http.client.HTTPException)
                if not is_stale or isinstance(error, TimeoutError):
                    raise
                # The server had closed it while it was idle; once more on a new one.
        raise AssertionError("the second connection answers or raises")

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            is_kept = not self._is_shut_down and connection.sock is not None
            if is_kept:
                self._idle.append(connection)
        if not is_kept:  # a branch may be closed after the shutdown
            connection.close()

    def _unreachable(self, error: Exception) -> EngineStopped:
        is_no_tls = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLCertVerificationError)
        hint = "; does it speak plain http?" * is_no_tls
        return EngineStopped(f"{self} cannot be reached: {type(error).__name__}: {error}{hint}")


def _keep_alive(connection: http.client.HTTPConnection) -> None:
    """Nobody bounds a long call: that the other machine is gone without a word must be noticed here."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _address(url: str) -> SplitResult:
    """Raises ConfigError: it is no http or https address, or has a path."""
    if isinstance(url, str):
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets, or a port that is none
            is_server = False
        if is_server and text == url and parts.path in ("", "/"):
            return parts
        if is_server:
            meant = f"{parts.scheme}://{parts.netloc}"
            raise ConfigError(f"{url!r} is no server's address, which has no path; did you mean {meant!r}?")
    raise ConfigError(f"{url!r} is no server's address, which has no path, as in http://127.0.0.1:30000")


def _begin_in_child() -> None:
    for link in tuple(_links):
        link._begin()


_links: weakref.WeakSet[ServerLink] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_begin_in_child)
