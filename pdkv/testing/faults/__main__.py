"""``python -m pdkv.testing.faults``: random schedules under faults.

Exit codes: 0 nothing was wrong; 1 something was; 2 an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence

from pdkv.arguments import COUNT, MINUTES, NATURAL, ArgumentParser
from pdkv.errors import PdkvError
from pdkv.testing.faults.soak import Totals, soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and say by the exit status whether all was well."""
    try:
        options = _parse(arguments)
        return _processes(options) if options.processes else _simulation(options)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m pdkv.testing.faults", description=__doc__)
    parser.add_argument("--minutes", type=MINUTES, default=None, help="how long to run (default 1, if no --schedules)")
    parser.add_argument("--schedules", type=COUNT, default=None, help="how many schedules to run")
    parser.add_argument("--seed", type=NATURAL, default=0, help="which schedules; the same seed gives the same ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--processes", action="store_true", help="real processes in the place of the simulation")
    parser.add_argument("--transport", default="nixl", help="theirs, by its name in pdkv.transports (default nixl)")
    return parser.parse_args(arguments)


def _simulation(options: argparse.Namespace) -> int:
    minutes = options.minutes
    if minutes is None:
        minutes = 1.0 if options.schedules is None else math.inf
    begin, cpu_begin = time.monotonic(), time.process_time()
    totals = soak(options.seed, seconds=minutes * 60, schedules=options.schedules)
    seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - cpu_begin
    _print(totals, seconds, cpu_seconds)
    if options.json:
        print(json.dumps(totals.as_dict(seconds, cpu_seconds)))
    return 0 if totals.is_good else 1


def _processes(options: argparse.Namespace) -> int:
    from pdkv.testing.faults.processes import run_processes

    begin = time.monotonic()
    totals = run_processes(options.transport, seed=options.seed, seconds=60 * (options.minutes or 0.0))
    found = totals.as_dict(time.monotonic() - begin)
    print(json.dumps(found) if options.json else found)
    return 0 if totals.is_good else 1


def _print(totals: Totals, seconds: float, cpu_seconds: float) -> None:
    rate = totals.schedules / max(cpu_seconds, 1e-3) * 60
    print(f"{totals.schedules} schedules in {seconds:.1f} s, {cpu_seconds:.1f} s of a core ({rate:.0f} a minute of it)")
    print("faults: " + (", ".join(f"{kind} {count}" for kind, count in sorted(totals.faults.items())) or "none"))
    print("requests: " + (", ".join(f"{how} {count}" for how, count in sorted(totals.requests.items())) or "none"))
    print(
        f"wrong tokens {totals.wrong_tokens}, stray writes {totals.stray_writes}, "
        f"leaked blocks {totals.leaked_blocks}, stuck {totals.stuck}, crashes {totals.crashes}"
    )
    for text in totals.shown:
        print(text)


if __name__ == "__main__":
    sys.exit(main())
