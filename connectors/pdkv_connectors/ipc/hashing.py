"""A 64-bit hash over pages, cheap enough to be computed while they are copied.

NH, the hash inside UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, CRYPTO '99, section 4.2) with 32-bit words: each
pair of words, one 64-bit word of memory, adds ``(low + key_low) * (high + key_high)`` modulo 2**64. A change of any
words goes unseen with a probability of at most 2**-32. Keys depend on the place of a word in its page, so that words or
pieces that changed places are seen too. They are public: this finds damage, not forgers.

The sum over a page is the sum over its parts, whatever the order. So a page is summed in *granules*, the states
(tokens) ``g * G .. g * G + G - 1`` of one head each, and whoever takes a part of a page, or writes it down in another
order, can check what was taken.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

WORD_NBYTES = 8
"""The hash, and the kernels that compute it, take memory in words of this size."""

LANES = 2048
"""The key of word ``w`` of a page is ``keys[w % LANES] + keys[LANES + w // LANES]``, halves added without carry. A tile
of a kernel is so many words: the first term then stays in registers, and the second is one number for each tile."""

GRANULE_STATES = 16
"""States (tokens) in a granule, where a block has as many: vLLM's smallest block on GPUs."""

_CACHED_NBYTES = 1 << 17  # hashed at once, so that what lies between two steps stays in a core's own cache
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def granule_states(num_states: int) -> int:
    """States in each granule of pages of `num_states`: the largest divisor of both, up to GRANULE_STATES."""
    return next(size for size in range(min(GRANULE_STATES, num_states), 0, -1) if num_states % size == 0)


@cache
def key_table(page_words: int) -> tuple[int, ...]:
    """Keys for pages of so many 64-bit words, as signed numbers: LANES by place in a tile, then one for each tile."""
    tiles = -(-page_words // LANES)
    return tuple(_signed(_splitmix64(number)) for number in range(LANES + tiles))


def word_keys(page_words: int) -> npt.NDArray[np.uint32]:
    """uint32 ``[page_words, 2]``: the keys of both halves of every word of a page."""
    table = np.array(key_table(page_words), np.int64).view(np.uint32).reshape(-1, 2)
    word = np.arange(page_words)
    keys: npt.NDArray[np.uint32] = table[word % LANES] + table[LANES + word // LANES]
    return keys


def hash_words(words: npt.NDArray[np.int64], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """NH over the last axis.

    Args:
        words: int64 ``[rows, .., words]``, contiguous.
        keys: uint32 ``[.., words, 2]``, of :func:`word_keys`, for the places that the words have in their page; equal
            for all rows, or ``[rows, .., words, 2]``.

    Returns:
        int64 ``[rows, ..]``, modulo 2**64.
    """
    result = np.empty(words.shape[:-1], np.uint64)
    halves, flat = words.view(np.uint32), keys.reshape(*keys.shape[:-2], -1)
    step = max(1, _CACHED_NBYTES * len(words) // max(words.nbytes, 1))
    for first in range(0, len(words), step):
        part = slice(first, first + step)
        # Both halves at once: 32-bit addition wraps, and so adds no carry from one half to the other.
        mixed = (halves[part] + (flat[part] if flat.ndim == words.ndim else flat)).view(np.uint64)
        low = mixed & _LOW
        mixed >>= _HALF
        np.einsum("...i,...i->...", low, mixed, out=result[part])
    return result.view(np.int64)


def hash_granules(pages: npt.NDArray[np.int64], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The hash of every granule of some pages.

    Args:
        pages: int64 ``[pages, H, N, C]``, C in words; any strides.
        keys: uint32 ``[H, N, C, 2]``: the keys of the places that the words have in memory, see `convert.page_keys`.

    Returns:
        int64 ``[pages, H, N / G]``.
    """
    count, heads, states, words = pages.shape
    size = granule_states(states)
    split = np.ascontiguousarray(pages).reshape(count, heads, states // size, size * words)
    return hash_words(split, keys.reshape(heads, states // size, size * words, 2))


def _splitmix64(number: int) -> int:
    """The `number`-th output of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from seed 0."""
    mixed = (number + 1) * _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
