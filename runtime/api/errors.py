"""The one tree of errors, from the runtime up to programs."""

from __future__ import annotations


class NiwakiError(Exception):
    """Root of every error that niwaki raises on purpose. Messages say what is wrong, which value, and what to do."""


class ConfigError(NiwakiError, ValueError):
    """An engine or program option is unknown, of the wrong type, or impossible."""


class ModelError(NiwakiError):
    """A model folder is missing, incomplete, truncated or of an unsupported architecture."""


class RequestError(NiwakiError, ValueError):
    """A generation request has an invalid field."""


class ConstraintError(NiwakiError, ValueError):
    """A constraint is malformed, cannot be enforced exactly, or admits no text."""


class StopRegexError(ConstraintError):
    """It is the `stop_regex`. To users a ConstraintError: the server tells by it which field is meant."""


class CapacityError(NiwakiError):
    """A request needs more tokens than an empty pool, or the model's context, can hold."""


class GenerationError(NiwakiError):
    """One request failed inside the runtime; its neighbours did not."""


READ_BEFORE = "; read what a program makes, or state.sync(), before its engine ends"


class EngineStopped(NiwakiError):
    """The backend was shut down, or died, before the request ended."""


class Cancelled(NiwakiError):
    """The request or the program was cancelled before it ended."""


class TimedOut(NiwakiError, TimeoutError):
    """A result did not arrive within the time that the caller gave."""


class UnsupportedByBackend(NiwakiError):
    """The backend cannot do what was asked; raised before any work is done."""


class ProgramError(NiwakiError):
    """A program misuses the language (nested turns, forks joined twice, ...)."""


class UnknownVariable(ProgramError, KeyError):
    """Nothing that was appended to the state sets the variable."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class FileFault(NiwakiError, OSError):
    """A file cannot be read or written. To users a NiwakiError, and an OSError with its `errno` and `filename`."""


class MissingFile(FileFault, FileNotFoundError):
    """The same, of a file or a folder that is not there."""


class FolderInPlace(FileFault, IsADirectoryError):
    """The same, where a folder has the file's name."""


class ForbiddenFile(FileFault, PermissionError):
    """The same, where this user may not."""
