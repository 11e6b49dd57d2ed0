"""Sessions: an engine's calls in, events out, real bytes between two real caches; time moves when told to."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
import torch
from session_pair import COMPATIBILITY, LAYERS, SessionPair, contents, load, make_cache, make_session, run

import pdkv
from pdkv.errors import StateError
from pdkv.transfer import ConsumerSettings, FailCode, QuarantineSettings, Reference
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded, Recompute
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.inproc_carrier import InprocNetwork
from pdkv.transfer.session import Session
from pdkv.transfer.transport import TransferState

pytestmark = pytest.mark.cpu


def test_a_request_is_loaded_byte_for_byte_and_prefill_gets_its_blocks_back(pair: SessionPair) -> None:
    load(pair)
    assert pair.events["D"] == [Loaded("r")]
    assert pair.events["P"] == [FreeBlocks("r", (1, 2, 3))]
    assert torch.equal(contents(pair.caches[1], [7, 3, 9]), contents(pair.caches[0], [1, 2, 3]))
    assert contents(pair.caches[1], [7, 3, 9]).any()


def test_only_what_decode_lacks_is_read_and_it_lands_by_index(pair: SessionPair) -> None:
    reference = pair.offer("r", [1, 2, 3])
    pair.decode.arrived("r", reference, 48)
    pair.decode.allocated("r", run(5, first=2))
    pair.settle()
    assert torch.equal(contents(pair.caches[1], [5]), contents(pair.caches[0], [3]))
    others = [block for block in range(24) if block != 5]
    assert not contents(pair.caches[1], others).any()


def test_a_full_prefix_hit_reads_nothing_and_ends_the_lease(pair: SessionPair) -> None:
    reference = pair.offer("r", [1, 2, 3])
    pair.decode.arrived("r", reference, 48)
    pair.decode.allocated("r", ())
    pair.settle()
    assert pair.events["D"] == [Loaded("r")]
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2, 3))]


def test_many_requests_at_once_each_get_their_own_bytes(pair: SessionPair) -> None:
    references = {
        f"r{'x' * index}": pair.offer(f"r{'x' * index}", [3 * index + 1, 3 * index + 2]) for index in range(8)
    }
    for index, (request_id, reference) in enumerate(references.items()):
        pair.decode.arrived(request_id, reference, 32)
        pair.decode.allocated(request_id, run(2 * index + 2, 2 * index + 1))
    pair.settle()
    assert len(pair.of("D", Loaded)) == 8
    for index in range(8):
        theirs = contents(pair.caches[0], [3 * index + 1, 3 * index + 2])
        assert torch.equal(contents(pair.caches[1], [2 * index + 2, 2 * index + 1]), theirs)


def test_the_lease_outlives_a_long_queue_on_decode(pair: SessionPair) -> None:
    reference = pair.offer("r", [1])
    pair.decode.arrived("r", reference, 16)
    for _ in range(120):
        pair.settle(1.0)
    assert not pair.of("P", FreeBlocks)
    pair.decode.allocated("r", run(4))
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r")]


def test_blocks_that_nobody_asks_for_come_back_when_their_lease_ends(pair: SessionPair) -> None:
    pair.offer("r", [1, 2])
    pair.settle(29.0)
    assert not pair.of("P", FreeBlocks)
    pair.settle(2.0)
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]


def test_a_client_that_leaves_frees_both_sides_at_once(pair: SessionPair) -> None:
    reference = pair.offer("r", [1, 2])
    pair.decode.arrived("r", reference, 32)
    pair.settle()
    pair.decode.gone("r", "client gone")
    pair.settle()
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]
    assert pair.decode.metrics()["held_requests"] == 0


def test_a_tampered_reference_fails_its_request_and_no_other(pair: SessionPair) -> None:
    reference = pair.offer("r", [1, 2])
    wrong = msgspec.structs.replace(reference, blocks=run(1, 5))
    pair.decode.arrived("bad", wrong, 32)
    pair.decode.allocated("bad", run(2, 3))
    pair.settle()
    assert [event.code for event in pair.of("D", Failed)] == [FailCode.FORGED]
    load(pair, "good", (4, 5, 6))
    assert Loaded("good") in pair.events["D"]


def test_a_reference_passes_through_json_unharmed(pair: SessionPair) -> None:
    reference = pair.offer("r", [1, 2, 3])
    assert Reference.from_params(json.loads(json.dumps(reference.to_params()))) == reference


def test_too_many_waiting_requests_fail_with_no_room_and_prefill_is_told() -> None:
    pair = SessionPair(max_waiting=2)
    for index in range(3):
        reference = pair.offer(f"r{index}", [index + 1])
        pair.decode.arrived(f"r{index}", reference, 16)
    assert pair.decode.room().free == 0
    pair.settle()
    assert [(event.request_id, event.code) for event in pair.of("D", Failed)] == [("r2", FailCode.NO_ROOM)]
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r2", (3,))]
    pair.decode.allocated("r0", run(1))
    pair.settle()
    assert pair.decode.room().free == 1
    pair.close()


@pytest.mark.parametrize(("policy", "kind"), [("fail", Failed), ("recompute", Recompute)])
def test_a_peer_that_falls_silent_ends_the_request_by_the_policy(policy: str, kind: type) -> None:
    pair = SessionPair(decode=ConsumerSettings(on_failure=policy))
    reference = pair.offer("r", [1])
    pair.prefill.close()
    pair.decode.arrived("r", reference, 16)
    for _ in range(20):
        pair.clock.now += 1.0
        pair.events["D"] += pair.decode.poll()
    (event,) = pair.of("D", kind)
    assert event.code is FailCode.PEER_LOST
    pair.close()


def test_caches_that_do_not_fit_fail_the_request_as_incompatible(pair: SessionPair) -> None:
    other = make_cache(8, LAYERS[:2])
    decode = make_session(pair.network, "D2", "decode", other, clock=pair.clock)
    decode.arrived("r", pair.offer("r", [1]), 16)
    decode.allocated("r", run(1))
    events: list[object] = []
    for _ in range(5):
        pair.settle()
        events += decode.poll()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.code is FailCode.INCOMPATIBLE
    assert "layers" in failed.reason
    assert FreeBlocks("r", (1,)) in events
    decode.close()
    other.close()


def test_a_preempted_request_reads_again_while_its_lease_is_held() -> None:
    pair = SessionPair(decode=ConsumerSettings(hold_s=60.0))
    reference = pair.offer("r", [1, 2])
    pair.decode.arrived("r", reference, 32)
    pair.decode.allocated("r", run(3, 4))
    pair.settle()
    assert pair.decode.preempted("r")
    pair.decode.allocated("r", run(8, 9))
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r"), Loaded("r")]
    assert torch.equal(contents(pair.caches[1], [8, 9]), contents(pair.caches[0], [1, 2]))
    pair.decode.finished("r")
    pair.settle()
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]
    pair.close()


def test_preemption_without_a_lease_says_compute_it_here(pair: SessionPair) -> None:
    load(pair)
    assert not pair.decode.preempted("r")
    assert pair.decode.counters["preempted_without_lease"] == 1


class Endless(PostedTransfer):
    def _look(self) -> TransferState:
        return TransferState.RUNNING


class Stuck(InprocTransport):
    """Transfers posted while `stuck` never end."""

    stuck = True

    def _do_post(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        return Endless(self, connection, 0) if Stuck.stuck else super()._do_post(connection, pairs, reads=reads)


def test_I11_blocks_of_a_stuck_transfer_come_back_only_when_the_agent_was_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stuck, "stuck", True)
    pair = SessionPair(
        make_transport=Stuck,
        decode=ConsumerSettings(transfer_s=5.0, quarantine=QuarantineSettings(rebuild_after_s=10.0)),
    )
    reference = pair.offer("r", [1, 2])
    pair.decode.arrived("r", reference, 32)
    pair.decode.allocated("r", run(3, 4))
    for _ in range(7):
        pair.settle(1.0)
    assert [event.code for event in pair.of("D", Failed)] == [FailCode.TIMED_OUT]
    assert not pair.of("D", FreeBlocks)
    assert pair.decode.metrics()["quarantined_blocks"] == 2
    before = pair.decode.engine.generation
    Stuck.stuck = False
    for _ in range(12):
        pair.settle(1.0)
    assert pair.of("D", FreeBlocks) == [FreeBlocks("r", (3, 4))]
    assert pair.decode.engine.generation == before + 1
    load(pair, "next", (3, 4, 5))
    assert Loaded("next") in pair.events["D"]
    pair.close()


class Announcing(InprocTransport):
    """Notes what it is told of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, tuple[int, ...]]] = []

    def offer(self, block_ids: Sequence[int]) -> None:
        self.told.append(("offer", tuple(block_ids)))

    def withdraw(self, block_ids: Sequence[int]) -> None:
        self.told.append(("withdraw", tuple(block_ids)))


