"""Where a program wrote something: remembered cheaply at `+=`, put into words only when it fails."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass

_NOTE = "in program "


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of the author's code."""

    file: str
    line: int

    @property
    def place(self) -> str:
        """The file's name and the line's number."""
        return f"{os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return self.place + (f": {code}" if code else "")


def here() -> Origin:
    """The innermost line outside this package."""
    frame = sys._getframe(1)
    # contextlib stands between a `with` statement and a context manager of ours.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("niwaki.lang", "contextlib")):
        frame = frame.f_back
    return Origin(frame.f_code.co_filename, frame.f_lineno)


def note_of_body(error: BaseException) -> str:
    """What `add_origin` says, where a program's own code raised the error; empty where it was said, or none did."""
    name, place = "", None if _has_note(error) else error.__traceback__
    while place is not None:
        caller, name = name, str(place.tb_frame.f_globals.get("__name__", ""))
        if caller in ("niwaki.lang.program", "niwaki.lang.running") and not name.startswith("niwaki.lang"):
            code = place.tb_frame.f_code
            return f"{_NOTE}{code.co_name}, {Origin(code.co_filename, place.tb_lineno)}"
        place = place.tb_next
    return ""


def _has_note(error: BaseException) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def add_origin(error: BaseException, program: str, origin: Origin) -> None:
    """Tell the error which line of the program it comes from. The first to know the line is the one that says it."""
    if not _has_note(error):
        error.add_note(f"{_NOTE}{program}, {origin}")
