"""P's listener: neither a lack of descriptors nor who goes away, or is another user, keeps others out for good."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from ipc_peers import registered, until

from pdkv.errors import PdkvError, TransportError
from pdkv.testing.transports.side import TransportSide
from pdkv.transfer.connecting import run_to_end
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import IpcTransport, wire
from pdkv_connectors.ipc.link import open_link
from pdkv_connectors.ipc.owner import ACCEPT_PAUSE_S, Owner

pytestmark = pytest.mark.cpu

NOBODY = 65534
DEADLINE_S = 30.0
OF_THE_LOOP = 3  # its selector and both ends of its wake-up, which stay until the transport is closed
BLOCKS = [[0, block, 39 - block] for block in range(40)]


@pytest.fixture
def pair() -> Iterator[tuple[TransportSide, TransportSide]]:
    """P and D, both registered."""
    with registered() as sides:
        yield sides


def owner_of(side: TransportSide) -> Owner:
    assert isinstance(side.transport, IpcTransport)
    owner = side.transport._owner
    assert owner is not None
    return owner


def address_of(side: TransportSide) -> str:
    return "\0" + owner_of(side).address.name


def count(side: TransportSide, name: str) -> int:
    return int(side.do_state().get(name, 0))


def assert_d_can_read(p: TransportSide, d: TransportSide) -> None:
    d.do_connect("P", 1, p.do_describe())
    assert d.do_wait(d.do_post("P", 1, BLOCKS, reads=True), 30.0) == "done"


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Until it is left, this process can open so many files and no more."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8 + number, most))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(number):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_a_lack_of_descriptors_is_told_to_each_peer_at_once_counted_and_logged_once(
    pair: tuple[TransportSide, TransportSide], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair
    with caplog.at_level(logging.WARNING):
        peers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        with descriptors_left(0):
            for peer in peers:
                peer.settimeout(DEADLINE_S)
                peer.connect(address_of(p))
                message = wire._decoder.decode(peer.recv(4096))
                assert isinstance(message, wire.Refuse)
                assert "no file descriptor is left on its side" in message.reason
                assert "ulimit -n" in message.reason
                assert peer.recv(1) == b""
    for peer in peers:
        peer.close()
    assert count(p, "accepts_failed") == 3
    assert caplog.text.count("Too many open files") == 1
    assert_d_can_read(p, d)


def test_where_the_spare_descriptor_is_gone_too_a_lack_is_waited_out_with_pauses(
    pair: tuple[TransportSide, TransportSide],
) -> None:
    p, d = pair
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
        owner_of(p)._give_spare()
        with descriptors_left(0):
            begin = time.monotonic()
            early.connect(address_of(p))
            until(lambda: count(p, "accepts_failed"), lambda failed: failed >= 3)
            tries, took_s = count(p, "accepts_failed"), time.monotonic() - begin

        assert tries <= took_s / ACCEPT_PAUSE_S + 1, "it pauses between"
        assert_d_can_read(p, d)
    until(lambda: owner_of(p)._spare, lambda spare: spare >= 0)


@pytest.mark.parametrize("number", range(14))
def test_a_cache_is_registered_with_few_descriptors_or_refused_in_a_sentence_and_none_is_lost(number: int) -> None:
    side = TransportSide(lambda: IpcTransport())
    side.do_open()
    side.do_build(8192)
    before = len(os.listdir("/proc/self/fd"))
    refused = ""
    try:
        with descriptors_left(number):
            side.do_register("P", 1)
    except PdkvError as error:
        refused = str(error)
    assert "ulimit -n" in refused or number > 10
    if refused:
        assert len(os.listdir("/proc/self/fd")) <= before + OF_THE_LOOP
        side.do_register("P", 1)
    side.do_finish()


@pytest.mark.parametrize("number", range(5))
def test_a_peer_that_cannot_be_connected_to_for_lack_of_descriptors_is_not_called_a_stranger(
    pair: tuple[TransportSide, TransportSide], number: int
) -> None:
    p, d = pair
    metadata = p.do_describe()
    with descriptors_left(number), pytest.raises(TransportError, match="ulimit -n"):
        d.do_connect("P", 1, metadata, within_s=DEADLINE_S)  # not that it did not answer in time
    assert_d_can_read(p, d)


@pytest.mark.parametrize("d_is_first", [True, False])
def test_d_hears_why_it_was_turned_away_also_where_p_has_closed_with_its_words_unread(d_is_first: bool) -> None:
    """As P does that has no descriptor left: it cannot wait for what D says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(f"\0pdkv-test-{os.getpid()}")
        listener.listen()
        name = listener.getsockname()[1:].decode()
        address = wire.Address(wire.VERSION, wire.machine_id(), name, bytes(wire.KEY_NBYTES), False)
        send, speaks = wire.send, threading.Event()

        def speak(*arguments: Any) -> None:
            assert speaks.wait(DEADLINE_S)
            send(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(wire, "send", speak)
            steps = open_link(address, EngineRef("P", 1), EngineRef("D", 1), {}, DEADLINE_S)
            found = pool.submit(run_to_end, steps)
            connection, _ = listener.accept()
            if d_is_first:
                speaks.set()
                assert select.select([connection], [], [], DEADLINE_S)[0]
            send(connection, wire.Refuse("there is no room"))
            connection.close()
            speaks.set()
            with pytest.raises(TransportError, match="the peer refuses: there is no room"):
                found.result(DEADLINE_S)


def test_who_goes_away_before_he_is_let_in_keeps_nobody_out(
    pair: tuple[TransportSide, TransportSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    left = [errno.ECONNABORTED, errno.EPERM, errno.ECONNABORTED]
    accept = socket.socket.accept

    def aborted(self: socket.socket) -> Any:
        if left:
            raise OSError(left.pop(), "gone")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", aborted)
    assert_d_can_read(p, d)
    assert count(p, "accepts_failed") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_turned_away_before_he_says_a_word(pair: tuple[TransportSide, TransportSide]) -> None:
    p, d = pair
    script = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(30)\n"
        f"os.setuid({NOBODY}); s.connect(chr(0) + sys.argv[1])\n"
        "sys.stdout.buffer.write(s.recv(4096)); assert s.recv(1) == b''\n"
    )
    command = [sys.executable, "-c", script, address_of(p)[1:]]
    said = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    message = wire._decoder.decode(said)
    assert isinstance(message, wire.Refuse)
    assert str(NOBODY) in message.reason
    assert count(p, "holders") == 0
    assert_d_can_read(p, d)
