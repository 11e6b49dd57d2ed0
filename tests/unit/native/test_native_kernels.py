"""The compiled kernels beside numpy: the same bytes, the same sums, and nothing else touched, on any x86-64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv_connectors.ipc.hashing import hash_words, word_keys
from pdkv_connectors.native import Kernels, Numbers, UnitShape
from pdkv_connectors.native.compiled import optimized

pytestmark = pytest.mark.cpu

#: For the CPU at hand, and for any: what AVX-512, AVX or SSE2 make of it is not the same code.
KERNELS = {"host": Kernels(), "baseline": Kernels("x86-64")}
of_each_cpu = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
AROUND = 0xA5


def addresses(memory: npt.NDArray[Any], offsets: Any) -> Numbers:
    return np.asarray(offsets, np.int64) + memory.ctypes.data


def random_bytes(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@of_each_cpu
@given(data=st.data(), streams=st.booleans())
def test_runs_are_copied_to_the_byte_whatever_their_sizes_and_alignments(
    kernels: Kernels, data: st.DataObject, streams: bool
) -> None:
    runs = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70), st.integers(0, 70)), max_size=6))
    source = random_bytes(4096, len(runs))
    found = np.full(4096, AROUND, np.uint8)
    wanted = found.copy()
    from_, to, nbytes, at = [], [], [], 0
    for size, gap, first in runs:
        at += gap
        from_.append(first + size)
        to.append(at)
        nbytes.append(size)
        wanted[at : at + size] = source[first + size : first + 2 * size]
        at += size
    kernels.copy_runs(addresses(found, to), addresses(source, from_), np.array(nbytes, np.int64), streams=streams)
    assert found.tobytes() == wanted.tobytes()


class Units:
    """Units of two memories, as drawn: what their bytes and their sums must be by numpy."""

    def __init__(self, data: st.DataObject) -> None:
        draw, small = data.draw, st.integers(1, 3)
        heads, granules, rows, self.count = (draw(small) for _ in range(4))
        words = draw(st.integers(1, 40))
        inside = draw(st.booleans(), label="heads inside of rows at the source")
        to_inside = draw(st.booleans(), label="heads inside of rows at the destination")
        nbytes = 8 * words
        from_ = self._strides(inside, heads, granules * rows, nbytes)
        to = self._strides(to_inside, heads, granules * rows, nbytes + 8 * draw(st.integers(0, 9)))
        self.shape = UnitShape(
            heads=heads,
            from_head=from_[0],
            to_head=to[0],
            table_head=8 * granules,
            granules=granules,
            from_granule=rows * from_[1],
            to_granule=rows * to[1],
            rows=rows,
            from_row=from_[1],
            to_row=to[1],
            nbytes=nbytes,
        )
        page = heads * granules * rows * nbytes
        self.source = random_bytes(self.count * page + 64, page)
        self.at = draw(st.integers(0, 63)) + np.arange(self.count) * page
        self.to_page = heads * granules * rows * max(to[0], to[1], nbytes)
        self.destination = np.full(self.count * self.to_page + 64, AROUND, np.uint8)
        self.to_at = draw(st.integers(0, 63)) + np.arange(self.count)[::-1] * self.to_page
        self.keys = word_keys(page // 8)
        self.wanted, self.sums = self._by_numpy()

    def _strides(self, inside: bool, heads: int, rows: int, nbytes: int) -> tuple[int, int]:
        return (nbytes, heads * nbytes) if inside else (rows * nbytes, nbytes)

    def _by_numpy(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        shape, wanted = self.shape, self.destination.copy()
        sums = np.zeros((self.count, shape.heads, shape.granules), np.int64)
        for unit, head, granule in np.ndindex(sums.shape):
            words, keys = [], []
            for row in range(shape.rows):
                within = head * shape.from_head + granule * shape.from_granule + row * shape.from_row
                to = self.to_at[unit] + head * shape.to_head + granule * shape.to_granule + row * shape.to_row
                piece = self.source[self.at[unit] + within :][: shape.nbytes]
                wanted[to : to + shape.nbytes] = piece
                words.append(np.frombuffer(piece.tobytes(), np.int64))
                keys.append(self.keys[within // 8 :][: shape.nbytes // 8])
            sums[unit, head, granule] = hash_words(np.concatenate(words)[None], np.concatenate(keys))[0]
        return wanted, sums

    @property
    def places(self) -> tuple[Numbers, Numbers]:
        return addresses(self.destination, self.to_at), addresses(self.source, self.at)

    def key_places(self) -> Numbers:
        return addresses(self.keys, np.zeros(self.count))

    def sum_places(self, table: npt.NDArray[np.int64]) -> Numbers:
        return addresses(table, np.arange(self.count) * table[0].nbytes)


@of_each_cpu
@given(data=st.data(), streams=st.booleans())
def test_units_become_what_numpy_makes_of_them(kernels: Kernels, data: st.DataObject, streams: bool) -> None:
    units = Units(data)
    kernels.copy_units(*units.places, units.shape.numbers(), streams=streams)
    assert units.destination.tobytes() == units.wanted.tobytes()


@of_each_cpu
@given(data=st.data())
def test_sums_are_those_of_numpy(kernels: Kernels, data: st.DataObject) -> None:
    units = Units(data)
    table = np.zeros_like(units.sums)
    kernels.sum_units(units.places[1], units.key_places(), units.sum_places(table), units.shape.numbers())
    assert (table == units.sums).all()


@of_each_cpu
@given(data=st.data(), streams=st.booleans())
def test_units_are_copied_and_found_right_in_one_go(kernels: Kernels, data: st.DataObject, streams: bool) -> None:
    units = Units(data)
    places = (*units.places, units.key_places(), units.sum_places(units.sums))
    assert kernels.copy_and_check_units(*places, units.shape.numbers(), streams=streams) is None
    assert units.destination.tobytes() == units.wanted.tobytes()


@of_each_cpu
@given(data=st.data(), streams=st.booleans())
def test_one_bit_that_differs_anywhere_names_its_unit(kernels: Kernels, data: st.DataObject, streams: bool) -> None:
    units = Units(data)
    shape, draw = units.shape, data.draw
    unit = draw(st.integers(0, units.count - 1))
    head, granule, row, byte = (
        draw(st.integers(0, size - 1)) for size in (shape.heads, shape.granules, shape.rows, shape.nbytes)
    )
    place = head * shape.from_head + granule * shape.from_granule + row * shape.from_row + byte
    units.source[units.at[unit] + place] ^= 1 << draw(st.integers(0, 7))
    places = (*units.places, units.key_places(), units.sum_places(units.sums))
    assert kernels.copy_and_check_units(*places, shape.numbers(), streams=streams) == unit


@of_each_cpu
def test_a_wrong_sum_of_the_last_granule_of_the_last_head_is_seen(kernels: Kernels) -> None:
    source, keys = np.arange(4 * 64, dtype=np.int64), word_keys(4 * 16)
    shape = UnitShape(2, 256, 256, 16, 2, 128, 128, 2, 64, 64, 64).numbers()
    table = np.zeros((4, 2, 2), np.int64)
    found = np.zeros_like(source)
    to, from_ = (addresses(memory, np.arange(4) * 512) for memory in (found, source))
    key, sums = addresses(keys, np.zeros(4)), addresses(table, np.arange(4) * 32)
    kernels.sum_units(from_, key, sums, shape)
    assert kernels.copy_and_check_units(to, from_, key, sums, shape, streams=True) is None
    table[2, 1, 1] += 1
    assert kernels.copy_and_check_units(to, from_, key, sums, shape, streams=True) == 2


def test_code_for_any_x86_64_uses_nothing_newer() -> None:
    module, machine = optimized("x86-64")
    assembly = machine.emit_assembly(module)
    assert "movnt" in assembly
    assert "xmm" in assembly
    assert not any(register in assembly for register in ("ymm", "zmm"))
