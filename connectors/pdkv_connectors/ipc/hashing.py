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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WORD_NBYTES = 8
"""The hash, and the kernels that compute it, take memory in words of this size."""

LANES = 2048
"""The key of word ``w`` of a page is ``keys[w % LANES] + keys[LANES + w // LANES]``, halves added without carry. A tile
of a kernel is so many words: the first term then stays in registers, and the second is one number for each tile."""

GRANULE_STATES = 16
"""States (tokens) in a granule, where a block has as many: vLLM's smallest block on GPUs."""

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


def word_keys(page_words: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 ``[page_words, 2]``: the keys of both halves of every word of a page."""
    import torch

    table = torch.tensor(key_table(page_words), dtype=torch.int64, device=device).view(torch.int32).view(-1, 2)
    word = torch.arange(page_words, device=device)
    return table[word % LANES] + table[LANES + word // LANES]


def hash_words(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """NH over the last axis.

    Args:
        words: int64 ``[..., words]``, contiguous.
        keys: int32 ``[words, 2]``, of :func:`word_keys`, for the places that the words have in their page.

    Returns:
        int64 ``[...]``, modulo 2**64.
    """
    import torch

    # Both halves at once: int32 addition wraps, and so adds no carry from one half to the other.
    mixed = (words.view(torch.int32).view(*words.shape, 2) + keys).view(torch.int64).squeeze(-1)
    low = mixed & 0xFFFFFFFF
    high = (mixed >> 32) & 0xFFFFFFFF
    return (low * high).sum(dim=-1)


def hash_granules(pages: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The hash of every granule of some pages.

    Args:
        pages: int64 ``[pages, H, N, C]``, C in words; any strides.
        keys: int32 ``[H, N, C, 2]``: the keys of the places that the words have in memory, see `convert.page_keys`.

    Returns:
        int64 ``[pages, H, N / G]``.
    """
    count, heads, states, words = pages.shape
    size = granule_states(states)
    return hash_words(
        pages.reshape(count, heads, states // size, size * words), keys.reshape(heads, states // size, size * words, 2)
    )


def page_offsets(pages: torch.Tensor) -> torch.Tensor:
    """int64 ``[H, N, C]``: how many words behind the beginning of its page each word of `pages` [.., H, N, C] lies."""
    import torch

    offsets = torch.zeros((), dtype=torch.int64, device=pages.device)
    for extent, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(extent, device=pages.device) * stride
    return offsets


def _splitmix64(number: int) -> int:
    """The `number`-th output of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from seed 0."""
    mixed = (number + 1) * _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
