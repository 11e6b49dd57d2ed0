"""Sessions over a transport that verifies: what was damaged on the way fails its request and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checked_inproc import CheckedInproc, nothing
from session_pair import SessionPair, contents, run

from pdkv.transfer import ConsumerSettings, FailCode
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.session import Session

pytestmark = pytest.mark.cpu


@pytest.fixture(params=["pull", "push"])
def pair(request: pytest.FixtureRequest) -> Iterator[SessionPair]:
    made = SessionPair(make_transport=CheckedInproc, decode=ConsumerSettings(mode=request.param))
    yield made
    made.close()


def transport_of(session: Session) -> CheckedInproc:
    assert isinstance(session.host, LocalHost)
    assert isinstance(session.host._transport, CheckedInproc)
    return session.host._transport


def posting(pair: SessionPair) -> CheckedInproc:
    """The transport of the side that posts transfers."""
    pulls = pair.decode.settings.decode.mode == "pull"
    return transport_of(pair.decode if pulls else pair.prefill)


def move(pair: SessionPair, request_id: str, source: list[int], destination: tuple[int, ...]) -> None:
    num_tokens = 16 * len(source)
    if pair.decode.settings.decode.mode == "pull":
        pair.decode.arrived(request_id, pair.offer(request_id, source), num_tokens)
        pair.decode.allocated(request_id, run(*destination))
    else:
        pair.decode.arrived(request_id, pair.prefill.expect(request_id, num_tokens), num_tokens)
        pair.decode.allocated(request_id, run(*destination))
        pair.settle()
        pair.offer(request_id, source)
    pair.settle()


def test_a_request_whose_kv_was_damaged_on_the_way_fails_and_is_counted_and_the_next_one_is_loaded(
    pair: SessionPair,
) -> None:
    transport = posting(pair)

    def damage() -> None:
        next(iter(pair.caches[1].views().values()))[6].view(torch.int32)[0, 0, 0] ^= 1
        transport.on_arrival = nothing

    transport.on_arrival = damage
    move(pair, "r", [1, 2], (5, 6))
    assert [event.code for event in pair.of("D", Failed)] == [FailCode.TRANSFER_FAILED]
    assert not pair.of("D", Loaded)
    assert transport_of(pair.decode).counts["checksum_failures"] == 1
    assert transport.counts["failed"] == 1
    assert pair.decode.metrics()["transport"]["checksum_failures"] == 1
    pair.settle(60.0)
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (1, 2))]
    move(pair, "next", [3, 4], (7, 8))
    assert pair.of("D", Loaded) == [Loaded("next")]
    assert torch.equal(contents(pair.caches[1], [7, 8]), contents(pair.caches[0], [3, 4]))
    assert transport_of(pair.decode).counts["checksum_failures"] == 1


def test_blocks_that_prefill_uses_again_are_summed_again(pair: SessionPair) -> None:
    for number in range(1, 4):
        name = "r" * number  # what the blocks hold depends on it
        move(pair, name, [1, 2], (5, 6))
        assert pair.of("D", Loaded)[-1] == Loaded(name)
        assert torch.equal(contents(pair.caches[1], [5, 6]), contents(pair.caches[0], [1, 2]))
        pair.settle(1.0)
    for session in (pair.prefill, pair.decode):
        assert not {"checksum_failures", "rewritten"} & session.metrics()["transport"].keys()
