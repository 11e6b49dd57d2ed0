"""`auto` takes the best transport that works with each peer, and says which and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

import pdkv
from pdkv.errors import GeometryError, ProtocolError, StateError, TransferTimeoutError, TransportError
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import TransferState, Transport
from pdkv_connectors.auto import AutoTransport

pytestmark = pytest.mark.cpu

P, D = EngineRef("P", 1), EngineRef("D", 1)
PAIRS = [BlockPair(0, 1, 2)]


def named(
    transport: str, *, writes: bool = True, fails: Exception | None = None, verifying: bool = False
) -> Callable[[], Transport]:
    """An in-process transport in the place of another one; `fails` when it connects."""

    class Named(InprocTransport):
        name = transport
        can_write = writes
        verifies = verifying

        def _read_metadata(self, *arguments: Any) -> Any:
            if fails is not None:
                raise fails
            return super()._read_metadata(*arguments)

    return Named


def unusable() -> Transport:
    raise TransportError("there is no such library")


ALL = {"ipc": named("ipc", writes=False), "nixl": named("nixl"), "ucx": named("ucx")}


@pytest.fixture
def caches() -> Iterator[tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache]]:
    spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=4, head_size=8, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["layer"], spec, num_blocks=8, layout=pdkv.KVCacheLayout.LBNHC)
    driver = pdkv.open_driver("host", granule=4096)
    with pdkv.GrowableKVCache(config, driver) as source, pdkv.GrowableKVCache(config, driver) as destination:
        source.commit(8)
        destination.commit(8)
        yield source, destination


Caches = tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache]


def met(caches: Caches, prefill: AutoTransport, decode: AutoTransport) -> dict[str, Any]:
    """Let D connect to P and read a block; what D chose."""
    prefill.register(caches[0], P)
    decode.register(caches[1], D)
    decode.connect(P, prefill.describe())
    assert decode.read(P, PAIRS).wait(10) is TransferState.DONE
    chosen: dict[str, Any] = decode.describe_state()["chosen"]["P"]
    return chosen


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench(lambda: AutoTransport({"nixl": named("nixl")})) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_auto_keeps_to_the_rule(bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, bench)


def test_ipc_is_taken_on_the_same_host(caches: Caches, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = met(caches, AutoTransport(ALL), AutoTransport(ALL))
    assert chosen == {"transport": "ipc", "verified": False, "reason": "the peer is on this host"}
    assert "Peer P is reached by ipc" in caplog.text


def test_nixl_is_taken_between_hosts_and_ucx_is_not_even_registered(caches: Caches) -> None:
    decode = AutoTransport(ALL, host="another")
    chosen = met(caches, AutoTransport(ALL), decode)
    assert chosen == {"transport": "nixl", "verified": False, "reason": "ipc: the peer is on another host"}
    state = decode.describe_state()
    assert state["unavailable"] == {"ucx": "nixl is used in its place"}
    assert state["chosen_nixl"] == 1
    assert "fallbacks" not in state


@pytest.mark.parametrize("makers", [{**ALL, "nixl": unusable}, {name: ALL[name] for name in ("ipc", "ucx")}])
def test_ucx_is_taken_where_there_is_no_nixl(caches: Caches, makers: Mapping[str, Any]) -> None:
    chosen = met(caches, AutoTransport(makers), AutoTransport(makers, host="another"))
    assert chosen["transport"] == "ucx"
    assert "ipc: the peer is on another host; nixl: " in chosen["reason"]


@pytest.mark.parametrize("error", [TransportError("no socket"), TransferTimeoutError("silence")])
def test_I13_a_transport_that_should_work_and_does_not_is_counted_and_logged(
    caches: Caches, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    decode = AutoTransport({**ALL, "ipc": named("ipc", fails=error)})
    chosen = met(caches, AutoTransport(ALL), decode)
    assert chosen == {"transport": "nixl", "verified": False, "reason": f"ipc: {error}"}
    assert decode.describe_state()["fallbacks"] == 1
    assert "unverified_fallbacks" not in decode.describe_state()
    assert f"Peer P cannot be reached by ipc: {error}" in caplog.text


def test_I13_verification_that_is_lost_with_a_transport_is_counted_logged_and_seen_in_the_state(
    caches: Caches, caplog: pytest.LogCaptureFixture
) -> None:
    no_sums = TransportError("the peer keeps no sums, which this side is to verify")
    decode = AutoTransport({**ALL, "ipc": named("ipc", fails=no_sums, verifying=True)})
    assert met(caches, AutoTransport(ALL), decode)["verified"] is False
    assert decode.describe_state()["unverified_fallbacks"] == 1
    assert "What peer P sends is not verified" in caplog.text


def test_nothing_is_lost_where_what_is_taken_verifies_or_where_nothing_would_have_verified(caches: Caches) -> None:
    broken = TransportError("no socket")
    makers = {"ipc": named("ipc", fails=broken, verifying=True), "nixl": named("nixl", verifying=True)}
    decode = AutoTransport(makers)
    assert met(caches, AutoTransport(ALL), decode)["verified"] is True
    assert "unverified_fallbacks" not in decode.describe_state()
    elsewhere = AutoTransport({**ALL, "ipc": named("ipc", verifying=True)}, host="another")
    elsewhere.register(caches[1], EngineRef("E", 1))
    prefill = AutoTransport(ALL)
    prefill.register(caches[0], EngineRef("Q", 1))
    elsewhere.connect(EngineRef("Q", 1), prefill.describe())
    assert elsewhere.describe_state()["chosen"]["Q"]["verified"] is False
    assert "unverified_fallbacks" not in elsewhere.describe_state()


def test_the_real_ipc_and_nixl_without_a_word_meet_a_peer_that_does_not_verify_over_nixl(caches: Caches) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")
    prefill, decode = AutoTransport(verify=False), AutoTransport()
    try:
        prefill.register(caches[0], P)
        decode.register(caches[1], D)
        decode.connect(P, prefill.describe())
        state = decode.describe_state()
        assert (state["chosen"]["P"]["transport"], state["chosen"]["P"]["verified"]) == ("nixl", False)
        assert "the peer keeps no sums" in state["chosen"]["P"]["reason"]
        assert (state["fallbacks"], state["unverified_fallbacks"]) == (1, 1)
    finally:
        decode.close()
        prefill.close()


def test_it_converts_as_long_as_there_is_a_transport_that_does(caches: Caches) -> None:
    class Converting(InprocTransport):
        name = "ipc"
        converts = True

    with_ipc, without = AutoTransport({**ALL, "ipc": Converting}), AutoTransport({"nixl": ALL["nixl"]})
    assert (with_ipc.converts, without.converts) == (True, False)
    with_ipc.register(caches[0], P)
    assert with_ipc.converts
    gone = AutoTransport({**ALL, "ipc": unusable})
    gone.register(caches[1], D)
    assert not gone.converts


@pytest.mark.parametrize("busy", ["ipc", "nixl", None])
def test_it_needs_progress_while_one_of_its_transports_does(caches: Caches, busy: str | None) -> None:
    class Busy(InprocTransport):
        needs_progress = True

    transport = AutoTransport({**ALL, **({busy: Busy} if busy else {})})
    assert not transport.needs_progress
    transport.register(caches[0], P)
    assert transport.needs_progress is (busy is not None)
    transport.unregister()
    assert not transport.needs_progress


def test_heads_are_asked_of_the_transport_that_can_take_them_and_else_the_peer_is_refused(caches: Caches) -> None:
    asked = []

    class Converting(InprocTransport):
        name = "ipc"
        converts = True

        def _do_connect(self, *arguments: Any) -> str:
            asked.append(arguments[-1])
            return super()._do_connect(*arguments)

    prefill, wanted = AutoTransport({**ALL, "ipc": Converting}), HeadSlice(1, source=1)
    prefill.register(caches[0], P)
    decode = AutoTransport({**ALL, "ipc": Converting})
    decode.register(caches[1], D)
    decode.connect(P, prefill.describe(), heads=wanted)
    assert asked == [wanted]
    elsewhere = AutoTransport({**ALL, "ipc": named("ipc", fails=TransportError("no socket"))})
    elsewhere.register(caches[1], D)
    with pytest.raises(GeometryError, match=r"nixl transport moves all heads.*What else there is: ipc: no socket"):
        elsewhere.connect(P, prefill.describe(), heads=wanted)


def test_what_cannot_write_is_not_taken_for_push(caches: Caches) -> None:
    prefill, decode = AutoTransport(ALL), AutoTransport(ALL, writes=True)
    assert met(caches, prefill, decode) == {"transport": "nixl", "verified": False, "reason": "ipc: it cannot write"}
    assert decode.write(P, PAIRS).wait(10) is TransferState.DONE
    with pytest.raises(TransportError, match="writes=True"):
        AutoTransport(ALL).write(P, PAIRS)


def test_engines_without_a_transport_in_common_are_told_what_each_has(caches: Caches) -> None:
    prefill, decode = AutoTransport({"nixl": ALL["nixl"]}), AutoTransport({"ucx": ALL["ucx"]})
    with pytest.raises(TransportError, match="nixl: it is not wanted here; ucx: the peer does not have it"):
        met(caches, prefill, decode)


def test_where_nothing_can_be_used_registering_fails_and_says_why(caches: Caches) -> None:
    transport = AutoTransport({"nixl": unusable, "ucx": unusable})
    with pytest.raises(TransportError, match="nixl: there is no such library; ucx: there is no such library"):
        transport.register(caches[0], P)
    with pytest.raises(StateError):
        transport.describe()


def test_a_peer_that_comes_back_on_another_transport_is_left_on_the_old_one(caches: Caches) -> None:
    prefill, decode = AutoTransport(ALL), AutoTransport(ALL)
    met(caches, prefill, decode)
    prefill.unregister()
    prefill = AutoTransport({"nixl": ALL["nixl"]})
    prefill.register(caches[0], EngineRef("P", 2))
    decode.connect(EngineRef("P", 2), prefill.describe())
    state = decode.describe_state()
    assert state["chosen"]["P"]["transport"] == "nixl"
    assert state["below"]["ipc"]["peers"] == []
    decode.disconnect("P")
    assert decode.describe_state()["peers"] == []


@pytest.mark.parametrize("metadata", [b"", b"\xc1", msgspec.msgpack.encode(["host", {"nixl": 5}])])
def test_what_is_no_description_is_refused(caches: Caches, metadata: bytes) -> None:
    transport = AutoTransport(ALL)
    transport.register(caches[1], D)
    with pytest.raises(ProtocolError):
        transport.connect(P, metadata)


def test_the_real_transports_between_two_processes_choose_ipc(tmp_path: Any) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")
    with TransportBench("pdkv_connectors.auto:AutoTransport", processes=2) as bench:
        run_transport_check("moves_exactly_the_named_blocks", bench)
        run_transport_check("unregister_is_a_fence", bench)
