"""One token for each row of a batch on the CPU: penalties, softmax, top-k, top-p, min-p and the draw, under a mask.

Random numbers are a function of (seed, position). Sums may be reassociated, never anything that would lose a NaN or an
infinity. runtime/sampling/sampler.py says what the rows ask for; kernels/triton/sample.py is the same on a GPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from niwaki.kernels.jit import REDUCTION, jit
from niwaki.kernels.order import stable_order

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
Real = float | np.float32  # the kernels compute in the type that they get

NO_ROW: Final = -1  # in an index of masks or of adjusted logits: this row has none
NO_TOKEN: Final = -1
NOT_FINITE: Final = -2
BLOCK: Final = 512  # weights are added up in float32 within a block, in float64 over blocks
NUM_BUCKETS: Final = 1024
BUCKETS_PER_UNIT: Final = 8.0  # of logit over temperature: the last bucket starts at weight exp(-128)

_jit = jit(nogil=True, fastmath=REDUCTION)


@_jit
def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64's finalizer over the seed, then over the position."""
    stride = np.uint64(0x9E3779B97F4A7C15)
    state = _mixed(np.uint64(seed) + stride) + (np.uint64(position) + np.uint64(1)) * stride
    return float(_mixed(state) >> np.uint64(11)) * 2.0**-53


