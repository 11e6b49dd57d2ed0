"""Sessions over side channels, with keys and over IPv6: what an engine really uses, but for its transport."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from session_pair import COMPATIBILITY, contents, fill, make_cache, run
from sidechannel_net import DEADLINE_S, meet

from pdkv.transfer import FailCode, Reference
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.session import Event, Role, Session
from pdkv.transfer.sidechannel import Address, KeyPair, PeerEntry, SideChannel, SideChannelSettings, StaticPeers

pytestmark = pytest.mark.cpu

WAYS = {
    "loopback": ("127.0.0.1:0", False),
    "with keys": ("127.0.0.1:0", True),
    "IPv6 with keys": ("[::1]:0", True),
}


class Both:
    """P and D; each has a session over a side channel of its own."""

    def __init__(self, stack: ExitStack, bind: str, secured: bool) -> None:
        self.caches = make_cache(40), make_cache(24)
        keys = [KeyPair.generate() if secured else None for _ in "PD"]
        public = [pair.public if pair else None for pair in keys]
        allowed = StaticPeers([PeerEntry("d", public[1])])
        listening = SideChannelSettings(bind=Address.parse(bind), keys=keys[0], peers=allowed)
        prefill = stack.enter_context(SideChannel("P", listening))
        book = StaticPeers([PeerEntry("p", public[0], prefill.address)])
        decode = stack.enter_context(SideChannel("D", SideChannelSettings(bind=None, keys=keys[1], peers=book)))
        meet(prefill, decode)
        self.prefill = self._session(stack, 0, prefill, "prefill")
        self.decode = self._session(stack, 1, decode, "decode")
        self.events: list[Event] = []

    def _session(self, stack: ExitStack, side: int, channel: SideChannel, role: Role) -> Session:
        host = LocalHost(InprocTransport, self.caches[side], channel.engine_id, COMPATIBILITY)
        session = Session(host, channel, role=role)
        stack.callback(session.close)
        return session

    def until(self, kind: type) -> Event:
        """Both engines take steps until one of them hears of such an event."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self.events += [*self.prefill.poll(), *self.decode.poll()]
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
        raise AssertionError(f"no {kind.__name__}; {self.events}")


@pytest.fixture(params=WAYS)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    bind, secured = WAYS[request.param]
    if bind.startswith("[") and not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    with ExitStack() as stack:
        yield Both(stack, bind, secured)


def test_kv_is_loaded_and_blocks_come_back(both: Both) -> None:
    fill(both.caches[0], [4, 5, 6], seed=1)
    reference = both.prefill.offer("r", run(4, 5, 6), 48)
    both.decode.arrived("d", Reference.from_params(reference.to_params()), 48)
    both.decode.allocated("d", run(9, 7, 8))
    assert both.until(Loaded) == Loaded("d")
    assert both.until(FreeBlocks) == FreeBlocks("r", (4, 5, 6))
    assert bool((contents(both.caches[1], [9, 7, 8]) == contents(both.caches[0], [4, 5, 6])).all())


def test_a_reference_that_whoever_routes_has_changed_fails_its_request_and_not_the_next(both: Both) -> None:
    fill(both.caches[0], [4, 5, 6], seed=1)
    params = both.prefill.offer("r", run(4, 5, 6), 48).to_params()
    params["blocks"] = [[0, [1, 2, 3]]]
    both.decode.arrived("d", Reference.from_params(params), 48)
    both.decode.allocated("d", run(9, 7, 8))
    failed = both.until(Failed)
    assert isinstance(failed, Failed)
    assert failed.code is FailCode.FORGED
    both.decode.arrived("e", both.prefill.offer("s", run(11, 12), 32), 32)
    both.decode.allocated("e", run(10, 11))
    assert both.until(Loaded) == Loaded("e")
