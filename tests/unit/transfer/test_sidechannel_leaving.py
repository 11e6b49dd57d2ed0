"""Peers that leave in the middle of what they say, and hosts that are gone without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sidechannel_net import connected, until

from pdkv.transfer.sidechannel import Limits

pytestmark = pytest.mark.cpu

ESTABLISHED, KEEPALIVE = "01", "02"  # of a connection and of its timer, in /proc/net/tcp

#: What a peer sends waits at the high-water mark, and nobody takes it until long after the peer has gone.
FLOODED = """
import time, zmq
from pdkv.transfer.sidechannel import Limits, SideChannel, SideChannelSettings
with SideChannel("P/1", SideChannelSettings(limits=Limits(peer_messages=8))) as channel:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger, peer.sndhwm = 0, 0
    peer.connect(channel.address.endpoint)
    assert peer.poll(60_000, zmq.POLLOUT)
    with channel._loop._lock:
        for _ in range(2000):
            peer.send(bytes(1000))
        time.sleep(0.1)  # on its way
        peer.close()
        context.term()
        time.sleep(5)  # two heartbeats of ZeroMQ would be due
print("alive")
"""


def test_who_fills_the_queue_and_leaves_does_not_end_the_engine() -> None:
    ended = subprocess.run([sys.executable, "-c", FLOODED], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "alive\n"


def timers(port: int) -> list[str]:
    """What the kernel waits for on each open connection with this port, at either end."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        if f"{port:04X}" in (local[-4:], remote[-4:]) and state == ESTABLISHED:
            found.append(timer[:2])
    return found


def test_both_sides_ask_the_other_host_for_signs_of_life() -> None:
    with connected(limits=Limits(keepalive_s=30)) as (prefill, _):
        assert prefill.address is not None
        port = prefill.address.port
        until(lambda: timers(port) == [KEEPALIVE, KEEPALIVE])  # after what was said has been acknowledged