def test_a_transport_hears_of_offered_blocks_and_of_their_end_before_the_pool_does() -> None:
    made: list[Announcing] = []

    def make() -> Announcing:
        made.append(Announcing())
        return made[-1]

    pair = SessionPair(make_transport=make)
    reference = pair.offer("r", [1, 2])
    prefill, decode = made
    assert prefill.told == [("offer", (1, 2))]
    pair.decode.arrived("r", reference, 32)
    pair.decode.allocated("r", run(3, 4))
    pair.settle()
    assert prefill.told == [("offer", (1, 2)), ("withdraw", (1, 2))]
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]
    assert not decode.told
    pair.close()


# One engine that does both, and small things.


def test_two_engines_of_both_roles_serve_each_other() -> None:
    network = InprocNetwork()
    caches = make_cache(16), make_cache(16)
    sessions = [make_session(network, name, "both", cache) for name, cache in zip("AB", caches, strict=True)]
    for here, there in ((0, 1), (1, 0)):
        for view in caches[here].views().values():
            view[here + 1] = float(here + 1)
        reference = sessions[here].offer(f"r{here}", run(here + 1), 16)
        sessions[there].arrived(f"r{here}", reference, 16)
        sessions[there].allocated(f"r{here}", run(here + 5))
    events: list[list[object]] = [[], []]
    for _ in range(20):
        for index, session in enumerate(sessions):
            events[index] += session.poll()
    for index in (0, 1):
        assert Loaded(f"r{1 - index}") in events[index]
        assert FreeBlocks(f"r{index}", (index + 1,)) in events[index]
    assert torch.equal(contents(caches[1], [5]), contents(caches[0], [1]))
    for session in sessions:
        assert session.counters["unexpected_messages"] == 0
        session.close()


