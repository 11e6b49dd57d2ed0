"""The thread of an ipc transport: nothing that is asked of it is lost, nor harmful, while it ends."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from pdkv.errors import TransferTimeoutError
from pdkv_connectors.ipc.loop import Loop

pytestmark = pytest.mark.cpu


def test_a_socket_that_is_handed_to_a_loop_that_is_over_is_closed() -> None:
    loop = Loop()
    loop.stop()
    kept, given = socket.socketpair()
    to_close, _peer = socket.socketpair()

    loop.add(given, lambda: None)
    loop.close(to_close)

    assert (given.fileno(), to_close.fileno()) == (-1, -1)
    assert kept.recv(1) == b"", "the peer sees the end"


def test_a_loop_that_is_stopped_while_others_use_it_raises_nothing_and_leaves_no_socket_open() -> None:
    for _ in range(200):
        loop = Loop()
        sockets = [socket.socket() for _ in range(8)]
        errors: list[BaseException] = []

        def use(mine: list[socket.socket], loop: Loop = loop, errors: list[BaseException] = errors) -> None:
            try:
                for one in mine:
                    loop.add(one, lambda: None)
                    loop.close(one)
            except BaseException as error:
                errors.append(error)

        users = [threading.Thread(target=use, args=(sockets[i::2],)) for i in range(2)]
        for user in users:
            user.start()
        loop.stop()
        for user in users:
            user.join()
        assert not errors
        assert [one.fileno() for one in sockets] == [-1] * 8


def test_work_that_fails_does_not_hold_up_what_was_asked_for_after_it(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    ours, theirs = socket.socketpair()
    heard = threading.Event()
    loop._soon(lambda: 1 / 0)  # type: ignore[arg-type,func-returns-value]
    loop.add(ours, heard.set)
    theirs.send(b"!")

    assert heard.wait(10)
    loop.stop()
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_does_not_end_in_time_is_an_error_and_is_ended_by_a_later_stop() -> None:
    loop, (ours, theirs) = Loop(), socket.socketpair()
    entered, let_go = threading.Event(), threading.Event()

    def stuck_at_a_peer() -> None:
        entered.set()
        let_go.wait(30)

    loop.add(ours, stuck_at_a_peer)
    theirs.send(b"!")
    assert entered.wait(10)
    for _ in range(2):
        with pytest.raises(TransferTimeoutError, match="has not ended"):
            loop.stop(0.02)
    assert ours.fileno() >= 0
    let_go.set()

    loop.stop()

    assert ours.fileno() == -1
    theirs.close()


def test_a_socket_that_rests_is_heard_again_afterwards_and_not_before() -> None:
    loop, (ours, theirs) = Loop(), socket.socketpair()
    heard: list[float] = []
    twice = threading.Event()

    def on_readable() -> None:
        heard.append(time.monotonic())
        loop.rest(ours, 0.2)
        if len(heard) == 2:
            twice.set()

    loop.add(ours, on_readable)
    theirs.send(b"!")

    assert twice.wait(10)
    assert heard[1] - heard[0] >= 0.2
    loop.stop()
    assert ours.fileno() == -1, "also one that rests"
    theirs.close()


def test_a_socket_that_cannot_be_listened_to_is_closed_so_that_its_peer_notices() -> None:
    loop, (ours, theirs) = Loop(), socket.socketpair()
    loop.add(ours, lambda: None)
    loop.add(ours, lambda: None)  # a second time is an error of the selector's

    theirs.settimeout(10)
    assert theirs.recv(1) == b""
    loop.stop()
    theirs.close()


class _Watched(socket.socket):
    """Lets others go on, for a moment, between what the ending thread asks of it and what the thread then does."""

    armed = False
    asked, closed = threading.Event(), threading.Event()

    def fileno(self) -> int:
        number = super().fileno()
        if self.armed and threading.current_thread().name == "pdkv-ipc" and not self.asked.is_set():
            self.asked.set()
            self.closed.wait(0.3)
        return number


def test_a_socket_that_another_closes_while_the_thread_ends_does_not_keep_it_from_closing_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(arguments.exc_value))
    loop, (ours, theirs) = Loop(), socket.socketpair()
    registered, watched = threading.Event(), _Watched(fileno=ours.detach())
    loop.add(watched, lambda: None)
    loop._soon(registered.set)
    assert registered.wait(10)
    watched.armed = True

    def close() -> None:
        assert watched.asked.wait(10)
        loop.close(watched)
        watched.closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    loop.stop()
    closer.join(10)

    assert failed == []
    assert (watched.fileno(), loop._alarm.fileno()) == (-1, -1)
    theirs.close()
