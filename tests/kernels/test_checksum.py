"""The checksum of pages in files sees what changes in them."""

from __future__ import annotations

import numpy as np

from niwaki.kernels.checksum import checksum


def test_every_bit_and_every_length_counts() -> None:
    content = np.random.default_rng(0).integers(0, 256, 150, np.uint8)
    seen = {checksum(content[:length]) for length in range(151)}
    for place in range(150):
        for bit in range(8):
            changed = content.copy()
            changed[place] ^= 1 << bit
            seen.add(checksum(changed))
    assert len(seen) == 151 + 150 * 8


def test_two_bits_and_two_words_do_not_make_up_for_each_other() -> None:
    content = np.zeros(64 * 16, np.uint8)
    seen = {checksum(content)}
    for first in range(0, 1024, 64):  # of one lane
        for bit in (0, 7):
            for second in range(0, first, 64):
                changed = content.copy()
                changed[[first + 7, second + 7]] = 1 << bit
                seen.add(checksum(changed))
    assert len(seen) == 1 + 2 * 16 * 15 // 2


def test_it_does_not_change_from_one_version_to_the_next() -> None:
    content = np.arange(100, dtype=np.uint8)
    assert checksum(content) == reference(bytes(content)), "files of before are read"


def reference(content: bytes) -> int:
    odd, most = 0xFF51AFD7ED558CCD, 2**64 - 1
    words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content) // 8 * 8, 8)]
    rest = int.from_bytes(content[len(content) // 8 * 8 :], "little")
    lanes = [0x9E3779B97F4A7C15 * (lane + 1) & most for lane in range(8)]
    for place, word in enumerate(words):
        mixed = (lanes[place % 8] ^ word) * odd & most
        lanes[place % 8] = mixed ^ mixed >> 32
    mixed = (len(content) ^ rest * odd) * odd & most
    for lane in lanes:
        mixed = (mixed ^ lane) * odd & most
        mixed ^= mixed >> 32
    return mixed
