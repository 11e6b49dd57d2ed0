"""How long a request waits for its first byte, and what waiting costs: two engines that take no steps.

    python benchmarks/session.py [--quick] [--json FILE] [--transport nixl,ipc]

P is a process of its own, D is this one. Both have a real side channel (ZeroMQ), a real transport and a session with
its thread; between requests both sleep. A request's time begins when it reaches D, with its blocks allocated. Its first
byte is there when D's session, having looked after the transfer, finds it changed; so that it is found before all the
others are there too, ipc's steps are of 64 KiB for that. In requests of their own, with ipc's own steps, the time is
taken until D's engine knows that the lease lived and that the one block of 32 layers is there. The first byte has a
target over the transport that `auto` takes on one host. At last P is stopped (SIGSTOP) while D reads over tcp,
where nothing moves without P: what D's session takes of a core, and how often it looks, show that polling backs off.
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import add_report_options, headline, table, write_json
from _session_owner import make_session
from _transfer_rows import HEADINGS, Row, reference, within

from pdkv.testing.child import Child
from pdkv.testing.stopping import stopped
from pdkv.transfer import BlockRun, Reference, Session
from pdkv.transfer.actions import Loaded
from pdkv_connectors.ipc import host_mover

ROOT = Path(__file__).parents[1]
OWNER = Path(__file__).parent / "_session_owner.py"
#: From a request's arrival on an idle D until its first byte, in seconds; and what an idle session may take of a core.
FIRST_BYTE_S = 1e-3
ON_ONE_HOST = "ipc"
IDLE_CORES = 0.02
#: While a transfer stands still: the mean pause between two looks in seconds, and what looking may take of a core.
SHORTEST_REST_S, STILL_CORES = 0.9e-3, 0.2
TCP = {"UCX_TLS": "tcp"}
SMALL_STEP_NBYTES, OWN_STEP_NBYTES = 64 << 10, host_mover.STEP_NBYTES
#: Between two requests, so that both sides sleep.
REST_S = 0.02
DEADLINE_S = 10.0


class Decode:
    """D: an engine that only waits."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._something = threading.Event()
        self._watch_reads(session.host)
        session.start(self._something.set)

    @property
    def turns(self) -> int:
        """How often the session's thread has looked."""
        thread = self.session._thread
        return 0 if thread is None else thread.turns

    def load(self, request_id: str, params: dict[str, object], blocks: Sequence[int] = (3,)) -> tuple[float, float]:
        """Seconds until the first byte of the request's first block is there, and until all of it is."""
        reference = Reference.from_params(params)
        # What the benchmark's caches hold begins with no zero but in block 0.
        self._word = ctypes.c_int64.from_address(self._layer.data_ptr() + blocks[0] * self._layer.stride(0) * 2)
        self._word.value, self._seen_at = 0, 0.0
        began = time.perf_counter()
        self.session.arrived(request_id, reference, reference.num_tokens)
        self.session.allocated(request_id, [BlockRun(0, tuple(blocks))])
        while not any(isinstance(event, Loaded) for event in self.session.poll()):
            if not self._something.wait(DEADLINE_S):
                raise TimeoutError(f"request {request_id} was not loaded within {DEADLINE_S} s")
            self._something.clear()
        ended = time.perf_counter()
        if not self._seen_at:
            raise SystemExit(f"session: request {request_id} was loaded, and its first byte was never there")
        return self._seen_at - began, ended - began

    def _watch_reads(self, host: Any) -> None:
        """Look for the first byte after each call that may move one."""
        self._layer = next(iter(host.cache.committed_views().values()))
        post = host.read

        def read(*arguments: Any) -> Any:
            transfer = post(*arguments)
            poll = transfer.poll

            def watched() -> Any:
                state = poll()
                self._look()
                return state

            transfer.poll = watched
            self._look()
            return transfer

        host.read = read

    def _look(self) -> None:
        if not self._seen_at and self._word.value:
            self._seen_at = time.perf_counter()


