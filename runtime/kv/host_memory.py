"""How much memory the process may still take: what the system has left, and what its control groups allow it.

In a container the system's own figure is that of the whole machine: a pool sized by it is killed as it fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

GROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
# Of a group: its limit, what it uses, and in its statistics, what of that are files that are given up when memory runs
# short.
VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")
VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(process: Path = GROUPS_OF_PROCESS, groups: Path = GROUPS) -> int:
    """Bytes. `process`: the file that names its groups; `groups`: the folder where these are."""
    return min([psutil.virtual_memory().available, *_left_in_groups(process, groups)])


def total_bytes() -> int:
    """What the machine has, what it swaps to included."""
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def _left_in_groups(process: Path, groups: Path) -> Iterator[int]:
    """Of each group with a limit, from the process's own to the topmost that is seen."""
    try:
        lines = process.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top, names = groups, VERSION_2
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", VERSION_1
        else:
            continue
        group = top / path.lstrip("/")
        while True:
            left = _left_in(group, *names)
            if left is not None:
                yield left
            if group == top:
                break
            group = group.parent


def _left_in(group: Path, limit: str, used: str, given_up: str) -> int | None:
    """None where the group has no limit, or is not seen from within a container."""
    try:
        most, taken = int((group / limit).read_text("ascii")), int((group / used).read_text("ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return max(0, most - taken + int(counts.get(given_up, 0)))
    except (OSError, ValueError):  # "max", for instance
        return None
