"""The side channel between two pdkv engines in vLLM: real sockets, no engine."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed; make test installs it")

from pdkv_connectors.vllm import control  # noqa: E402
from pdkv_connectors.vllm.control import Arrived, ControlChannel  # noqa: E402

pytestmark = pytest.mark.cpu

DEADLINE_S = 20.0


class Side:
    """A channel and what it received."""

    def __init__(self, host: str | None, name: str) -> None:
        self.prefill: queue.Queue[bytes] = queue.Queue()
        self.decode: queue.Queue[bytes] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.rounds = 0
        self.raises = False
        self.channel = ControlChannel(host, name, self._round)
        self.channel.start()

    def _round(self, arrived: Arrived) -> float:
        self.rounds += 1
        if self.raises:
            raise RuntimeError("an error, for a test")
        for frames, received in ((arrived.for_prefill, self.prefill), (arrived.for_decode, self.decode)):
            for frame in frames:
                received.put(frame)
        for engine_id in arrived.lost:
            self.lost.put(engine_id)
        return 0.05


@pytest.fixture
def make() -> Iterator[Callable[[str | None, str], Side]]:
    sides: list[Side] = []

    def side(host: str | None, name: str) -> Side:
        sides.append(Side(host, name))
        return sides[-1]

    yield side
    for one in sides:
        one.channel.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_answer_goes_back_over_the_connection_that_the_question_came_by(
    make: Callable[[str | None, str], Side], host: str
) -> None:
    if host == "::1":
        require_ipv6()
    prefill, decode = make(host, "P/d"), make(None, "D/d")
    decode.channel.send("P/p", prefill.channel.address, b"question")
    assert prefill.prefill.get(timeout=DEADLINE_S) == b"question"
    prefill.channel.send("D/d", None, b"answer")
    assert decode.decode.get(timeout=DEADLINE_S) == b"answer"


def test_a_message_to_nobody_is_lost_and_the_channel_goes_on(make: Callable[[str | None, str], Side]) -> None:
    prefill, decode = make("127.0.0.1", "P/d"), make(None, "D/d")
    prefill.channel.send("nobody", None, b"lost")
    decode.channel.send("P/p", "tcp://no such address", b"lost")
    decode.channel.send("P/p", prefill.channel.address, b"question")
    assert prefill.prefill.get(timeout=DEADLINE_S) == b"question"
    assert decode.channel.dropped == 1


def test_a_prefill_whose_connection_stays_down_is_lost_and_one_that_comes_back_is_not(
    make: Callable[[str | None, str], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LOST_AFTER_S", 0.2)
    prefill, decode = make("127.0.0.1", "P/d"), make(None, "D/d")
    decode.channel.send("P/p", prefill.channel.address, b"question")
    prefill.prefill.get(timeout=DEADLINE_S)
    prefill.channel.close()
    assert decode.lost.get(timeout=DEADLINE_S) == "P/p"
    before = decode.rounds
    wait_until(lambda: decode.rounds > before + 10)
    assert decode.lost.empty()  # said once


def test_a_stranger_without_the_key_is_not_heard(make: Callable[[str | None, str], Side]) -> None:
    prefill, decode = make("127.0.0.1", "P/d"), make(None, "D/d")
    path, key = prefill.channel.address.split(" ")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(path)
        stranger.send(b"stranger")
        other_key = zmq.curve_keypair()[0].decode()
        decode.channel.send("P/p", f"{path} {other_key}", b"meant for another")
        decode.channel.send("P/p", f"{path} {key}", b"question")
        assert prefill.prefill.get(timeout=DEADLINE_S) == b"question"
        before = prefill.rounds
        wait_until(lambda: prefill.rounds > before + 10)
        assert prefill.prefill.empty()
    context.term()


def test_frames_larger_than_a_peer_may_send_are_not_received_and_smaller_ones_are_again(
    make: Callable[[str | None, str], Side],
) -> None:
    prefill, decode = make("127.0.0.1", "P/d"), make(None, "D/d")
    decode.channel.send("P/p", prefill.channel.address, bytes(control.MAX_MESSAGE_NBYTES + 1))

    def asked_again() -> bool:  # ZeroMQ closes the connection, and loses what else was on it
        decode.channel.send("P/p", prefill.channel.address, b"question")
        return not prefill.prefill.empty()

    wait_until(asked_again)
    assert prefill.prefill.get(timeout=DEADLINE_S) == b"question"


def test_an_error_in_one_round_is_counted_and_the_next_round_comes(
    make: Callable[[str | None, str], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "AFTER_FAILURE_S", 0.0)
    prefill, decode = make("127.0.0.1", "P/d"), make(None, "D/d")
    prefill.raises = True
    decode.channel.send("P/p", prefill.channel.address, b"lost in the error")
    wait_until(lambda: prefill.channel.failed_rounds > 0)
    prefill.raises = False

    def asked_again() -> bool:
        decode.channel.send("P/p", prefill.channel.address, b"question")
        return not prefill.prefill.empty()

    wait_until(asked_again)


def test_closing_twice_is_harmless_and_ends_the_thread(make: Callable[[str | None, str], Side]) -> None:
    side = make("127.0.0.1", "P/d")
    side.channel.close()
    side.channel.close()
    before = side.rounds
    side.channel.wake()
    assert not side.channel.is_alive
    assert side.rounds == before


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def require_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
