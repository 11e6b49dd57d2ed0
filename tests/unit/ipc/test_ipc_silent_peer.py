"""A peer whose process stops while D connects to it: others hear from D, and D from them, as if nothing were."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from ipc_peers import DEADLINE_S, START_TIMEOUT_S, until
from ipc_stopping_main import make_session

from pdkv.testing.child import Child
from pdkv.transfer import BlockRun, FailCode, Reference, Session, SessionSettings
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded
from pdkv.transfer.session import Event

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]


class Engine:
    """Sleeps until its session has something for it."""

    def __init__(self, session: Session) -> None:
        self.session, self.events = session, list[Event]()
        self._something = threading.Event()
        session.start(self._something.set)

    def wait_for(self, wanted: object, within_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + within_s
        while wanted not in self.events:
            assert self._something.wait(max(0.0, deadline - time.monotonic())), (wanted, self.events)
            self._something.clear()
            self.events += self.session.poll()

    def load(self, request_id: str, reference: Reference, block: int) -> None:
        self.session.arrived(request_id, reference, 16)
        self.session.allocated(request_id, [BlockRun(0, (block,))])


def test_a_peer_that_stops_while_d_connects_holds_up_nobody_else(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    other = Engine(make_session("Q", "prefill"))
    script = Path(__file__).with_name("ipc_stopping_main.py")
    with Child(script, tmp_path / "p.log", environment=environment) as stopping:
        peers = [stopping.ask("address", START_TIMEOUT_S), str(other.session.carrier.address)]  # type: ignore[attr-defined]
        decode = Engine(make_session("D", "decode", ",".join(peers)))
        decode.session.settings = SessionSettings(connect_s=2 * DEADLINE_S)
        decode.load("first", other.session.offer("first", [BlockRun(0, (1,))], 16), 1)
        decode.wait_for(Loaded("first"))

        decode.load("stuck", Reference.from_params(stopping.ask("offer", request_id="stuck", blocks=[5])), 2)
        status = Path(f"/proc/{stopping.process.pid}/status")
        until(status.read_text, lambda text: "State:\tT" in text)
        began = time.monotonic()
        for number in range(5):
            name = f"r{number}"
            decode.load(name, other.session.offer(name, [BlockRun(0, (2 + number,))], 16), 3 + number)
            decode.wait_for(Loaded(name))
            other.wait_for(FreeBlocks(name, (2 + number,)))
        assert time.monotonic() - began < DEADLINE_S, "nobody waited until D gives the silent one up"
        assert not decode.session.poll()
        decode.session.gone("stuck", "client gone")
        decode.wait_for(FreeBlocks("stuck", (2,)))

        decode.session.settings = SessionSettings(connect_s=0.2)
        stopping.process.send_signal(signal.SIGKILL)
    for engine in (decode, other):
        engine.session.close()


def test_a_request_of_a_peer_that_stays_silent_fails_at_the_deadline_for_connecting(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("ipc_stopping_main.py")
    with Child(script, tmp_path / "p.log", environment=environment) as stopping:
        decode = Engine(make_session("D", "decode", stopping.ask("address", START_TIMEOUT_S)))
        decode.session.settings = SessionSettings(connect_s=0.5)
        decode.load("stuck", Reference.from_params(stopping.ask("offer", request_id="stuck", blocks=[5])), 2)
        decode.wait_for(FreeBlocks("stuck", (2,)))
        (failed,) = [event for event in decode.events if isinstance(event, Failed)]
        assert failed.code is FailCode.TIMED_OUT
        assert "did not hand over its memory in 0.5 s" in failed.reason
        stopping.process.send_signal(signal.SIGKILL)
    decode.session.close()
