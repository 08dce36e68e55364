"""What attention will read is asked for while the products before it are made.

Products of more than 16 rows take the multipliers' time, and read little; attention of single queries to keys of
their own takes the memory's, and multiplies little. So the innermost loops of linear_tiles.py ask for the keys and
values of the next layer's attention, a line with each sixteen products of vectors, and find room for them in the third
cache. Products of fewer rows take the memory's time, too, for the weights. Knows pages and lines; never sees a key.
"""

from __future__ import annotations

from niwaki.kernels.jit import jit
from niwaki.kernels.pair_products import ASKED
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import multiplies_pairs

MOST = 4096  # pieces of a layer's keys, and of its values: 8 MB of the third cache
ASKS_LATER = multiplies_pairs() and not has_matrix_unit()  # where linear_tiles.py makes the products


@jit()
def pieces_of(
    pages: Int32s, row: Int32s, length: Int32s, first_key: Int32s, page_size: int, page_bytes: int, asks: Int64s
) -> int:
    """asks[:] = how far from the beginning of a pool the pieces of ASKED bytes lie that single queries will read.
    Returns their number: 0 where there is no room for all, or a page is not so many whole pieces."""
    count, each = 0, page_bytes // ASKED
    if page_bytes % ASKED:
        return 0
    for i in range(length.shape[0]):
        for page in range(first_key[i] // page_size, (length[i] + page_size - 1) // page_size):
            if count + each > asks.shape[0]:
                return 0
            for piece in range(each):
                asks[count + piece] = pages[row[i], page] * page_bytes + piece * ASKED
            count += each
    return count
