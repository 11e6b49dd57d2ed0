"""How fast blocks move between two engines of one machine, each time beside its reference in the same run.

    python benchmarks/transfer.py [--quick] [--json FILE] [--png FILE] [--only PLACES]

P is a process of its own, D is this one; both have a cache of 32 layers with 32 KiB a block and layer, and blocks are
paired at random. Times are medians (of decode steps beside a transfer means), and wall times: they begin with the lists
of block ids and end when the engine knows that the last byte has arrived. Every row's bytes are compared afterwards.
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from _plain_memory import PLAIN
from _report import add_report_options, draw_bars, headline, keep_record, table, write_json
from _transfer_rows import HEADINGS, Row

ROOT = Path(__file__).parents[1]
OWNER = Path(__file__).parent / "_transfer_owner.py"
#: What `--only` takes, and whose memory that is. With `nixl` NIXL moves it, else ipc: on one GPU by itself, beside vLLM
#: that decodes there, or from a second GPU.
PLACES = {
    "host": "host",
    "nixl": "host",
    "cuda": "cuda",
    "cuda-engine": "cuda",
    "nixl-cuda-malloc": PLAIN,
    "nixl-cuda": "cuda",
    "cuda-cards": "cuda",
}
NIXL_OWNER = Path(__file__).parent / "_transfer_nixl_owner.py"


def measure(where: str, quick: bool) -> Iterator[Row]:
    """The rows of one of :data:`PLACES`, as they come."""
    from pdkv.testing.child import Child

    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    logs = Path(tempfile.mkdtemp(prefix="pdkv-transfer-"))

    def say(what: str) -> None:
        print(f"transfer: {where}: {what}", flush=True)

    driver = PLACES[where]
    if where == "cuda-cards":
        environment["CUDA_VISIBLE_DEVICES"] = "1"
    with ExitStack() as stack:

        def start(script: Path) -> Child:
            child = Child(script, logs / f"{script.stem}.log", driver, environment=environment)
            return stack.enter_context(child)

        if where.startswith("nixl"):
            from _transfer_nixl import nixl_rows

            yield from nixl_rows(start(NIXL_OWNER), driver, quick, say)
        elif where == "host":
            from _transfer_host import host_rows

            yield from host_rows(start(OWNER), start, quick, say)
        elif where == "cuda-engine":
            from _transfer_engine import engine_rows

            yield from engine_rows(start(OWNER), quick, say)
        else:
            from _transfer_cuda import cards_rows, cuda_rows

            yield from (cards_rows if where == "cuda-cards" else cuda_rows)(start(OWNER), quick, say)


def default_places() -> list[str]:
    """All for which there are devices and packages, but `cuda-cards`."""
    absent = {"cuda-cards"}
    for package, prefix in (("nixl", "nixl"), ("vllm", "cuda-engine")):
        if find_spec(package) is None:
            absent |= {place for place in PLACES if place.startswith(prefix)}
    return [place for place in PLACES if place not in absent and (cards() or PLACES[place] == "host")]


def cards() -> int:
    """How many GPUs there are to measure."""
    import torch

    return int(torch.cuda.device_count())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--only", help=f"some of {','.join(PLACES)}; by default all but the last that can run here")
    arguments = parser.parse_args()
    places = arguments.only.split(",") if arguments.only else default_places()
    if unknown := set(places) - set(PLACES):
        parser.error(f"there is no place {', '.join(sorted(unknown))}; --only takes some of {','.join(PLACES)}")
    if "cuda-cards" in places and cards() < 2:
        parser.error(f"cuda-cards needs 2 CUDA devices, found {cards()}; leave it out of --only")
    rows: list[Row] = []
    for place in places:
        for row in measure(place, arguments.quick):
            rows.append(row)
            keep_record({"table": "transfer", **row.as_json()})
            if arguments.json:  # after each, so that a run cut short leaves what it had
                settings = {"quick": arguments.quick, "places": places}
                write_json(arguments.json, "transfer", settings, {}, [row.as_json() for row in rows])
    print(headline("Transfers between two processes"))
    print(table(HEADINGS, [row.cells() for row in rows]))
    if arguments.png:
        draw_bars(
            arguments.png, "GB/s", {"GB/s": {row.name: row.nbytes / row.seconds / 1e9 for row in rows if row.nbytes}}
        )
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