def test_push_writes_into_what_decode_has_registered() -> None:
    pair = SessionPair(decode=ConsumerSettings(mode="push"))
    early = pair.prefill.expect("r", 32)
    pair.decode.arrived("r", early, 32)
    pair.decode.allocated("r", run(5, 6))
    pair.settle()
    assert not pair.events["D"]
    pair.offer("r", [1, 2], 32)
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r")]
    assert torch.equal(contents(pair.caches[1], [5, 6]), contents(pair.caches[0], [1, 2]))
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]
    pair.close()


def test_the_wrong_side_is_refused_by_name(pair: SessionPair) -> None:
    with pytest.raises(StateError, match="one of decode"):
        pair.decode.offer("r", run(1), 16)
    with pytest.raises(StateError, match="one of prefill"):
        pair.prefill.allocated("r", run(1))


def test_a_transport_that_refuses_the_cache_leaves_nothing_registered() -> None:
    cache = make_cache(4)
    cache.release_physical()
    with pytest.raises(pdkv.PdkvError):
        LocalHost(InprocTransport, cache, "P", COMPATIBILITY)
    cache.close()


def test_a_closed_session_can_be_closed_again_and_says_so_when_started(pair: SessionPair) -> None:
    pair.decode.close()
    pair.decode.close()
    with pytest.raises(StateError):
        pair.decode.start()
    assert isinstance(pair.decode, Session)
