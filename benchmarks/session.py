"""How long a request waits for its first byte, and what waiting costs: two engines that take no steps.

    python benchmarks/session.py [--quick] [--json FILE] [--transport nixl]

P is a process of its own, D is this one. Both have a real side channel (ZeroMQ), a real transport and a session with
its thread; between requests both sleep. A request's time begins when it reaches D, with its blocks allocated, and ends
when D's engine knows that its one block of 32 layers is there. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from _report import add_report_options, headline, table, write_json
from _session_owner import make_session
from _transfer_rows import HEADINGS, Row, within

from pdkv.testing.child import Child
from pdkv.transfer import BlockRun, Reference, Session
from pdkv.transfer.actions import Loaded

ROOT = Path(__file__).parents[1]
OWNER = Path(__file__).parent / "_session_owner.py"
#: From a request's arrival on an idle D until its first byte, in seconds; and what an idle session may take of a core.
FIRST_BYTE_S = 1e-3
IDLE_CORES = 0.02
#: Between two requests, so that both sides sleep.
REST_S = 0.02
DEADLINE_S = 10.0


class Decode:
    """D: an engine that only waits."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._something = threading.Event()
        session.start(self._something.set)

    def load(self, request_id: str, params: dict[str, object]) -> float:
        """Seconds until the request's block is there."""
        reference = Reference.from_params(params)
        began = time.perf_counter()
        self.session.arrived(request_id, reference, reference.num_tokens)
        self.session.allocated(request_id, [BlockRun(0, (3,))])
        while not any(isinstance(event, Loaded) for event in self.session.poll()):
            if not self._something.wait(DEADLINE_S):
                raise TimeoutError(f"request {request_id} was not loaded within {DEADLINE_S} s")
            self._something.clear()
        return time.perf_counter() - began


def measure(transport: str, quick: bool) -> list[Row]:
    """All rows."""
    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = Path(tempfile.mkdtemp(prefix="pdkv-session-")) / "owner.log"
    with Child(OWNER, log, transport, environment=environment) as owner:
        decode = Decode(make_session(transport, "D", "decode", peers=owner.ask("address")))
        times = []
        for number in range(60 if quick else 500):
            params = owner.ask("offer", request_id=f"r{number}", blocks=[5])
            time.sleep(REST_S)
            times.append(decode.load(f"r{number}", params))
        first, later = times[0], times[5:]
        rest_s = 2.0 if quick else 10.0
        before = resource.getrusage(resource.RUSAGE_SELF)
        theirs = owner.ask("idle_cores", seconds=rest_s)
        after = resource.getrusage(resource.RUSAGE_SELF)
        ours = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rest_s
        decode.session.close()
    return [
        Row(f"{transport}: first request, handshake and connection included", first),
        within(f"{transport}: first byte after a request reaches an idle D", later, FIRST_BYTE_S),
        within("an idle session of P, of a core", [theirs], IDLE_CORES),
        within("an idle session of D, of a core", [ours], IDLE_CORES),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--transport", default="nixl", help="by its name (default: %(default)s)")
    arguments = parser.parse_args()
    rows = measure(arguments.transport, arguments.quick)
    print(headline("Sessions of two processes"))
    print(table(HEADINGS, [row.cells() for row in rows]))
    if arguments.json:
        settings = {"quick": arguments.quick, "transport": arguments.transport}
        write_json(arguments.json, "session", settings, {}, [row.as_json() for row in rows])
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
