"""Sessions read early where their transport says that it fences READs from the peer, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from session_pair import SessionPair, contents, load, run

from pdkv.transfer.actions import FreeBlocks, Loaded
from pdkv.transfer.inproc import InprocTransport

pytestmark = pytest.mark.cpu


class Unfenced(InprocTransport):
    fences = False


def test_a_request_from_a_known_peer_is_read_before_prefill_answers_and_loaded_when_it_has(pair: SessionPair) -> None:
    load(pair)
    reference = pair.offer("early", [4, 5])
    pair.decode.arrived("early", reference, 32)
    pair.decode.allocated("early", run(11, 12))
    assert torch.equal(contents(pair.caches[1], [11, 12]), contents(pair.caches[0], [4, 5]))
    assert Loaded("early") not in pair.decode.poll()
    pair.settle()
    assert Loaded("early") in pair.events["D"]
    assert pair.decode.counters["early_reads"] == 1


def test_a_client_that_leaves_during_a_read_that_can_be_ended_gets_its_blocks_back_at_once() -> None:
    pair = SessionPair(make_transport=lambda: InprocTransport(copies_per_poll=1))
    load(pair)
    reference = pair.offer("early", [4, 5])
    pair.decode.arrived("early", reference, 32)
    pair.decode.allocated("early", run(11, 12))
    assert pair.decode.metrics()["transfers"] == 1
    pair.decode.gone("early", "client gone")
    assert pair.decode.metrics()["transfers"] == pair.decode.metrics()["quarantined_blocks"] == 0
    assert pair.decode.poll() == (FreeBlocks("early", (11, 12)),)
    pair.settle()
    assert FreeBlocks("early", (4, 5)) in pair.events["P"]
    pair.close()


def test_over_a_transport_that_does_not_fence_reads_nothing_is_read_before_prefill_has_answered() -> None:
    pair = SessionPair(make_transport=Unfenced)
    load(pair)
    reference = pair.offer("later", [4, 5])
    pair.decode.arrived("later", reference, 32)
    pair.decode.allocated("later", run(11, 12))
    pair.decode.poll()
    assert not contents(pair.caches[1], [11, 12]).any()
    pair.settle()
    assert Loaded("later") in pair.events["D"]
    assert torch.equal(contents(pair.caches[1], [11, 12]), contents(pair.caches[0], [4, 5]))
    assert pair.decode.counters["early_reads"] == 0
    pair.close()
