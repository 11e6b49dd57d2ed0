"""A side channel on a machine that runs short: of descriptors, or of its peer book. It goes on when that is over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sidechannel_net import DEADLINE_S, done

from pdkv.errors import StateError
from pdkv.transfer.sidechannel import SideChannel, SideChannelSettings
from pdkv.transfer.sidechannel.peers import PeerEntry, PeersFile
from pdkv.transfer.sidechannel.settings import Limits

pytestmark = pytest.mark.cpu

QUICK = Limits(refresh_every_s=0.02)

# In a process of its own: the limit is the process's.
SHORT_OF_DESCRIPTORS = """
import os, resource, time
from contextlib import suppress
from test_sidechannel_shortage import Book, PeerEntry, QUICK, SideChannel, SideChannelSettings
host, book = SideChannel("P/1"), Book()
channel = SideChannel("D/1", SideChannelSettings(peers=book, limits=QUICK))
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
taken = []
for spare in range(8):  # a socket takes several, so it fails at each of them
    with suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(spare):
        os.close(taken.pop())
    failed = channel.counters["sockets_failed"]
    book.found = [PeerEntry("P", None, host.address)]
    deadline = time.monotonic() + 1
    while channel.counters["sockets_failed"] == failed and time.monotonic() < deadline:
        time.sleep(0.01)
    book.found = []
    time.sleep(0.1)
print("failed", channel.counters["sockets_failed"] > 0)
for fd in taken:
    os.close(fd)
book.found = [PeerEntry("P", None, host.address)]
print("reached", channel.wait_for_peer("P/1", 30))
channel.close(); host.close()
"""


class Book:
    """A registry whose answer changes; an exception is raised."""

    def __init__(self) -> None:
        self.found: Sequence[PeerEntry] | Exception = ()

    def entries(self) -> Sequence[PeerEntry]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_peer_that_there_is_no_descriptor_for_is_connected_to_when_there_is_one() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths})
    assert ran.stdout.splitlines() == ["failed True", "reached True"], ran.stderr


def test_a_peer_book_that_fails_leaves_the_peers_as_they_were() -> None:
    book = Book()
    settings = SideChannelSettings(peers=book, limits=QUICK)
    with SideChannel("P/1") as host, SideChannel("D/1", settings) as channel:
        book.found = [PeerEntry("P", None, host.address)]
        assert channel.wait_for_peer("P/1", DEADLINE_S)
        book.found = ConnectionError("the registry has gone")
        while channel.counters["peers_unknown"] < 3:
            assert channel.wait_for_peer("P/1", DEADLINE_S)
        channel.send(done("D/1", "P/1"))
        assert host.wait(DEADLINE_S)
        assert len(host.receive()) == 1


def test_a_peers_file_that_could_not_be_opened_is_read_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peers"
    path.write_text("- p 127.0.0.1:5600\n")
    peers = PeersFile(path)
    path.write_text("- p 127.0.0.1:5600\n- q 127.0.0.1:5601\n")

    def no_descriptor(self: Path) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", no_descriptor)
        assert [entry.name for entry in peers.entries()] == ["p"]
    assert [entry.name for entry in peers.entries()] == ["p", "q"]


def test_a_channel_whose_thread_had_not_ended_in_time_is_closed_by_a_second_close() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    channel = SideChannel("P/1")
    channel.close(timeout_s=0.0)
    with pytest.raises(StateError):
        channel.receive()
    channel.close(timeout_s=DEADLINE_S)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
