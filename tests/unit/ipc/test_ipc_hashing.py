"""The hash: against its definition in whole numbers, additive over parts, and what it finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv_connectors.ipc.convert import page_keys
from pdkv_connectors.ipc.hashing import LANES, granule_states, hash_granules, hash_words, key_table, word_keys
from pdkv_connectors.ipc.plan import PageShape

pytestmark = pytest.mark.cpu

HALF = 2**32 - 1


def by_definition(words: list[int]) -> int:
    """NH of words that begin a page, without numpy."""
    table = [key % 2**64 for key in key_table(len(words))]
    total = 0
    for place, word in enumerate(words):
        lane, tile = table[place % LANES], table[LANES + place // LANES]
        low = (word & HALF) + (lane & HALF) + (tile & HALF) & HALF
        high = (word >> 32) + (lane >> 32) + (tile >> 32) & HALF
        total += low * high
    return total % 2**64


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40))
def test_it_is_nh_over_pairs_of_32_bit_words(words: list[int]) -> None:
    found = hash_words(np.array([words], np.uint64).view(np.int64), word_keys(len(words)))
    assert int(found[0]) % 2**64 == by_definition(words)


def test_keys_differ_between_tiles_and_places() -> None:
    keys = word_keys(3 * LANES).view(np.uint64)
    assert len(np.unique(keys)) == 3 * LANES
    assert (
        by_definition([1] * (LANES + 7))
        == int(hash_words(np.ones((1, LANES + 7), np.int64), word_keys(LANES + 7))[0]) % 2**64
    )


@pytest.mark.parametrize("hnc", [True, False])
def test_granules_of_a_page_add_up_to_the_hash_of_its_bytes_as_they_lie(hnc: bool) -> None:
    heads, states, content = 3, 48, 64
    strides = (states * content, content) if hnc else (content, heads * content)
    shape = PageShape(heads, states, content, *strides, heads * states * content)
    lying = np.random.default_rng(1).integers(-(2**62), 2**62, (5, shape.nbytes // 8))
    page = lying.reshape(5, heads, states, 8) if hnc else lying.reshape(5, states, heads, 8).swapaxes(1, 2)
    granules = hash_granules(page, page_keys(shape))
    assert granules.shape == (5, heads, states // 16)
    assert (granules.sum((1, 2)) == hash_words(lying, word_keys(shape.nbytes // 8))).all()


@pytest.mark.parametrize(("states", "size"), [(16, 16), (64, 16), (8, 8), (24, 12), (7, 7), (1, 1), (17, 1)])
def test_granules_divide_a_page(states: int, size: int) -> None:
    assert granule_states(states) == size


def test_no_flip_swap_or_stale_piece_goes_unseen() -> None:
    random = np.random.default_rng(2)
    words = random.integers(-(2**62), 2**62, (1, 4096))
    keys = word_keys(4096)
    right = int(hash_words(words, keys)[0])
    for number in range(2000):
        damaged = words.copy()
        first, second = random.choice(4096, 2, replace=False)
        if number % 3 == 0:
            damaged[0, first] ^= np.int64(1) << np.int64(random.integers(0, 64))
        elif number % 3 == 1:
            damaged[0, [first, second]] = damaged[0, [second, first]]
        else:
            damaged[0, first : first + 16] = random.integers(-(2**62), 2**62, len(damaged[0, first : first + 16]))
        assert int(hash_words(damaged, keys)[0]) != right
