"""Peers that say of themselves what is not so: they are refused before anything is touched, and leave nothing open."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
from ipc_peers import registered, until

from pdkv.errors import ProtocolError
from pdkv.testing.transports.side import TransportSide
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.metadata import Metadata
from pdkv_connectors.ipc import IpcTransport, wire
from pdkv_connectors.ipc.link import Link
from pdkv_connectors.ipc.loop import Loop

pytestmark = pytest.mark.cpu

P, D = EngineRef("P", 1), EngineRef("D", 1)
replace = msgspec.structs.replace
Change = Callable[[CacheGeometry], CacheGeometry]


@pytest.fixture
def pair() -> Iterator[tuple[TransportSide, TransportSide]]:
    with registered() as sides:
        yield sides


def of_first_layer(**changes: int) -> Change:
    return lambda geometry: replace(geometry, layers=(replace(geometry.layers[0], **changes), *geometry.layers[1:]))


CHANGES: dict[str, Change] = {
    "more blocks than the board has marks for": lambda geometry: replace(geometry, num_blocks=2**31 - 1),
    "more blocks than are in its extents": lambda geometry: replace(geometry, num_blocks=geometry.num_blocks + 1),
    "layers that begin elsewhere": of_first_layer(offset=2**40),
    "layers further apart": of_first_layer(layer_stride=2**40),
    "layers before the cache": of_first_layer(layer_stride=-(2**40)),
    "larger steps between blocks": of_first_layer(block_stride=2**20),
    "an extent too many": lambda geometry: replace(
        geometry, extent_runs=(*geometry.extent_runs, replace(geometry.extent_runs[0], offset=2**41))
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_description_that_goes_beyond_the_memory_that_came_with_it_is_refused(
    change: Change, pair: tuple[TransportSide, TransportSide]
) -> None:
    p, d = pair
    honest = msgspec.msgpack.decode(p.transport.describe(), type=Metadata)
    changed = replace(honest, geometry=change(CacheGeometry.decode(honest.geometry)).encode())
    with pytest.raises(ProtocolError):
        d.transport.connect(P, msgspec.msgpack.encode(changed))
    assert until(lambda: p.do_state()["holders"], lambda holders: holders == 0) == 0
    d.do_connect("P", 1, p.do_describe())
    assert d.do_wait(d.do_post("P", 1, [[0, 39, 1], [0, 0, 2]], reads=True), 30.0) == "done"


def grant() -> tuple[wire.Grant, tuple[int, ...]]:
    fd = os.memfd_create("strange")
    os.ftruncate(fd, 4096)
    return wire.Grant(0, 4096, ((0, 4096),), True), (fd,)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_that_are_sent_to_p_are_closed_with_the_peer_that_sent_them(
    pair: tuple[TransportSide, TransportSide],
) -> None:
    p, _ = pair
    transport = p.transport
    assert isinstance(transport, IpcTransport)
    owner = transport._owner
    assert owner is not None
    before = open_files()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(30)
            stranger.connect("\0" + owner.address.name)
            message, fds = grant()
            wire.send(stranger, message, fds)
            wire.close_all(fds)
            received = wire.receive(stranger)
            assert received is not None
            assert isinstance(received[0], wire.Refuse)
    assert until(open_files, lambda found: found == before) == before


def test_descriptors_that_p_sends_later_are_closed_with_the_link() -> None:
    before = open_files()
    loop = Loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ours, {}, P)
    link.serve(loop, lambda: None)
    message, fds = grant()
    wire.send(theirs, message, fds)
    wire.close_all(fds)
    assert until(lambda: link.is_open, lambda is_open: not is_open) is False
    loop.stop()
    theirs.close()
    assert open_files() == before
