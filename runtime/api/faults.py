"""What is told of what went wrong: to whoever waits for a request, and of a file that cannot be made or used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from niwaki.runtime.api import ConfigError, GenerationError, NiwakiError
from niwaki.runtime.api.errors import FileFault, FolderInPlace, ForbiddenFile, MissingFile

log = logging.getLogger("niwaki.core")

FILE_FAULTS: dict[type[OSError], type[FileFault]] = {
    OSError: FileFault,
    FileNotFoundError: MissingFile,
    IsADirectoryError: FolderInPlace,
    PermissionError: ForbiddenFile,
}


def told(error: Exception) -> NiwakiError:
    """What whoever waits for the request is told. A bug of ours is logged as well."""
    if isinstance(error, NiwakiError):
        return error
    log.error("a request failed", exc_info=error)
    failure = GenerationError(f"the request failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def path_of(what: str, value: object) -> Path:
    """Raises ConfigError: it is no path of a file."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"{what} is the path of a file, a str or a Path; got {value!r}")
    return Path(value)


def not_made(path: Path, error: FileNotFoundError) -> FileNotFoundError:
    """Why `path` could not be made: that its folder is missing, where the system's words only say that something is."""
    if path.parent.is_dir():
        return error
    return FileNotFoundError(error.errno, f"there is no folder {path.parent}; make it first", str(path))


def file_fault(error: OSError) -> OSError:
    """What the system says of a file as one of niwaki's errors, which is the system's, too. What is said of something
    else, as of a pipe that nobody reads, stays as it is."""
    kind = FILE_FAULTS.get(type(error))
    return error if kind is None else kind(error.errno, error.strerror or str(error), error.filename)


@contextmanager
def file_faults() -> Iterator[None]:
    """What the system says of files inside is raised as `file_fault` has it."""
    try:
        yield
    except OSError as error:
        raise file_fault(error) from None
