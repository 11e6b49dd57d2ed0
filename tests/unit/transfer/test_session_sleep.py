"""Sessions that sleep and wake with their cache: what becomes of leases, references and words from before."""

from __future__ import annotations

import pytest
import torch
from session_pair import SessionPair, contents, load, run

from pdkv.errors import LeasesHeldError, StateError
from pdkv.transfer import FailCode
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded

pytestmark = pytest.mark.cpu


def test_prefill_sleeps_wakes_and_serves_in_a_new_generation(pair: SessionPair) -> None:
    load(pair)
    before = pair.prefill.engine.generation
    report = pair.prefill.sleep()
    assert report.given_back == report.released > 0
    assert pair.caches[0].physical_bytes == 0
    pair.settle()
    assert pair.decode.metrics()["transport"]["peers"] == []
    pair.prefill.wake()
    assert pair.prefill.engine.generation > before
    load(pair, "again", (4, 5, 6))
    assert Loaded("again") in pair.events["D"]
    assert torch.equal(contents(pair.caches[1], [4, 5, 6]), contents(pair.caches[0], [1, 2, 3]))


def test_decode_sleeps_wakes_and_reads_again(pair: SessionPair) -> None:
    load(pair)
    pair.decode.sleep()
    assert pair.caches[1].physical_bytes == 0
    pair.decode.wake()
    load(pair, "again", (4, 5, 6))
    assert torch.equal(contents(pair.caches[1], [4, 5, 6]), contents(pair.caches[0], [1, 2, 3]))


def test_a_held_lease_refuses_the_sleep_and_names_the_holder(pair: SessionPair) -> None:
    pair.offer("held", [1])
    with pytest.raises(LeasesHeldError) as refused:
        pair.prefill.sleep()
    assert refused.value.holders == ("held",)
    load(pair, "next", (4, 5, 6))
    assert Loaded("next") in pair.events["D"]


def test_an_aborting_sleep_frees_leases_that_nobody_has_asked_for(pair: SessionPair) -> None:
    pair.offer("held", [1])
    pair.prefill.sleep("abort", timeout_s=1.0)
    assert pair.prefill.poll() == (FreeBlocks("held", (1,)),)
    pair.prefill.wake()


def test_I10_a_reference_from_before_the_sleep_is_refused_after_it(pair: SessionPair) -> None:
    reference = pair.offer("old", [1])
    pair.settle(31.0)
    pair.prefill.sleep()
    pair.prefill.wake()
    pair.decode.arrived("old", reference, 16)
    pair.decode.allocated("old", run(2))
    pair.settle()
    (failed,) = pair.of("D", Failed)
    assert failed.code is FailCode.STALE_GENERATION
    assert pair.decode.metrics()["transport"].get("reads", 0) == 0


def test_a_sleeping_prefill_engine_refuses_what_it_is_asked(pair: SessionPair) -> None:
    reference = pair.offer("r", [1])
    pair.settle(31.0)
    pair.prefill.sleep()
    pair.decode.arrived("r", reference, 16)
    pair.decode.allocated("r", run(2))
    pair.settle()
    (failed,) = pair.of("D", Failed)
    assert failed.code is FailCode.ASLEEP
    with pytest.raises(StateError, match="wake it"):
        pair.prefill.offer("new", run(1), 16)


def test_I10_a_late_word_of_sleep_does_not_end_requests_of_the_woken_engine(pair: SessionPair) -> None:
    load(pair)
    carrier = pair.network.find("D")
    assert carrier is not None
    pair.prefill.sleep()
    late = [message for message in carrier.receive() if type(message).__name__ == "Refuse"]
    assert late
    pair.prefill.wake()
    reference = pair.offer("new", [1])
    pair.decode.arrived("new", reference, 16)
    pair.settle()
    pair.prefill.carrier.send(late[0])
    pair.settle()
    pair.decode.allocated("new", run(2))
    pair.settle()
    assert Loaded("new") in pair.events["D"]
    assert pair.decode.counters["late_refusals"] == 1
