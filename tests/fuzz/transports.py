"""What a peer's transport can say: descriptions, the socket of ipc on both sides, both ends of UCX's connections."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

import pdkv
from pdkv.errors import PdkvError, ProtocolError, TransportError
from pdkv.memory import Reservation
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.counters import Counters
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import TransferState
from pdkv_connectors.auto.description import Description
from pdkv_connectors.checking import wire as sums
from pdkv_connectors.checking.keeper import SumKeeper
from pdkv_connectors.ipc import IpcTransport
from pdkv_connectors.ipc import wire as ipc
from pdkv_connectors.ipc.link import Link, _Grants
from pdkv_connectors.ipc.loop import Loop
from pdkv_connectors.ipc.owner import GrantedMemory, Owner
from pdkv_connectors.nixl import notes
from pdkv_connectors.nixl import transport as nixl
from pdkv_connectors.ucx import transport as ucx
from pdkv_connectors.ucx import wire as ucx_wire
from pdkv_connectors.ucx.link import AskingLink
from pdkv_connectors.ucx.memory import Memory
from pdkv_connectors.ucx.server import Server

P, D = EngineRef("P", 1), EngineRef("D", 1)
KEY = b"\1" * 32
BLOCKS = 30
pack = msgspec.msgpack.encode


def make_cache() -> pdkv.GrowableKVCache:
    spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=16, head_size=8, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["a", "b", "c"], spec, num_blocks=BLOCKS, layout=pdkv.KVCacheLayout.LBNHC)
    cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=4096))
    cache.commit(BLOCKS // 2)
    cache.commit(BLOCKS)
    return cache


@contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    """None stays open; threads of other targets may take a moment for theirs."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 2.0
    while (after := len(os.listdir("/proc/self/fd"))) > before:
        if time.monotonic() > deadline:
            raise AssertionError(f"{before} descriptors were open, and {after} are afterwards")
        time.sleep(0.01)


