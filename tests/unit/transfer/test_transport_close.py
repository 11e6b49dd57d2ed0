"""Closing where something cannot be ended: the rest is, the caller hears of it, and can call again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from session_pair import COMPATIBILITY, make_cache, make_session

import pdkv
from pdkv.errors import StateError, TransferTimeoutError, TransportError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.inproc_carrier import InprocNetwork
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import TransferState, Transport
from pdkv_connectors.auto import AutoTransport

pytestmark = pytest.mark.cpu

P, Q, D = EngineRef("P", 1), EngineRef("Q", 1), EngineRef("D", 1)


class Stubborn(InprocTransport):
    """Fails at what `refuses` names, as long as it does."""

    def __init__(self) -> None:
        super().__init__(copies_per_poll=1)
        self.refuses: set[str] = set()
        self.left: list[str] = []

    def _do_unregister(self) -> None:
        self._maybe_refuse("unregister")
        super()._do_unregister()

    def _do_disconnect(self, connection: Connection[str]) -> None:
        self._maybe_refuse(connection.peer.engine_id)
        self.left.append(connection.peer.engine_id)

    def _do_stop(self, timeout_s: float) -> None:
        if "stop" in self.refuses:
            raise TransferTimeoutError("stop")

    def _maybe_refuse(self, what: str) -> None:
        if what in self.refuses:
            raise TransportError(what)


@pytest.fixture
def caches() -> Iterator[tuple[pdkv.GrowableKVCache, ...]]:
    made = tuple(make_cache(40) for _ in range(3))
    yield made
    for cache in made:
        cache.close()


@pytest.fixture
def decode(caches: tuple[pdkv.GrowableKVCache, ...]) -> Iterator[Stubborn]:
    """Connected to P and Q, whose transports live as long."""
    peers = [InprocTransport(), InprocTransport()]
    transport = Stubborn()
    transport.register(caches[2], D)
    for peer, engine, cache in zip(peers, (P, Q), caches, strict=False):
        peer.register(cache, engine)
        transport.connect(engine, peer.describe())
    yield transport
    transport.refuses.clear()
    for one in (transport, *peers):
        one.close()


def test_close_ends_the_rest_where_unregistering_fails_says_so_and_can_be_called_again(decode: Stubborn) -> None:
    transfer = decode.read(P, [BlockPair(0, block, block) for block in (1, 3, 5)])
    decode.refuses.add("unregister")
    for _ in range(2):
        with pytest.raises(TransportError, match="unregister"):
            decode.close()
    assert transfer.poll() is TransferState.FAILED
    assert sorted(decode.left) == ["P", "Q"]
    assert decode.describe_state()["registered"], "the memory may still be reached"

    decode.refuses.clear()
    decode.close()
    decode.close()

    assert not decode.describe_state()["registered"]
    assert sorted(decode.left) == ["P", "Q"]


@pytest.mark.parametrize("end", [InprocTransport.close, InprocTransport.unregister])
def test_a_peer_that_cannot_be_let_go_of_keeps_neither_the_others_nor_the_registration(
    decode: Stubborn, end: object
) -> None:
    decode.refuses = {"P"}
    with pytest.raises(TransportError, match="P"):
        end(decode)  # type: ignore[operator]
    assert decode.left == ["Q"]
    assert not decode.describe_state()["registered"]

    decode.refuses.clear()
    decode.close()

    assert decode.left == ["Q", "P"]


def test_the_first_failure_is_the_one_that_is_raised(decode: Stubborn) -> None:
    decode.refuses = {"Q", "unregister"}
    with pytest.raises(TransportError, match="Q"):
        decode.close()


def test_transfers_that_could_not_be_stopped_are_not_said_to_have_ended(decode: Stubborn) -> None:
    transfer = decode.read(P, [BlockPair(0, block, block) for block in (1, 3, 5)])
    decode.refuses.add("stop")
    with pytest.raises(TransferTimeoutError):
        decode.close()
    assert decode.describe_state()["running"] == 1

    decode.refuses.clear()
    decode.close()

    assert decode.describe_state()["running"] == 0
    assert transfer.poll() is TransferState.FAILED


def test_a_new_connection_counts_where_the_old_one_cannot_be_let_go_of(
    decode: Stubborn, caches: tuple[pdkv.GrowableKVCache, ...]
) -> None:
    newer, again = InprocTransport(), EngineRef("P", 2)
    newer.register(caches[0], again)
    decode.refuses.add("P")
    decode.connect(again, newer.describe())
    assert decode.read(again, [BlockPair(0, 1, 1)]).wait(10) is TransferState.DONE
    newer.close()


def test_a_host_whose_transport_could_not_be_closed_does_not_forget_it(
    caches: tuple[pdkv.GrowableKVCache, ...],
) -> None:
    """Else the second attempt to sleep would succeed, and release memory that peers still reach."""
    transport = Stubborn()
    host = LocalHost(lambda: transport, caches[0], "P", COMPATIBILITY)
    transport.refuses.add("unregister")
    for _ in range(2):
        with pytest.raises(TransportError):
            host.close()
        assert host.registration is None
        with pytest.raises(StateError):
            host.register()

    transport.refuses.clear()
    host.close()

    assert not transport.describe_state()["registered"]


def test_a_session_whose_transport_could_not_be_closed_leaves_its_network_and_closes_it_later(
    caches: tuple[pdkv.GrowableKVCache, ...],
) -> None:
    transport, network = Stubborn(), InprocNetwork()
    session = make_session(network, "P", "prefill", caches[0], make_transport=lambda: transport)
    session.start()
    transport.refuses.add("unregister")
    with pytest.raises(TransportError):
        session.close()
    assert network.find("P") is None

    transport.refuses.clear()
    session.close()

    assert not transport.describe_state()["registered"]


def test_auto_closes_the_transports_beside_one_that_cannot_be_closed(
    caches: tuple[pdkv.GrowableKVCache, ...],
) -> None:
    made: dict[str, Stubborn] = {}

    def maker(called: str) -> Transport:
        class Named(Stubborn):
            name = called

        return made.setdefault(called, Named())

    auto = AutoTransport({"ipc": lambda: maker("ipc"), "nixl": lambda: maker("nixl")})
    auto.register(caches[0], P)
    made["ipc"].refuses.add("unregister")
    with pytest.raises(TransportError):
        auto.unregister()
    assert not made["nixl"].describe_state()["registered"]
    with pytest.raises(TransportError):
        auto.close()

    made["ipc"].refuses.clear()
    auto.close()

    assert not made["ipc"].describe_state()["registered"]
