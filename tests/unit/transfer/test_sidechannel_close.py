"""A side channel that one thread closes while others use it: they hear that it is closed, and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from sidechannel_net import DEADLINE_S, done

from pdkv.errors import StateError
from pdkv.transfer.sidechannel import SideChannel
from pdkv.transfer.sidechannel.queues import Outgoing
from pdkv.transfer.signals import Signal

pytestmark = pytest.mark.cpu


def test_threads_that_use_a_channel_while_two_others_close_it_hear_only_that_it_is_closed() -> None:
    wrong: list[BaseException] = []
    began = threading.Barrier(4)

    def run(work: Callable[[], object], forever: bool) -> None:
        try:
            for _ in range(20 if forever else 1):
                work()
            if forever:
                began.wait(DEADLINE_S)
            while forever:
                work()
        except StateError:
            return
        except BaseException as error:
            wrong.append(error)

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        channel = SideChannel("P/1")
        uses: list[Callable[[], object]] = [
            lambda c=channel: c.send(done("P/1", "D/1")),  # type: ignore[misc]
            channel.receive,
            lambda c=channel: c.wait(0.001),  # type: ignore[misc]
        ]
        users = [threading.Thread(target=run, args=(use, True)) for use in uses]
        closers = [threading.Thread(target=run, args=(channel.close, False)) for _ in range(2)]
        for thread in users:
            thread.start()
        began.wait(DEADLINE_S)
        for thread in closers:
            thread.start()
        for thread in users + closers:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert wrong == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_who_waits_for_a_signal_that_is_closed_goes_on_at_once() -> None:
    signal = Signal()
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(signal.wait(10 * DEADLINE_S)))
    waiter.start()
    signal.close()
    waiter.join(DEADLINE_S)

    assert answers == [True]
    assert signal.fileno() == -1


def test_a_signal_that_is_closed_leaves_the_file_alone_that_has_its_number_now() -> None:
    signal = Signal()
    number = signal.fileno()
    signal.close()
    other = Signal()
    assert other.fileno() == number, "the lowest free number is taken"

    assert not signal.set()
    signal.close()

    assert not other.wait(0)
    other.set()
    signal.clear()
    assert other.wait(0)
    other.close()


def test_a_frame_for_a_queue_that_is_closed_is_not_taken() -> None:
    outgoing = Outgoing(10, 1000)
    outgoing.signal.close()

    assert not outgoing.put("D/1", b"frame")
    assert outgoing.take_all() == ()
