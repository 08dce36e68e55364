"""`niwaki tree`: the radix tree of a running server, live in the terminal, printed once, or as a file."""

from __future__ import annotations

import argparse
import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

from niwaki.runtime.api import ConfigError, EngineStopped
from niwaki.runtime.pictures.tree_view import DEFAULT_NODES, TreeView

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT = 10.0  # seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server (%(default)s)")
    add("--api-key", metavar="KEY", help="one of the server's keys: each has a tree of its own")
    add("--limit", type=int, default=DEFAULT_NODES, metavar="N", help="nodes at most (%(default)s)")
    add("--every", type=float, default=0.5, metavar="SECONDS", help="between two looks (%(default)s)")
    add("--once", action="store_true", help="print it once instead")
    add("--html", type=Path, metavar="PATH.html", help="write it as one page instead")


def run(arguments: argparse.Namespace) -> None:
    """Look once, or until Ctrl-C.

    Raises:
        ConfigError: an option that cannot be, or a server that says something else. EngineStopped: no server.
        OSError: the file cannot be written.
    """
    from niwaki.runtime.pictures.tree_page import draw
    from niwaki.runtime.pictures.tree_terminal import show, watch  # loads rich

    if arguments.every <= 0:
        raise ConfigError(f"--every must be above 0 seconds, got {arguments.every:g}")

    def look() -> TreeView:
        return tree_of(arguments.url, arguments.api_key, arguments.limit)

    if arguments.html is not None:
        draw(look()).save(arguments.html)
    elif arguments.once:
        show(look())
    else:
        watch(look, arguments.every)


def tree_of(url: str, api_key: str | None, limit: int) -> TreeView:
    """The caller's part of a server's tree, at most `limit` nodes.

    Raises:
        ConfigError: `url` is no http or https address, or what answers is no niwaki server, or wants another key.
        EngineStopped: nothing answers.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no server's address, as in {DEFAULT_URL}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT)
    try:
        connection.request("GET", f"/debug/tree?limit={limit}", headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineStopped(f"{url} cannot be reached: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if answer.status == 401:
        raise ConfigError(f"{url} answers only who has a key: give --api-key")
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if answer.status != 200:
        told = found.get("error") if isinstance(found, dict) else None
        said = told.get("message") if isinstance(told, dict) else f"status {answer.status}"
        raise ConfigError(f"{url} answered: {said}")
    return TreeView.from_json(found if isinstance(found, dict) else {})
