"""The invariants of the cache, I1 to I9, on a real CUDA device; I4 as the CUDA driver answers it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

#: Pages of 64 KiB: 32 blocks fill a granule of 2 MiB.
GRANULE_BLOCKS = 32
TRANSITIONS: dict[str, Callable[[Any], Any]] = {
    "growth": lambda cache: cache.commit(200),
    "defragmentation": lambda cache: (cache.commit(100), cache.commit(200, defragment=True)),
    "preserving": lambda cache: (cache.commit(100), cache.commit(200, defragment=True, preserve=True)),
    "shrink": lambda cache: cache.commit(40, shrink=True),
    "sleep": lambda cache: (cache.release_physical(), cache.recommit()),
}


def fill(cache: Any, value: float, first: int = 0) -> None:
    """Write `value` to all committed blocks from `first` on."""
    for view in cache.views().values():
        view[first : cache.num_committed_blocks].fill_(value)


def holds(cache: Any, value: float, first: int, end: int) -> bool:
    """Whether blocks ``first..end-1`` of every layer hold `value` everywhere."""
    return all(bool((view[first:end] == value).all()) for view in cache.views().values())


@pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS)
def test_I1_addresses_stay(make_cache: Callable[..., Any], transition: Callable[[Any], Any]) -> None:
    cache = make_cache()
    before = {name: view.data_ptr() for name, view in cache.views().items()}
    cache.commit(64)
    transition(cache)
    assert {name: view.data_ptr() for name, view in cache.views().items()} == before
    committed = cache.committed_views()
    assert {name: view.data_ptr() for name, view in committed.items()} == before


def test_I1_views_of_the_whole_capacity_are_made_while_nothing_is_committed(make_cache: Callable[..., Any]) -> None:
    views = make_cache(num_blocks=1 << 20).views()
    assert [tuple(view.shape) for view in views.values()] == [(1 << 20, 8, 16, 256)] * 4
    assert all(view.is_cuda for view in views.values())


def test_I2_new_blocks_read_as_zero_also_in_memory_that_was_used_before(make_cache: Callable[..., Any]) -> None:
    dirty = make_cache()
    dirty.commit(1024)
    fill(dirty, 7.0)
    dirty.close()
    cache = make_cache()
    for blocks in (5, 40, 41, 500):  # inside a granule, across a border, inside one again
        start = cache.num_committed_blocks
        cache.commit(blocks)
        assert holds(cache, 0.0, start, blocks)
        fill(cache, 3.0, start)


def test_I3_growth_keeps_contents_and_generation(make_cache: Callable[..., Any]) -> None:
    cache = make_cache()
    cache.commit(40)
    fill(cache, 3.0)
    generation = cache.generation
    assert not cache.commit(300).remapped
    assert holds(cache, 3.0, 0, 40)
    assert holds(cache, 0.0, 40, 300)
    assert cache.generation == generation


@pytest.mark.parametrize("name", ["defragmentation", "shrink", "sleep"])
def test_I3_a_remap_discards_contents_and_raises_the_generation(make_cache: Callable[..., Any], name: str) -> None:
    cache = make_cache()
    cache.commit(64)
    fill(cache, 3.0)
    generation = cache.generation
    TRANSITIONS[name](cache)
    assert cache.generation > generation
    assert holds(cache, 0.0, 0, cache.num_committed_blocks)


def test_I3_a_preserving_defragmentation_keeps_contents_and_raises_the_generation(
    make_cache: Callable[..., Any],
) -> None:
    cache = make_cache()
    cache.commit(40)
    cache.commit(100)
    fill(cache, 3.0)
    generation = cache.generation
    assert cache.commit(150, defragment=True, preserve=True).contents_kept
    assert holds(cache, 3.0, 0, 100)
    assert holds(cache, 0.0, 100, 150)
    assert cache.generation > generation
    assert cache.chunks_per_segment() == 1


def test_I4_the_driver_reports_one_chunk_per_segment_after_defragmentation(
    make_cache: Callable[..., Any], driver: Any
) -> None:
    cache = make_cache()
    for blocks in (32, 64, 96):
        cache.commit(blocks)
    assert cache.chunks_per_segment() == 3
    assert len(driver.query_chunks(cache.address, cache.bytes_reserved)) == 3 * len(cache.segments)
    cache.commit(96, defragment=True)
    chunks = driver.query_chunks(cache.address, cache.bytes_reserved)
    assert [chunk.address for chunk in chunks] == [cache.address + segment.offset for segment in cache.segments]
    assert len({chunk.ident for chunk in chunks}) == len(cache.segments)
    assert cache.chunks_per_segment() == 1


def test_I5_I6_extents_cover_the_committed_prefix_and_cross_no_chunk(make_cache: Callable[..., Any]) -> None:
    from pdkv.errors import ExtentError

    cache = make_cache(layers=1)
    cache.commit(32)
    cache.commit(90)
    page = cache.segments[0].block_stride
    first, second = cache.extents()
    assert (first.address, first.nbytes) == (cache.address, 32 * page)
    assert (second.address, second.nbytes) == (first.end, 58 * page)
    assert cache.check_range(first.end - page, page) == first
    for address, nbytes in ((first.end - page, 2 * page), (second.end - page, 2 * page), (cache.address, 90 * page)):
        with pytest.raises(ExtentError):
            cache.check_range(address, nbytes)


def test_I7_a_commit_that_fails_leaves_all_as_it_was_and_can_be_tried_again(
    make_cache: Callable[..., Any], driver: Any
) -> None:
    from pdkv.errors import OutOfMemoryError

    info = driver.memory_info()
    cache = make_cache(num_blocks=info.total // (64 << 10))  # four layers: four times the card's memory
    cache.commit(100)
    fill(cache, 3.0)
    free, generation = driver.memory_info().free, cache.generation
    for defragment in (False, True):
        with pytest.raises(OutOfMemoryError) as failed:
            cache.commit(cache.capacity_blocks, defragment=defragment)
        assert failed.value.wanted > failed.value.free
        # The driver keeps page tables that it made on the way: 22 MiB were seen, of 139 GiB asked for.
        assert driver.memory_info().free >= free - (64 << 20)
        assert (cache.num_committed_blocks, cache.generation) == (100, generation)
        assert holds(cache, 3.0, 0, 100)
    assert cache.commit(200).blocks == 200


def test_I8_what_is_released_is_free_as_the_driver_counts_it(make_cache: Callable[..., Any], driver: Any) -> None:
    cache = make_cache()
    cache.commit(1024)  # once before: the driver takes memory of its own for page tables, and keeps it
    cache.release_physical()
    before = driver.memory_info().free
    cache.recommit()
    awake = driver.memory_info().free
    assert before - awake == cache.physical_bytes == 4 * 1024 * (64 << 10)
    report = cache.release_physical()
    assert driver.memory_info().free == before
    assert (report.released, report.given_back, report.pinned) == (before - awake, before - awake, 0)
    cache.recommit()
    assert driver.memory_info().free == awake


def test_I9_close_is_idempotent_and_a_hundred_caches_leak_nothing(make_cache: Callable[..., Any], driver: Any) -> None:
    cache = make_cache()
    cache.commit(64)
    cache.close()
    free = driver.memory_info().free
    for _ in range(100):
        cache = make_cache()
        cache.commit(64)
        cache.close()
        cache.close()
    assert driver.memory_info().free == free


def test_I9_addresses_stay_reserved_until_the_last_view_has_died(make_cache: Callable[..., Any], driver: Any) -> None:
    from pdkv.memory import _dlpack

    views = _dlpack.live_views()
    cache = make_cache()
    cache.commit(64)
    piece = cache.views()["layer2"][3:5]
    before = driver.memory_info().free
    cache.close()
    assert driver.memory_info().free - before == 4 * 64 * (64 << 10)
    assert len(driver._books.reservations) == 1
    del piece
    assert _dlpack.live_views() == views
    assert len(driver._books.reservations) == 0


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_I9_views_alive_at_interpreter_exit_crash_nothing(closed: bool) -> None:
    program = f"""
        import sys, torch
        from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
        from pdkv.memory import open_driver

        spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
        cache = GrowableKVCache(KVCacheConfig.uniform(["a", "b"], spec, 1024), open_driver("cuda"))
        cache.commit(64)
        sys.views, torch.views, builtin = cache.views(), cache.committed_views(), cache.raw_tensor()
        sys.views["a"][:64].fill_(1)
        class Late:
            def __init__(self): self.view = cache.views()["b"]
            def __del__(self): del self.view
        late = Late(); late.cycle = late
        if {closed}:
            cache.close()
        print("end of the program")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end of the program\n"), done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "Exception", "terminate", "Fatal")), done.stderr