class Descriptions:
    """A registered ipc engine meets peers that describe themselves as the frames say; where one is believed, it reads.

    The honest peer's socket is there, so that a description can be true but for what was changed.
    """

    def __init__(self) -> None:
        self._caches = make_cache(), make_cache()
        self._p, self._d = IpcTransport(drop_timeout_s=0.1), IpcTransport(drop_timeout_s=0.1)
        self._p.register(self._caches[0], P)
        self._d.register(self._caches[1], D)
        honest = self._p.describe()
        uses = {"ipc": honest, "nixl": pack(("nixl", P, b"", pack(("agent", b"metadata"))))}
        addresses = ipc.Address(1, "m", "n", KEY, True)
        self.seeds = [
            honest,
            pack(Description("host", uses)),
            pack(nixl._Own("agent", b"metadata")),
            pack(ucx._Own("127.0.0.1", 5000, KEY)),
            pack(addresses),
            CacheGeometry.of(self._caches[0]).encode(),
        ]

    def run(self, frames: list[bytes]) -> None:
        for frame in frames:
            readers: tuple[Callable[[bytes], object], ...] = (
                Description.decode,
                nixl.read_own,
                ucx.read_own,
                ipc.read_address,
                CacheGeometry.decode,
            )
            for read in readers:
                with suppress(ProtocolError):
                    read(frame)
            with suppress(PdkvError):
                self._meet(frame)

    def _meet(self, frame: bytes) -> None:
        self._d.connect(P, frame, timeout_s=0.5)
        try:
            last = self._d._connections.get(P).geometry.num_blocks - 1
            for pairs in ([BlockPair(0, 1, 2)], [BlockPair(0, last // 2, 3), BlockPair(0, last, 4)]):
                with suppress(PdkvError):
                    if self._d.read(P, pairs).wait(2.0) is TransferState.RUNNING:
                        raise AssertionError("a transfer goes on for ever")
        finally:
            self._d.disconnect("P")


class AtOnce(Loop):
    """The ipc loop without its thread: sockets are served when the input says so, and closed at once."""

    def __init__(self) -> None:
        return

    def add(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        return

    def close(self, connection: socket.socket) -> None:
        connection.close()


class IpcSocket:
    """Every frame is one packet, to P, to D while it waits for memory, and to D that has it."""

    def __init__(self) -> None:
        self._cache = make_cache()
        self._spare = Reservation(self._cache.driver, 4096)
        self._spare.add([pdkv.memory.Piece(0, 4096)])
        self._d = EngineRef("D", 1)
        self.seeds = [
            ipc._encoder.encode(message)
            for message in (
                ipc.Hello(1, KEY, D, P),
                ipc.Grant(0, 4096, ((0, 4096),), False),
                ipc.Grant(2, 4096, ((0, 4096),), True),
                ipc.Refuse("no"),
                ipc.Offer(1, 0, (1, 2)),
                ipc.Offered(1, ""),
                ipc.Drop(),
                ipc.Dropped(),
            )
        ]

    def run(self, frames: list[bytes]) -> None:
        with no_descriptor_leaks():
            self._to_owner(frames)
            self._to_link(frames)
            self._as_grants(frames)

    def _to_owner(self, frames: list[bytes]) -> None:
        memories = {0: GrantedMemory(self._cache.bytes_reserved, self._cache.export_fds())}
        owner = Owner(AtOnce(), P, memories, self._offer, Counters())
        owner.address = msgspec.structs.replace(owner.address, key=KEY)
        ours, theirs = _pair()
        for frame in frames:
            _give(theirs, frame, self._spare if len(frame) % 3 == 0 else None)
            if ours.fileno() >= 0:
                owner._serve(ours)
            _drain(theirs)
        theirs.close()
        if ours.fileno() >= 0:
            owner._serve(ours)
        if owner.num_peers:
            raise AssertionError("who has gone is still a peer")
        owner.drop_all(0.0)
        ours.close()

    def _to_link(self, frames: list[bytes]) -> None:
        ours, theirs = _pair()
        link = Link(ours, {}, P)
        link.serve(AtOnce(), lambda: None)
        for frame in frames:
            _give(theirs, frame, self._spare if len(frame) % 3 == 0 else None)
            link._on_message()
            with suppress(PdkvError):
                link.ask_for(0, (1,))
        link.close()
        theirs.close()

    def _as_grants(self, frames: list[bytes]) -> None:
        ours, theirs = _pair()
        grants = _Grants()
        try:
            for frame in frames:
                _give(theirs, frame, self._spare)
                grants.take(ipc.receive(ours))
            for memory in grants.map(dict.fromkeys(range(3), self._cache.driver)).values():
                memory.close()
        except (PdkvError, TimeoutError):
            pass
        finally:
            grants.close()
            ours.close()
            theirs.close()

    @staticmethod
    def _offer(group: int, blocks: Any) -> None:
        if group or max(blocks) >= BLOCKS:
            raise ProtocolError("there is no such block")


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0.0)
    theirs.settimeout(0.0)
    return ours, theirs


def _give(connection: socket.socket, frame: bytes, memory: Reservation | None) -> None:
    fds = [fd for _, fd in memory.export_fds()] if memory is not None else []
    try:
        socket.send_fds(connection, [frame or b"\0"], fds)
    except OSError:
        return
    finally:
        ipc.close_all(tuple(fds))


def _drain(connection: socket.socket) -> None:
    with suppress(OSError):
        while True:
            data, fds, _, _ = socket.recv_fds(connection, ipc.MAX_PACKET_NBYTES, ipc.MAX_FDS)
            ipc.close_all(tuple(fds))
            if not data:
                return


class Endpoint:
    """UCX's, as far as a connection uses it: what is received are the frames, each with its header."""

    def __init__(self, frames: list[bytes]) -> None:
        self._parts = deque[bytes]()
        for frame in frames:
            header = ucx_wire._MAGIC + len(frame).to_bytes(4, "little")
            self._parts += (frame,) if len(frame) == ucx_wire.HEADER_NBYTES else (header, frame)

    async def recv(self, buffer: Any, tag: int) -> None:
        await asyncio.sleep(0)
        if tag != 0:
            return  # bytes of blocks: whatever is there
        if not self._parts:
            raise ConnectionError("the peer has gone")
        part = self._parts.popleft()[: len(buffer)]
        buffer[: len(part)] = part

    async def send(self, buffer: Any, tag: int) -> None:
        await asyncio.sleep(0)

    def abort(self) -> None:
        self._parts.clear()


class UcxConnection:
    """The server's end, and the end that asks; and what nixl carries as notifications: the same about sums."""

    def __init__(self) -> None:
        self._cache = make_cache()
        geometry = CacheGeometry.of(self._cache)
        self._memory = Memory(self._cache, geometry.extents())
        self._keeper = SumKeeper(self._cache, geometry, P, Counter())
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._wrong: list[Any] = []
        one = np.array([4096], "<i8").tobytes()
        ids = sums.write_ids(np.array([1, 2], np.int32))
        questions = [sums.encode(sums.Wanted(P, 0, ids)), sums.encode(sums.Compare(P, 0, ids, bytes(8 * 2 * 3)))]
        answers = [sums.encode(answer) for answer in (sums.Sums(bytes(48)), sums.Compared(-1), sums.Refused("no"))]
        self.seeds = [
            ucx_wire.encode_control(control)[1]
            for control in (
                ucx_wire.Hello(KEY),
                ucx_wire.Ask(1, P, True, one, one),
                ucx_wire.Ask(2, P, False, one, one),
                ucx_wire.Go(0),
                ucx_wire.Go(1),
                ucx_wire.No(1, "no"),
                ucx_wire.End(1),
                *(ucx_wire.Question(3, body) for body in questions),
                *(ucx_wire.Answer(1, body) for body in answers),
                ucx_wire.Bye("bye"),
            )
        ]
        self.seeds += [pack(notes.Question(1, questions[0], b"agent")), pack(notes.Answer(1, answers[0]))]

    def run(self, frames: list[bytes]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(self._serve(frames), 30))
        self._loop.run_until_complete(asyncio.wait_for(self._ask(frames), 30))
        for frame in frames:
            for read in (sums.decode_answer, notes.read_note):
                with suppress(ProtocolError):
                    read(frame)
        if self._wrong:
            raise AssertionError(self._wrong)

    async def _serve(self, frames: list[bytes]) -> None:
        server = Server(None, self._memory, P, Counter(), self._keeper.answer)
        server.token = KEY
        await asyncio.ensure_future(server._connected(Endpoint([self.seeds[0], *frames])))
        while server._tasks:
            await asyncio.wait(server._tasks)

    async def _ask(self, frames: list[bytes]) -> None:
        link = AskingLink(Endpoint(frames), verifies=True)
        nbytes = np.array([4096], np.int64)
        ask = ucx_wire.Ask(0, P, True, nbytes.tobytes(), nbytes.tobytes())
        with suppress(TransportError, ProtocolError):
            await link.transfer(ask, self._memory, nbytes, nbytes)
            sums.decode_answer(await link.ask(b"question"))
        await asyncio.wait([link._reader])
        if link.closed is None:
            raise AssertionError("the connection is open and nobody reads it")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._wrong.append(context)
