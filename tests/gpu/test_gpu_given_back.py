"""Whether memory is free again, as the CUDA driver counts it: awake, asleep, and with a peer that maps it (I8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_peer import GpuPeer, serving

pytestmark = pytest.mark.gpu

PAGE = 64 << 10
BLOCKS = 4096
NBYTES = BLOCKS * PAGE


@pytest.fixture
def cache(make_cache: Callable[..., Any]) -> Any:
    """One layer; committed and released once, so that the driver's own tables are there already."""
    cache = make_cache(layers=1, num_blocks=BLOCKS)
    cache.commit(BLOCKS)
    cache.release_physical()
    return cache


def lend(cache: Any, peer: GpuPeer, folder: Path) -> None:
    """Let the peer map every chunk of the cache; no descriptor is left open here."""
    exported = cache._backing._reservation.export_fds()
    fds, sizes = [fd for _, fd in exported], [piece.nbytes for piece, _ in exported]
    try:
        with serving(folder / "fds", fds, sizes):
            assert peer.ask("import", path=str(folder / "fds")) == len(fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_I8_without_a_peer_all_of_it_is_given_back(cache: Any, driver: Any, record: Any) -> None:
    asleep = driver.memory_info().free
    cache.recommit()
    awake = driver.memory_info().free
    report = cache.release_physical()
    after = driver.memory_info().free
    record("given back", case="no peer", awake=asleep - awake, freed=after - awake, **_fields(report))
    assert asleep - awake == after - awake == NBYTES
    assert _fields(report) == {"released": NBYTES, "given_back": NBYTES, "pinned": 0}


def test_I8_what_a_peer_still_maps_is_reported_as_pinned_and_comes_back_when_it_lets_go(
    cache: Any, driver: Any, record: Any, tmp_path: Path
) -> None:
    with GpuPeer("importer", tmp_path) as peer:
        peer.ask("free")  # its context is there now, and takes no memory later
        cache.recommit()
        lend(cache, peer, tmp_path)
        awake = driver.memory_info().free
        report = cache.release_physical()
        pinned = driver.memory_info().free
        record("given back", case="a peer maps it", awake=NBYTES, freed=pinned - awake, **_fields(report))
        assert _fields(report) == {"released": NBYTES, "given_back": 0, "pinned": NBYTES}
        assert pinned == awake
        peer.ask("let_go")
        freed = driver.memory_info().free - awake
        record("given back", case="the peer let go", freed=freed)
        assert freed == NBYTES


def test_I8_what_a_peer_maps_comes_back_when_it_is_killed(cache: Any, driver: Any, record: Any, tmp_path: Path) -> None:
    with GpuPeer("importer", tmp_path) as peer:
        peer.ask("free")
        cache.recommit()
        lend(cache, peer, tmp_path)
        awake = driver.memory_info().free
        assert cache.release_physical().pinned == NBYTES
        peer.process.kill()
        peer.process.wait(30)
        freed = driver.memory_info().free - awake
        record("given back", case="the peer was killed", freed=freed)
        assert freed >= NBYTES  # and the peer's own context


def test_an_exported_descriptor_alone_pins_the_memory(cache: Any, driver: Any, record: Any) -> None:
    cache.recommit()
    fds = [fd for _, fd in cache._backing._reservation.export_fds()]
    report = cache.release_physical()
    record("given back", case="an open descriptor", **_fields(report))
    assert report.pinned == NBYTES
    free = driver.memory_info().free
    for fd in fds:
        os.close(fd)
    assert driver.memory_info().free - free == NBYTES


def _fields(report: Any) -> dict[str, int]:
    return {"released": report.released, "given_back": report.given_back, "pinned": report.pinned}
