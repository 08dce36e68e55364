"""Where a text said before what it says at its end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from niwaki.kernels.jit import jit

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@jit()
def last_echo(ids: Ints, size: int) -> int:
    """Where what follows the latest earlier place of the last `size` tokens of `ids` begins; 0 where there is none."""
    last = len(ids) - 1
    for end in range(last - 1, size - 2, -1):
        if ids[end] == ids[last]:
            back = 1
            while back < size and ids[end - back] == ids[last - back]:
                back += 1
            if back == size:
                return end + 1
    return 0


@jit()
def hear(texts: Ints, lasts: Longs, newest: Ints, quiet: Longs, size: int) -> bool:
    """Put the newest token of each row of `texts` to its place, lasts[row], and tell whether one of them ends as it
    said before, of those that are `quiet[row]` tokens long."""
    is_heard = False
    for row in range(len(texts)):
        texts[row, lasts[row]] = newest[row]
        if lasts[row] + 1 >= quiet[row] and last_echo(texts[row, : lasts[row] + 1], size):
            is_heard = True
    return is_heard
