"""Who uses the sockets of a side channel: its own thread, who sends, and who is called when something arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sidechannel_net import DEADLINE_S, connecting_to, done, meet, numbers, receive, until

from pdkv.transfer.messages import AnyMessage
from pdkv.transfer.sidechannel import Limits, SideChannel, SideChannelSettings

pytestmark = pytest.mark.cpu

#: Nobody looks again for so long: what the descriptors do not tell in time is not seen in time.
PATIENT = Limits(refresh_every_s=4 * DEADLINE_S)


@pytest.fixture
def pair() -> Iterator[tuple[SideChannel, SideChannel]]:
    with (
        SideChannel("P/1", SideChannelSettings(limits=PATIENT)) as prefill,
        SideChannel("D/1", connecting_to(prefill.address, limits=PATIENT)) as decode,
    ):
        meet(prefill, decode)
        yield prefill, decode


class HeldUp:
    """Holds a channel's own thread up, from its next wait on, between its last look at the sockets and the wait."""

    def __init__(self, channel: SideChannel) -> None:
        self.is_held_up, self.go_on = threading.Event(), threading.Event()
        self._real = channel._loop._poll
        channel._loop._poll = self  # type: ignore[assignment]

    def poll(self, timeout: float) -> object:
        self.is_held_up.set()
        assert self.go_on.wait(DEADLINE_S)
        return self._real.poll(timeout)


@contextmanager
def at_rest(channel: SideChannel) -> Iterator[None]:
    """The channel's own thread waits, and uses no socket whatever comes."""
    held_up = HeldUp(channel)
    channel._outgoing.signal.set()  # so that it waits anew
    assert held_up.is_held_up.wait(DEADLINE_S)
    try:
        yield
    finally:
        held_up.go_on.set()


def test_what_is_sent_goes_out_from_the_thread_that_sends_it(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair
    seen: list[threading.Thread] = []
    send_to = decode._loop._send_to

    def spy(engine_id: str, frame: bytes) -> None:
        seen.append(threading.current_thread())
        send_to(engine_id, frame)

    decode._loop._send_to = spy  # type: ignore[method-assign]
    with at_rest(decode):
        assert decode.send(done("D/1", "P/1", 1))
        assert numbers(receive(prefill)) == [1]
    assert seen == [threading.current_thread()]


def test_what_is_sent_while_the_sockets_are_in_use_goes_out_afterwards_in_order(
    pair: tuple[SideChannel, SideChannel],
) -> None:
    prefill, decode = pair
    with decode._loop._lock:
        assert decode.send(done("D/1", "P/1", 1))
        assert decode.send(done("D/1", "P/1", 2))
    assert numbers(receive(prefill, 2)) == [1, 2]


def test_what_is_put_aside_while_the_channel_wakes_up_for_it_goes_out(
    pair: tuple[SideChannel, SideChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    set_signal = decode._outgoing.signal.set

    def set_and_be_suspended() -> bool:
        was_set = set_signal()
        decode._loop._lock.release()
        time.sleep(0.2)  # long enough to wake up, find nothing, and wait again
        return was_set

    decode._loop._lock.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(decode._outgoing.signal, "set", set_and_be_suspended)
        assert decode.send(done("D/1", "P/1", 1))
    assert numbers(receive(prefill)) == [1]


def test_no_message_is_overlooked_whichever_threads_send_and_receive(pair: tuple[SideChannel, SideChannel]) -> None:
    rounds, threads = 300, 3
    errors: list[AssertionError] = []

    def send(channel: SideChannel, receiver: str, first: int) -> None:
        try:
            for number in range(rounds):
                assert channel.send(done(channel.engine_id, receiver, first + number))
                if number % 7 == 0:
                    time.sleep(1e-4)  # so that the other thread sleeps again
        except AssertionError as error:
            errors.append(error)

    senders = [
        threading.Thread(target=send, args=(here, there.engine_id, rounds * number))
        for here, there in (pair, pair[::-1])
        for number in range(threads)
    ]
    for thread in senders:
        thread.start()
    for channel in pair:
        assert sorted(numbers(receive(channel, rounds * threads))) == list(range(rounds * threads))
    for thread in senders:
        thread.join(DEADLINE_S)
    assert not errors


def test_input_that_only_the_thread_that_sends_was_told_of_is_received(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair
    held_up = HeldUp(decode)
    assert prefill.send(done("P/1", "D/1", 1))
    assert held_up.is_held_up.wait(DEADLINE_S)
    assert prefill.send(done("P/1", "D/1", 2))
    time.sleep(0.2)  # it has reached decode's socket
    assert decode.send(done("D/1", "P/1", 3))
    held_up.go_on.set()
    assert numbers(receive(decode, 2)) == [1, 2]


def test_input_that_came_while_arrivals_were_answered_is_received(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair
    taken: list[AnyMessage] = []

    def answer() -> bool:
        taken.extend(decode.receive())
        if len(taken) == 1:
            assert prefill.send(done("P/1", "D/1", 2))
            time.sleep(0.2)  # it has reached decode's socket
            assert decode.send(done("D/1", "P/1", 3))
        return True

    decode.call_on_arrival(answer)
    assert prefill.send(done("P/1", "D/1", 1))
    until(lambda: numbers(taken) == [1, 2])


def test_answers_to_questions_that_follow_each_other_all_come_in_time(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair

    def answer() -> bool:
        return all(prefill.send(done("P/1", "D/1", number)) for number in numbers(list(prefill.receive())))

    prefill.call_on_arrival(answer)
    for number in range(500):
        assert decode.send(done("D/1", "P/1", number))
        assert numbers(receive(decode)) == [number]


def test_arrivals_are_taken_by_the_channels_own_thread_where_somebody_takes_them(
    pair: tuple[SideChannel, SideChannel],
) -> None:
    prefill, decode = pair
    taken: list[AnyMessage] = []
    by: list[threading.Thread] = []

    def take() -> bool:
        by.append(threading.current_thread())
        taken.extend(prefill.receive())
        return True

    prefill.call_on_arrival(take)
    assert decode.send(done("D/1", "P/1", 4))
    until(lambda: numbers(taken) == [4])
    assert by == [prefill._loop]
    assert not prefill.wait(0.0)


def test_arrivals_that_are_not_taken_are_announced(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair
    prefill.call_on_arrival(lambda: False)
    assert decode.send(done("D/1", "P/1", 4))
    assert numbers(receive(prefill)) == [4]


def test_a_handler_that_says_it_took_what_it_left_loses_nothing(pair: tuple[SideChannel, SideChannel]) -> None:
    prefill, decode = pair
    prefill.call_on_arrival(lambda: True)
    assert decode.send(done("D/1", "P/1", 4))
    assert numbers(receive(prefill)) == [4]


def test_a_channel_that_was_closed_takes_nothing_more_from_a_thread_that_sends_late() -> None:
    channel = SideChannel("P/1")
    channel.close()
    assert not channel._loop.send("D/1", b"frame")
