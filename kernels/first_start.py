"""The first start on a machine: a second process compiles what this one will need later, beside what it needs now.

Numba compiles one function at a time in a process, and keeps each on the disk. So the other process begins at the end
of what the first steps need, and this one finds there what it has not come to yet. Nothing depends on it: what is not
there when it is needed is compiled here. Of many engines that start at once on a machine one has such a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

from numba import types

from niwaki.kernels.jit import num_cores
from niwaki.kernels.layers import work

if sys.platform != "win32":
    import fcntl

CODE = "from niwaki.kernels.first_start import compile_ahead; compile_ahead()"


class Kernel(Protocol):
    """As `jit` makes them."""

    def compile(self, signature: tuple[object, ...]) -> object:
        """For arguments of these types, unless that is on the disk."""
        ...


def begin_beside() -> None:
    """Where the steps of a model (layers.py) were never compiled and there is a core to spare, start the other process,
    unless another engine has. Once in each process, and only of an interpreter: what is frozen, or holds one inside,
    would start itself again."""
    with _lock:
        is_python = Path(sys.executable or "").name.startswith("python")
        folder = _folder()
        if _begun or num_cores() < 2 or not is_python or folder is None or not _is_first_start(folder):
            return
        _begun.append(True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    nowhere = subprocess.DEVNULL
    # The folder may not be written, another engine holds the lock, or no process may be had.
    with suppress(OSError), (folder / "first_start.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the other process takes it along, and has it until it ends
        process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, "-P", "-c", CODE],
            env=environment,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            pass_fds=[held.fileno()],
        )
        threading.Thread(target=process.wait, name="niwaki-first-start", daemon=True).start()


def _folder() -> Path | None:
    """Where compiled kernels are kept; None where they cannot be."""
    folder = work.stats.cache_path  # type: ignore[attr-defined]  # of Numba
    return None if folder is None else Path(folder)


def _is_first_start(folder: Path) -> bool:
    """Whether nothing there is younger than the source."""
    source = Path(cast("Callable[[], None]", work.py_func).__code__.co_filename)  # type: ignore[attr-defined]
    kept = folder.glob(f"{source.stem}.{work.__name__}-*.nbi")
    return not any(each.stat().st_mtime >= source.stat().st_mtime for each in kept)


def compile_ahead() -> None:
    """Compile to the disk what the first steps need last, the largest first."""
    for kernel, signature in kernels():
        kernel.compile(signature)


def kernels() -> list[tuple[Kernel, tuple[object, ...]]]:
    """With the types that layers.py, the sampler and the plan call them with; others would be compiled for nothing."""
    from niwaki.kernels.echo import hear
    from niwaki.kernels.paged_decode import decode_items
    from niwaki.kernels.rms_norm import add_rms_norm_rows, qk_norm_rows, rms_norm_rows
    from niwaki.kernels.sample import draw_rows
    from niwaki.kernels.segments import _find
    from niwaki.kernels.silu_mul import silu_mul_rows
    from niwaki.kernels.store_kv import rope_store_rows

    long, short, half, float32, float64 = types.int64, types.int32, types.uint16, types.float32, types.float64
    rows, pages = half[:, ::1], half[:, :, :, ::1]
    sinks = types.Array(float32, 1, "C", readonly=True)
    partial = (float32[:, :, ::1], float32[:, ::1])
    return cast(
        "list[tuple[Kernel, tuple[object, ...]]]",
        [
            (
                decode_items,
                (half[:, :, :], pages, pages, short[:, ::1], *[short[::1]] * 4, *partial, sinks, half[:, :, ::1])
                + (float64, long, long, float64, long, long),
            ),
            (silu_mul_rows, (rows, rows)),
            (rope_store_rows, (rows, float32[:, ::1], float32[:, ::1], long[::1], long[::1], pages, pages)),
            (qk_norm_rows, (rows, half[::1], half[::1], long, long, float32, float64)),
            (add_rms_norm_rows, (rows, rows, half[::1], float32, float64, rows)),
            (rms_norm_rows, (rows, half[::1], float32, float64, rows)),
            (
                draw_rows,
                (float32[:, ::1], float32[:, ::1], types.uint32[:, ::1], long[::1], long[:, ::1], float64[:, ::1])
                + (long[:, ::1],),
            ),
            (_find, (short[:, ::1], long[::1], long[::1], long, long, float64[::1], short[::1])),
            (hear, (short[:, ::1], long[::1], short[::1], long[::1], long)),
        ],
    )


_lock = threading.Lock()
_begun: list[bool] = []
