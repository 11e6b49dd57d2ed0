"""Stopping a process for a while."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from pdkv.testing import stopping
from pdkv.testing.stopping import kill, stop, stopped

pytestmark = pytest.mark.cpu

THREADS = 8
COUNTS = f"""
import mmap, sys, threading

counts = memoryview(mmap.mmap(int(sys.argv[1]), {8 * THREADS})).cast("Q")

def count(place):
    while True:
        counts[place] += 1

for place in range({THREADS}):
    threading.Thread(target=count, args=(place,)).start()
"""


def until_all(counts: memoryview, above: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(count > before for count, before in zip(counts, above, strict=True)):
            return True
        time.sleep(0.01)
    return False


def test_a_stopped_process_does_nothing_until_it_is_let_go_on() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * THREADS)
        with mmap.mmap(file.fileno(), 8 * THREADS) as memory, memoryview(memory).cast("Q") as counts:
            command = [sys.executable, "-c", COUNTS, str(file.fileno())]
            process = subprocess.Popen(command, pass_fds=[file.fileno()])
            try:
                assert until_all(counts, [0] * THREADS)
                for _ in range(20):
                    with stopped(process.pid):
                        before = counts.tolist()
                        time.sleep(0.005)
                        assert counts.tolist() == before
                assert until_all(counts, before)
            finally:
                process.kill()
                process.wait()


def test_a_process_that_has_ended_cannot_be_stopped_and_is_left_without_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with stopped(process.pid):
        process.kill()
        process.communicate()
    with pytest.raises(ProcessLookupError):
        stop(process.pid)


def test_a_process_that_ends_while_it_is_being_stopped_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def send_and_end(pid: int, number: int) -> None:
        os.kill(pid, number)
        process.kill()
        process.communicate()

    monkeypatch.setattr(stopping, "os", SimpleNamespace(kill=send_and_end))
    with pytest.raises(ProcessLookupError, match="has ended"):
        stop(process.pid)


MEMORY_NBYTES = 256 << 20
LISTENS = f"""
import socket
memory = bytearray(b"1") * {MEMORY_NBYTES}
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
input()
"""


def test_a_killed_process_listens_no_more() -> None:
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    socket.create_connection(("127.0.0.1", port)).close()
    kill(process.pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    process.communicate()
    kill(process.pid)  # there is none any more
