"""The Triton kernels: one that copies, converts and checks pages, and one that sums them. Both need a GPU.

An *item* is one unit (see `plan`) of one layer. Each program takes the items ``program_id, program_id + programs, ..``,
so that the same kernel fills a GPU or, launched with few programs, leaves most of it to others. Copies go through them
layer by layer, so that what runs at the same time lies in few stretches of memory.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nh(words, keys):
    """``(low + key_low) * (high + key_high)`` of 64-bit words; the halves are added without carry."""
    low = words.to(tl.uint32) + keys.to(tl.uint32)
    high = (words >> 32).to(tl.uint32) + (keys >> 32).to(tl.uint32)
    return (low.to(tl.uint64) * high.to(tl.uint64)).to(tl.int64)


@triton.jit
def _add_halves(left, right):
    low = (left.to(tl.uint32) + right.to(tl.uint32)).to(tl.uint64)
    high = ((left >> 32).to(tl.uint32) + (right >> 32).to(tl.uint32)).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64)


@triton.jit
def _quarter_to_fp8(words, inverse, INDEX: tl.constexpr):
    """One of the four bf16 in each word as the bits of an e4m3 byte: saturated at 448, NaN as 0x7f."""
    bits = ((words >> (16 * INDEX)) & 0xFFFF).to(tl.int32) << 16
    value = bits.to(tl.float32, bitcast=True) * inverse
    is_nan = value != value
    finite = tl.where(is_nan, 0.0, tl.minimum(tl.maximum(value, -448.0), 448.0))
    byte = finite.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    return tl.where(is_nan, 0x7F, byte) << (8 * INDEX)


@triton.jit
def copy_pages(
    pointers,  # int64 [3, LAYERS]: block 0's page of the slice on both sides, and its first sum
    ids,  # int32 [2, units]: units of the source, units of the destination; not read where there is one unit only
    keys,  # int64: of hashing.key_table
    inverses,  # float32 [LAYERS, 2]: 1 / scale of K and of V
    fault,  # int32 [1]: becomes 1 + the unit's place in `ids` where a sum differs
    units,
    first_source,  # the first of each
    first_target,
    LAYERS: tl.constexpr,
    TOTAL: tl.constexpr,  # words of an item
    INNER: tl.constexpr,  # rows of WORDS words, in the source's order: [outer, INNER, WORDS]
    WORDS: tl.constexpr,
    SOURCE_OUTER: tl.constexpr,  # strides in words
    SOURCE_INNER: tl.constexpr,
    SOURCE_SLOT: tl.constexpr,  # from unit to unit within a block
    SOURCE_UNITS: tl.constexpr,  # units of a block
    SOURCE_BLOCK: tl.constexpr,
    TARGET_OUTER: tl.constexpr,
    TARGET_INNER: tl.constexpr,
    TARGET_SLOT: tl.constexpr,
    TARGET_UNITS: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    SOURCE_IS_RUN: tl.constexpr,
    TARGET_IS_RUN: tl.constexpr,  # in the source's order
    FIRST_WORD: tl.constexpr,  # of the slice, in a page of the source
    KEYS_ARE_RUNS: tl.constexpr,  # the words of a tile follow each other, from a multiple of TILE or of LANES on
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    VERIFY: tl.constexpr,
    SUM_BLOCK: tl.constexpr,  # sums from block to block
    SUM_HEAD: tl.constexpr,  # sums from head to head: granules of a page
    SUM_SLOT: tl.constexpr,  # granules of a unit
    SUMS: tl.constexpr,  # of an item: heads * SUM_SLOT
    SUMS_POWER: tl.constexpr,
    QUANTIZE: tl.constexpr,
    K_WORDS: tl.constexpr,
):
    lane = tl.arange(0, TILE)
    next_unit = tl.program_id(0) % units
    next_source = tl.load(ids + next_unit, mask=units > 1, other=first_source)
    next_target = tl.load(ids + units + next_unit, mask=units > 1, other=first_target)
    for item in range(tl.program_id(0), units * LAYERS, tl.num_programs(0)):
        layer, unit = item // units, next_unit
        source_id, target_id = next_source, next_target
        # Under way while this item is copied: few programs would wait for them as long as for the words.
        next_unit = (item + tl.num_programs(0)) % units
        next_source = tl.load(ids + next_unit, mask=units > 1, other=first_source)
        next_target = tl.load(ids + units + next_unit, mask=units > 1, other=first_target)
        slot = source_id % SOURCE_UNITS
        begin = slot * SOURCE_SLOT
        source_page = tl.load(pointers + layer) + (source_id // SOURCE_UNITS).to(tl.int64) * (SOURCE_BLOCK * 8)
        source = tl.multiple_of((source_page + begin * 8).to(tl.pointer_type(tl.int64)), ALIGN)
        target_size: tl.constexpr = 4 if QUANTIZE else 8
        target_page = tl.load(pointers + LAYERS + layer)
        target_page += (target_id // TARGET_UNITS).to(tl.int64) * (TARGET_BLOCK * target_size)
        target_page += (target_id % TARGET_UNITS) * (TARGET_SLOT * target_size)
        if QUANTIZE:
            target = tl.multiple_of(target_page.to(tl.pointer_type(tl.int32)), ALIGN // 2)
            inverse_k = tl.load(inverses + 2 * layer)
            inverse_v = tl.load(inverses + 2 * layer + 1)
        else:
            target = tl.multiple_of(target_page.to(tl.pointer_type(tl.int64)), ALIGN)
        if VERIFY:
            number = tl.arange(0, SUMS_POWER)
            sums = (tl.load(pointers + 2 * LAYERS + layer)).to(tl.pointer_type(tl.int64))
            sums += (source_id // SOURCE_UNITS).to(tl.int64) * SUM_BLOCK + slot * SUM_SLOT
            expected = tl.load(sums + number // SUM_SLOT * SUM_HEAD + number % SUM_SLOT, mask=number < SUMS, other=0)
        total = tl.zeros([TILE], tl.int64)
        for start in range(0, TOTAL, TILE):
            place = start + lane
            inside = place < TOTAL
            if SOURCE_IS_RUN:
                source_word = place
            else:
                source_word = (
                    place // (INNER * WORDS) * SOURCE_OUTER + place // WORDS % INNER * SOURCE_INNER + place % WORDS
                )
            if TARGET_IS_RUN:
                target_word = place
            else:
                target_word = (
                    place // (INNER * WORDS) * TARGET_OUTER + place // WORDS % INNER * TARGET_INNER + place % WORDS
                )
            if TOTAL % TILE == 0:
                words = tl.load(source + source_word)
            else:
                words = tl.load(source + source_word, mask=inside, other=0)
            if QUANTIZE:
                inverse = tl.where(place % WORDS < K_WORDS, inverse_k, inverse_v)
                result = _quarter_to_fp8(words, inverse, 0) | _quarter_to_fp8(words, inverse, 1)
                result |= _quarter_to_fp8(words, inverse, 2) | _quarter_to_fp8(words, inverse, 3)
            else:
                result = words
            if TOTAL % TILE == 0:
                tl.store(target + target_word, result)
            else:
                tl.store(target + target_word, result, mask=inside)
            if VERIFY:
                if KEYS_ARE_RUNS:
                    first = FIRST_WORD + begin + start
                    if TILE > LANES:
                        tile_keys = tl.load(keys + LANES + first // LANES + lane // LANES)
                        word_keys = _add_halves(tl.load(keys + lane % LANES), tile_keys)
                    else:
                        first_lane = tl.multiple_of(first % LANES, TILE)
                        tile_key = tl.load(keys + LANES + first // LANES)
                        word_keys = _add_halves(tl.load(keys + first_lane + lane), tile_key)
                else:
                    in_page = FIRST_WORD + begin + source_word
                    if TOTAL % TILE == 0:
                        tile_keys = tl.load(keys + LANES + in_page // LANES)
                    else:
                        tile_keys = tl.load(keys + LANES + in_page // LANES, mask=inside, other=0)
                    word_keys = _add_halves(tl.load(keys + in_page % LANES), tile_keys)
                product = _nh(words, word_keys)
                if TOTAL % TILE == 0:
                    total += product
                else:
                    total += tl.where(inside, product, 0)
        if VERIFY:
            tl.store(fault, unit + 1, mask=tl.sum(total) != tl.sum(expected))


@triton.jit
def sum_pages(
    pointers,  # int64 [2, LAYERS]: block 0's page, and its first sum
    ids,  # int32 [blocks]
    keys,  # int64: of hashing.key_table
    blocks,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    GRANULES: tl.constexpr,  # of a head
    STATES: tl.constexpr,  # of a granule
    WORDS: tl.constexpr,  # of a state of a head
    HEAD_STRIDE: tl.constexpr,  # strides in words
    STATE_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SUM_BLOCK: tl.constexpr,  # sums from block to block
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lane = tl.arange(0, TILE)
    for item in range(tl.program_id(0), blocks * LAYERS * HEADS * GRANULES, tl.num_programs(0)):
        number = item % (HEADS * GRANULES)
        layer = item // (HEADS * GRANULES) % LAYERS
        block = tl.load(ids + item // (HEADS * GRANULES * LAYERS)).to(tl.int64)
        begin = number // GRANULES * HEAD_STRIDE + number % GRANULES * (STATES * STATE_STRIDE)
        address = tl.load(pointers + layer) + block * (BLOCK_STRIDE * 8)
        page = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), ALIGN)
        total = tl.zeros([TILE], tl.int64)
        for start in range(0, STATES * WORDS, TILE):
            place = start + lane
            inside = place < STATES * WORDS
            in_page = begin + place // WORDS * STATE_STRIDE + place % WORDS
            words = tl.load(page + in_page, mask=inside, other=0)
            tile_keys = tl.load(keys + LANES + in_page // LANES, mask=inside, other=0)
            word_keys = _add_halves(tl.load(keys + in_page % LANES), tile_keys)
            total += tl.where(inside, _nh(words, word_keys), 0)
        sums = tl.load(pointers + LAYERS + layer).to(tl.pointer_type(tl.int64))
        tl.store(sums + block * SUM_BLOCK + number, tl.sum(total))