def cores(seconds: float) -> float:
    """What this process takes in so many seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def start_owner(transport: str, **variables: str) -> Child:
    """P, not entered."""
    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    log = Path(tempfile.mkdtemp(prefix="pdkv-session-")) / "owner.log"
    return Child(OWNER, log, transport, environment=environment)


def waiting_rows(transport: str, quick: bool) -> list[Row]:
    """Requests that come one by one, and both sides between them."""
    rest_s = 2.0 if quick else 10.0
    with start_owner(transport) as owner:
        decode = Decode(make_session(transport, "D", "decode", peers=owner.ask("address")))
        times = []
        for number in range(120 if quick else 1000):
            # Another block each time: P has not heard yet that D is done with the last one.
            params = owner.ask("offer", request_id=f"r{number}", blocks=[1 + number % 60])
            host_mover.STEP_NBYTES = SMALL_STEP_NBYTES if number % 2 else OWN_STEP_NBYTES
            time.sleep(REST_S)
            times.append(decode.load(f"r{number}", params))
        theirs = owner.ask("idle_cores", seconds=rest_s)
        ours = cores(rest_s)
        decode.session.close()
    first = times[0][1]
    bytes_s, loaded_s = [seen for seen, _ in times[11::2]], [loaded for _, loaded in times[10::2]]
    title = f"{transport}: first byte after a request reaches an idle D"
    return [
        Row(f"{transport}: first request, handshake and connection included", first),
        within(title, bytes_s, FIRST_BYTE_S) if transport == ON_ONE_HOST else reference(title, bytes_s),
        reference(f"{transport}: loaded, one block of 32 layers", loaded_s),
        within(f"{transport}: an idle session of P, of a core", [theirs], IDLE_CORES),
        within(f"{transport}: an idle session of D, of a core", [ours], IDLE_CORES),
    ]


def polling_rows(quick: bool) -> list[Row]:
    """A READ over tcp that does not move, since its owner is stopped, and then does."""
    rest_s = 2.0 if quick else 5.0
    os.environ.update(TCP)
    with start_owner("nixl", **TCP) as owner:
        decode = Decode(make_session("nixl", "D", "decode", peers=owner.ask("address")))
        decode.load("warm", owner.ask("offer", request_id="warm", blocks=[5]))
        many = list(range(1, 61))
        params = owner.ask("offer", request_id="stuck", blocks=many)
        loading = threading.Thread(target=decode.load, args=("stuck", params, many))
        loading.start()
        deadline = time.monotonic() + DEADLINE_S
        while decode.session.metrics()["transfers"] == 0 and time.monotonic() < deadline:
            time.sleep(1e-4)
        with stopped(owner.process.pid):
            time.sleep(REST_S)
            turns = decode.turns
            took = cores(rest_s)
            looks = (decode.turns - turns) / rest_s
            if not loading.is_alive() or decode.session.metrics()["transfers"] != 1:
                raise SystemExit("session: the transfer was to stand still, and did not")
        loading.join(DEADLINE_S)
        decode.session.close()
    return [
        Row(
            "pause between two looks at a transfer that stands still",
            1 / looks,
            ratio=1 / looks / SHORTEST_REST_S,
            target=1.0,
            at_least=True,
            note=f"at least {SHORTEST_REST_S:g} s",
        ),
        within("a session of D whose transfer stands still, of a core", [took], STILL_CORES),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--transport", default="nixl,ipc", help="some, by their names (default: %(default)s)")
    arguments = parser.parse_args()
    rows = [row for transport in arguments.transport.split(",") for row in waiting_rows(transport, arguments.quick)]
    rows += polling_rows(arguments.quick)
    print(headline("Sessions of two processes"))
    print(table(HEADINGS, [row.cells() for row in rows]))
    if arguments.json:
        settings = {"quick": arguments.quick, "transport": arguments.transport}
        write_json(arguments.json, "session", settings, {}, [row.as_json() for row in rows])
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
