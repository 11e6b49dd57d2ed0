"""What the thread of an ipc transport does while the engine's own thread takes memory away."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from typing import Any

import pytest
from ipc_peers import until

from pdkv.errors import StateError, TransferTimeoutError
from pdkv.testing.transports.side import TransportSide
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import IpcTransport, hashing, wire
from pdkv_connectors.ipc.link import Link
from pdkv_connectors.ipc.loop import Loop
from pdkv_connectors.native import Kernels

pytestmark = pytest.mark.cpu

DEADLINE_S = 30.0
UNANSWERED_S = 0.3  # for what must not happen


class Gate:
    """Holds up a real function: until `opened`, whoever calls it waits, and `entered` tells of him."""

    def __init__(self, function: Any) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)
        return self._function(*arguments)


def is_gone(of: weakref.ref[Any]) -> bool:
    gc.collect()
    return of() is None


@pytest.mark.parametrize("compiled", [True, False])
def test_nothing_is_kept_of_a_peer_that_was_left(compiled: bool) -> None:
    p, d = (TransportSide(lambda: IpcTransport(compiled=compiled)) for _ in range(2))
    for name, side in (("P", p), ("D", d)):
        side.do_open()
        side.do_build(8192)
        side.do_register(name, 1)
    d.do_connect("P", 1, p.do_describe())
    route = weakref.ref(d.transport._connections.get(EngineRef("P", 1)).link)
    assert route() is not None
    d.transport.disconnect("P")
    assert until(lambda: is_gone(route), bool)  # the thread forgets the peer's socket a little later
    for side in (d, p):
        side.do_close()
        side.do_release()
        side.do_finish()


@pytest.mark.parametrize("compiled", [True, False])
def test_memory_is_not_taken_back_while_it_is_summed_for_a_peer_that_has_gone(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    p, d = (TransportSide(lambda: IpcTransport(drop_timeout_s=2.0, compiled=compiled)) for _ in range(2))
    for name, side in (("P", p), ("D", d)):
        side.do_open()
        side.do_build(8192)
        side.do_register(name, 1)
    d.do_connect("P", 1, p.do_describe())
    gate = Gate(Kernels.sum_units if compiled else hashing.hash_granules)
    if compiled:
        monkeypatch.setattr(Kernels, "sum_units", lambda *arguments: gate(*arguments))
    else:
        monkeypatch.setattr(hashing, "hash_granules", gate)
    d.do_post("P", 1, [[0, block, block] for block in range(40)], reads=True)
    assert gate.entered.wait(DEADLINE_S)
    d.do_close()

    unregistering = threading.Thread(target=p.do_unregister)
    unregistering.start()
    unregistering.join(UNANSWERED_S)
    held_up = unregistering.is_alive()
    gate.opened.set()  # where it was not held up, what follows is a segmentation fault
    unregistering.join(DEADLINE_S)

    assert held_up
    assert not unregistering.is_alive()
    p.do_release()
    for side in (p, d):
        side.do_finish()


def test_a_peer_says_that_it_dropped_memory_only_when_it_has_also_where_it_was_about_to() -> None:
    loop = Loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, drain = Link(ours, {}, EngineRef("P", 1)), Gate(lambda: None)
    link.serve(loop, drain)
    closing = threading.Thread(target=link.close)
    closing.start()
    assert drain.entered.wait(DEADLINE_S)

    wire.send(theirs, wire.Drop())
    theirs.settimeout(UNANSWERED_S)
    with pytest.raises(TimeoutError):
        wire.receive(theirs)
    drain.opened.set()
    theirs.settimeout(DEADLINE_S)

    assert wire.receive(theirs) == (wire.Dropped(), ())
    closing.join(DEADLINE_S)
    loop.stop()
    theirs.close()


def test_a_transport_whose_thread_does_not_end_says_where_it_is_and_keeps_what_it_uses() -> None:
    p = TransportSide(IpcTransport)
    p.do_open()
    p.do_build(8192)
    p.do_register("P", 1)
    transport = p.transport
    assert isinstance(transport, IpcTransport)
    pages, gate = transport._pages, Gate(lambda: None)
    assert transport._loop is not None
    assert pages is not None
    transport._loop._soon(gate)
    assert gate.entered.wait(DEADLINE_S)

    with pytest.raises(TransferTimeoutError, match=r"in wait .*, called by __call__ .*test_ipc_teardown\.py"):
        transport.close(timeout_s=0.05)
    address = pages.reserve(4096)  # it is open
    pages.unreserve(address, 4096)
    gate.opened.set()
    transport.close()

    with pytest.raises(StateError):
        pages.reserve(4096)
    p.do_finish()