@_jit
def _mixed(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@_jit
def penalise(
    values: Floats, prompt: Longs, output: Longs, repetition: float, frequency: float, presence: float
) -> None:
    """Change `values` in place. All ids stand inside the vocabulary.

    Repetition: of a token that stands in the prompt or the output, a positive logit is divided by the penalty, a
    negative one multiplied (CTRL, Keskar et al. 2019). Frequency and presence: count * frequency + presence is
    subtracted for the tokens of the output (OpenAI's formula).
    """
    counts = np.zeros(len(values), np.int32)
    if repetition != 1.0:
        factor = np.float32(repetition)
        for ids in (prompt, output):
            for token in ids:
                if counts[token] == 0:  # once, however often it stands there
                    counts[token] = 1
                    values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        counts[:] = 0
    for token in output:
        counts[token] += 1
    for token in output:
        if counts[token] > 0:
            values[token] -= np.float32(counts[token] * frequency + presence)
            counts[token] = 0


@_jit
def exponentials(values: Floats, highest: Real, scale: Real, weights: Floats, bits: Ints, sums: Floats) -> float:
    """weights = exp((values - highest) * scale) for values <= highest; sums = their sums by blocks; returns the total.

    bits is scratch. Below exp(-87) the weight is 0. Cephes' polynomial, within 2 units in the last place; written
    out because Numba's own exp stays scalar, which takes ten times as long.
    """
    lowest = np.float32(-87.0)
    for i in range(len(values)):
        x = (values[i] - highest) * scale
        x = x if x > lowest else lowest
        power = np.int32(x * np.float32(1.44269504088896341) - np.float32(0.5))
        rest = x - np.float32(power) * np.float32(0.693359375)
        rest = rest - np.float32(power) * np.float32(-2.12194440e-4)
        series = np.float32(1.9875691500e-4)
        series = series * rest + np.float32(1.3981999507e-3)
        series = series * rest + np.float32(8.3334519073e-3)
        series = series * rest + np.float32(4.1665795894e-2)
        series = series * rest + np.float32(1.6666665459e-1)
        series = series * rest + np.float32(5.0000001201e-1)
        weights[i] = series * rest * rest + rest + np.float32(1.0)
        bits[i] = ((power + np.int32(127)) << np.int32(23)) if x > lowest else np.int32(0)
    powers = bits.view(np.float32)
    total = 0.0
    for block in range((len(values) + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        part: Real = np.float32(0.0)
        for i in range(start, min(start + BLOCK, len(values))):
            weights[i] *= powers[i]
            part += weights[i]
        sums[block] = part
        total += float(part)
    return total


@_jit
def _best(values: Floats) -> int:
    """The index of the highest value, the first of equals; NO_TOKEN where there is none above -inf, NOT_FINITE where
    one is NaN or inf. Compares the bits as whole numbers of the same order, which vectorises where floats do not."""
    bits = values.view(np.int32)
    top = np.int32(-(2**31))
    bottom = np.int32(2**31 - 1)
    top_start = 0
    for start in range(0, len(bits), BLOCK):
        high = np.int32(-(2**31))
        for i in range(start, min(start + BLOCK, len(bits))):
            key = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            high = max(high, key)
            bottom = min(bottom, key)
        if high > top:
            top = high
            top_start = start
    if top >= np.int32(0x7F800000) or bottom < np.int32(-0x7F800001):
        return NOT_FINITE if len(bits) > 0 else NO_TOKEN
    if top == np.int32(-0x7F800001):
        return NO_TOKEN
    for i in range(top_start, len(bits)):
        if bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)) == top:
            return i
    return NO_TOKEN


@_jit
def highest_ids(values: Floats, count: int) -> Longs:
    """The ids of the `count` highest values, highest first, equal ones by id."""
    ids = np.zeros(count, np.int64)
    found = 0
    bar: Real = np.float32(-np.inf)  # the lowest of those found, once there are `count`
    for i in range(len(values)):
        value = values[i]
        if found == count and value <= bar:
            continue
        if found < count:
            found += 1
        place = found - 1
        while place > 0 and values[ids[place - 1]] < value:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = i
        bar = values[ids[found - 1]]
    return ids


@_jit
def likeliest(values: Floats, rows: Longs, highest: Floats, tokens: Longs, count: int) -> tuple[Ints, Doubles, Doubles]:
    """Of these rows of logits [all rows, vocab], of which the `highest` are finite: the ids [rows, count] of the best
    ones, as `highest_ids`, their log-probabilities, and those [rows] of `tokens`."""
    vocab = values.shape[1]
    ids = np.empty((len(rows), count), np.int32)
    logprobs = np.empty((len(rows), count), np.float64)
    own = np.empty(len(rows), np.float64)
    weights, bits = np.empty(vocab, np.float32), np.empty(vocab, np.int32)
    sums = np.empty(vocab // BLOCK + 1, np.float32)
    for place in range(len(rows)):
        logits = values[rows[place]]
        total = exponentials(logits, highest[place], np.float32(1.0), weights, bits, sums)
        log_total = float(highest[place]) + np.log(total)
        own[place] = float(logits[tokens[place]]) - log_total
        if count:
            found = highest_ids(logits, count)
            for i in range(count):
                ids[place, i] = found[i]
                logprobs[place, i] = float(logits[found[i]]) - log_total
    return ids, logprobs, own


@_jit
def _allowed(values: Floats, mask: Words, kept: Floats, ids: Ints) -> int:
    """Move the allowed values to the front of `kept`, their tokens to `ids`; returns how many."""
    count = 0
    for word in range(len(mask)):
        bits = mask[word]
        token = 32 * word
        while bits != np.uint32(0):
            if bits & np.uint32(1) and token < len(values):
                kept[count] = values[token]
                ids[count] = token
                count += 1
            bits >>= np.uint32(1)
            token += 1
    return count


@_jit
def _blocked_out(values: Floats, mask: Words, kept: Floats) -> None:
    """kept = values, -inf where the mask says no."""
    for i in range(len(values)):
        kept[i] = values[i]
    for word in range(len(mask)):
        bits = mask[word]
        if bits != np.uint32(0xFFFFFFFF):
            for token in range(32 * word, min(32 * word + 32, len(values))):
                if not (bits >> np.uint32(token - 32 * word)) & np.uint32(1):
                    kept[token] = -np.inf


@_jit
def _num_bits(mask: Words) -> int:
    total = 0
    for word in mask:
        word = word - ((word >> np.uint32(1)) & np.uint32(0x55555555))
        word = (word & np.uint32(0x33333333)) + ((word >> np.uint32(2)) & np.uint32(0x33333333))
        word = (word + (word >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
        total += int(np.uint32(word * np.uint32(0x01010101)) >> np.uint32(24))
    return total


@_jit
def _draw_all(weights: Floats, sums: Floats, total: float, uniform_: float) -> int:
    """The index at which the running sum of the weights passes uniform_ * total."""
    goal = uniform_ * total
    num_blocks = (len(weights) + BLOCK - 1) // BLOCK
    block, before = 0, 0.0
    last_block = 0  # that has any weight
    while block < num_blocks and before + sums[block] <= goal:
        if sums[block] > 0:
            last_block = block
        before += sums[block]
        block += 1
    if block == num_blocks:
        block = last_block
    last = -1
    for i in range(block * BLOCK, min(block * BLOCK + BLOCK, len(weights))):
        if weights[i] > 0:
            last = i
            before += weights[i]
            if before > goal:
                break
    return last  # the block's sum rounds differently: at worst the last that has weight


@_jit
def _draw_filtered(
    values: Floats,
    weights: Floats,
    total: float,
    highest: Real,
    scale: Real,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform_: float,
) -> int:
    """The index drawn after top-k, top-p and min-p. Only the likeliest tokens are sorted: first all are counted into
    buckets of nearly equal logits, then those buckets are taken that hold the top k, or the mass p."""
    counts = np.zeros(NUM_BUCKETS, np.int64)
    masses = np.zeros(NUM_BUCKETS, np.float64)
    for i in range(len(values)):
        bucket = int(min((highest - values[i]) * scale * BUCKETS_PER_UNIT, NUM_BUCKETS - 1.0))
        counts[bucket] += 1
        masses[bucket] += weights[i]
    taken, mass = 0, 0.0
    last_bucket = NUM_BUCKETS - 1
    has_top_k, has_top_p = top_k < len(values), top_p < 1.0
    for bucket in range(NUM_BUCKETS):
        taken += counts[bucket]
        mass += masses[bucket]
        # With top-k all k are needed, since top-p is a share of their mass. Else a little more mass than p is: the
        # exact sum below adds in another order.
        is_enough = taken >= top_k if has_top_k else has_top_p and mass >= top_p * total * (1.0 + 1e-6)
        if not (has_top_k and has_top_p) and np.exp(-(bucket + 1) / BUCKETS_PER_UNIT) < min_p * 0.99:
            is_enough = True
        if is_enough:
            last_bucket = bucket
            break
    chosen, keys = np.empty(taken, np.int64), np.empty(taken, np.float32)
    count = 0
    for i in range(len(values)):
        if last_bucket == NUM_BUCKETS - 1 or (highest - values[i]) * scale * BUCKETS_PER_UNIT < last_bucket + 1.0:
            chosen[count], keys[count] = i, -values[i]
            count += 1
    order = stable_order(keys[:count])  # equal ones by index
    kept = min(top_k, count)
    if has_top_k:
        total = 0.0
        for place in range(kept):
            total += weights[chosen[order[place]]]
    goal = top_p * total
    mass = 0.0
    for place in range(kept):
        weight = weights[chosen[order[place]]]
        if place > 0 and weight < min_p:  # the highest has weight 1
            kept = place
            break
        mass += weight
        if has_top_p and mass >= goal:
            kept = place + 1
            break
    goal = uniform_ * mass
    before = 0.0
    for place in range(kept):
        before += weights[chosen[order[place]]]
        if before > goal:
            return int(chosen[order[place]])
    return int(chosen[order[kept - 1]])


@_jit
def draw_rows(
    logits: Floats,
    adjusted: Floats,
    masks: Words,
    best_logits: Longs,
    sources: Longs,
    options: Doubles,
    integers: Longs,
) -> Longs:
    """A token for each row of sources (logits row, adjusted row, mask row), or NO_TOKEN or NOT_FINITE.

    best_logits: where each row of logits is highest. options: temperature (0: greedy), top_p, min_p. integers:
    top_k, seed, position.
    """
    vocab = logits.shape[1]
    tokens = np.empty(len(sources), np.int64)
    kept, weights = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
    ids, bits = np.empty(vocab, np.int32), np.empty(vocab, np.int32)
    sums = np.empty(vocab // BLOCK + 1, np.float32)
    for row in range(len(sources)):
        logits_row, adjusted_row, mask_row = sources[row, 0], sources[row, 1], sources[row, 2]
        values = logits[logits_row] if adjusted_row < 0 else adjusted[adjusted_row]
        if adjusted_row < 0 and options[row, 0] == 0.0:
            # What is highest of all is highest under a mask that allows it.
            best = best_logits[logits_row]
            if mask_row < 0 or masks[mask_row, best >> 5] >> np.uint32(best & 31) & np.uint32(1):
                tokens[row] = best
                continue
        is_compact = False
        if mask_row >= 0:
            # Few tokens are moved together, so that all that follows is short; of many the others are blocked out.
            is_compact = 2 * _num_bits(masks[mask_row]) < vocab
            if is_compact:
                values = kept[: _allowed(values, masks[mask_row], kept, ids)]
            else:
                _blocked_out(values, masks[mask_row], kept)
                values = kept
        best = best_logits[logits_row] if mask_row < 0 and adjusted_row < 0 else _best(values)
        if best < 0:
            tokens[row] = best
            continue
        temperature, top_p, min_p = options[row, 0], options[row, 1], options[row, 2]
        top_k, seed, position = integers[row, 0], integers[row, 1], integers[row, 2]
        if temperature > 0.0:
            scale = np.float32(1.0 / temperature)
            used = weights[: len(values)]
            total = exponentials(values, values[best], scale, used, bits[: len(values)], sums)
            number = uniform(seed, position)
            if top_k < len(values) or top_p < 1.0 or min_p > 0.0:
                best = _draw_filtered(values, used, total, values[best], scale, top_k, top_p, min_p, number)
            else:
                best = _draw_all(used, sums, total, number)
        tokens[row] = ids[best] if is_compact else best
    return tokens
