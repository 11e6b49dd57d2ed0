"""ipc on the host moves only while it is polled: nobody pauses then, and a small request takes few polls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from ipc_peers import registered

from pdkv.testing.transports.side import TransportSide
from pdkv.transfer.transport import TransferState
from pdkv_connectors.ipc import IpcTransport
from pdkv_connectors.ipc.columns import FEW
from pdkv_connectors.ipc.transfers import ANSWER_TIMEOUT_S, IpcTransfer

pytestmark = pytest.mark.cpu

LAYERS, PAGE_NBYTES = 16, 65_536
MANY = [[0, block, 39 - block] for block in range(40)]  # 40 MiB


@pytest.fixture
def pair() -> Iterator[tuple[TransportSide, TransportSide]]:
    """P, which has offered all of its blocks, and D, connected to it."""
    with registered(PAGE_NBYTES, layers=LAYERS) as (p, d):
        p.transport.offer(range(40))
        d.do_connect("P", 1, p.do_describe())
        yield p, d


def post(d: TransportSide, pairs: list[list[int]]) -> IpcTransfer:
    transfer = d._transfers[d.do_post("P", 1, pairs, reads=True)]
    assert isinstance(transfer, IpcTransfer)
    return transfer


def test_who_waits_for_it_does_not_sleep_between_polls(
    pair: tuple[TransportSide, TransportSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = post(pair[1], MANY)

    def slept(seconds: float) -> None:
        pytest.fail("it slept while it could have copied")

    monkeypatch.setattr(time, "sleep", slept)
    assert transfer.wait(60) is TransferState.DONE


def test_it_says_that_polling_moves_it_once_it_has_begun(pair: tuple[TransportSide, TransportSide]) -> None:
    p, d = pair
    assert post(d, MANY).moves_in_poll
    p.transport.withdraw([3])
    asked = post(d, [[0, 3, 3]])
    assert not asked.moves_in_poll, "P has to answer first"
    assert asked.wait(30) is TransferState.DONE


def test_the_sums_of_one_block_of_many_layers_take_a_few_polls(pair: tuple[TransportSide, TransportSide]) -> None:
    transfer, polls = post(pair[1], [[0, 5, 6]]), 1
    while transfer.poll() is TransferState.RUNNING:
        polls += 1
    assert polls <= 2 + LAYERS * PAGE_NBYTES // 2**20


class LaterClock:
    """So many seconds later than it is."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def monotonic(self) -> float:
        return time.monotonic() + self._by_s


@contextmanager
def answers_nobody(side: TransportSide) -> Iterator[None]:
    """The thread that answers peers is at something else."""
    assert isinstance(side.transport, IpcTransport)
    assert side.transport._loop is not None
    go_on = threading.Event()
    side.transport._loop._soon(lambda: go_on.wait(30))
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("num_blocks", [FEW, FEW + 1])
@pytest.mark.parametrize("then", ["withdrawn", "offered again", "damaged"])
def test_a_block_that_its_owner_took_back_and_wrote_under_a_read_is_not_taken_for_a_damaged_one(
    pair: tuple[TransportSide, TransportSide], then: str, num_blocks: int
) -> None:
    p, d = pair
    transfer = post(d, MANY[:num_blocks])
    if then != "damaged":
        p.do_withdraw([7])
    p.do_mark(7, 1)
    if then == "offered again":
        p.do_offer([7])
        p.do_mark(7, 2)  # so that the sums differ; what D copied before was as wrong
    assert transfer.wait(60) is TransferState.FAILED
    wanted = "the bytes of block 7 are not those" if then == "damaged" else "block 7 was written again by its owner"
    assert wanted in transfer.reason
    counts = [d.transport.describe_state().get(name, 0) for name in ("rewritten", "checksum_failures")]
    assert counts == [int(then != "damaged"), int(then == "damaged")]


@pytest.mark.parametrize("how", ["its time is over", "it is abandoned"])
def test_I12_a_transfer_whose_owner_does_not_answer_ends_and_leaves_nothing_behind(
    pair: tuple[TransportSide, TransportSide], how: str
) -> None:
    p, d = pair
    p.do_withdraw([3])
    with answers_nobody(p):
        transfer = post(d, [[0, 3, 4]])
        assert transfer.poll() is TransferState.RUNNING
        if how == "it is abandoned":
            assert transfer.abandon()
        else:
            transfer._clock = LaterClock(ANSWER_TIMEOUT_S - 1)
            assert transfer.poll() is TransferState.RUNNING
            transfer._clock = LaterClock(ANSWER_TIMEOUT_S + 1)
            assert transfer.poll() is TransferState.FAILED
            assert "the peer has not answered for 40 s" in transfer.reason
    again = post(d, [[0, 3, 4]])
    assert again.wait(30) is TransferState.DONE  # its answer came after that of the one that was given up
    assert again._route.link._tickets == {}


def test_I12_an_owner_that_takes_no_messages_keeps_nobody_waiting_who_asks_for_more_than_it_has_room_for(
    pair: tuple[TransportSide, TransportSide],
) -> None:
    p, d = pair
    p.do_withdraw(list(range(40)))
    with answers_nobody(p):
        transfers = [post(d, [[0, block, block] for block in range(20)]) for _ in range(300)]
        last, late = transfers[-2:]
        assert last._unasked
        late._clock = LaterClock(ANSWER_TIMEOUT_S + 1)
        assert late.poll() is TransferState.FAILED
        assert all(transfer.abandon() for transfer in transfers[:-2])
    assert last.wait(60) is TransferState.DONE
    assert last._route.link._tickets == {}


def test_an_owner_need_not_be_called_but_while_offers_wait_to_be_announced(
    pair: tuple[TransportSide, TransportSide],
) -> None:
    transport = pair[0].transport
    assert isinstance(transport, IpcTransport)
    assert not transport.needs_progress
    assert transport._offers is not None
    transport._offers._pending.append(([], np.asarray([3], np.int32)))  # as on CUDA, until the sums are there
    assert transport.needs_progress
    transport.progress()
    assert not transport.needs_progress
