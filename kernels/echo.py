"""Where a text said before what it says at its end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from niwaki.kernels.jit import jit

Ints = npt.NDArray[np.int32]


@jit(inline=True)
def _token(ids: Ints, newest: Ints, place: int) -> int:
    return int(ids[place]) if place < len(ids) else int(newest[place - len(ids)])


@jit()
def last_echo(ids: Ints, newest: Ints, size: int) -> int:
    """Of the text of `ids` and `newest` behind them: where what follows the latest earlier place of its last `size`
    tokens begins; 0 where there is none."""
    last = len(ids) + len(newest) - 1
    final = _token(ids, newest, last)
    for end in range(last - 1, size - 2, -1):
        if _token(ids, newest, end) == final:
            back = 1
            while back < size and _token(ids, newest, end - back) == _token(ids, newest, last - back):
                back += 1
            if back == size:
                return end + 1
    return 0
