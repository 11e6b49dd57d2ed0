"""How fast blocks move between two engines of one machine, each time beside its reference in the same run.

    python benchmarks/transfer.py [--quick] [--json FILE] [--png FILE] [--only host,nixl,cuda,nixl-cuda]

P is a process of its own, D is this one; both have a cache of 32 layers with 32 KiB a block and layer, and blocks are
paired at random. Times are medians, and wall times: they begin with the lists of block ids and end when the engine
knows that the last byte has arrived. Every row's bytes are compared afterwards. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from _report import add_report_options, draw_bars, headline, keep_record, table, write_json
from _transfer_rows import HEADINGS, Row

ROOT = Path(__file__).parents[1]
OWNER = Path(__file__).parent / "_transfer_owner.py"
NIXL_OWNER = Path(__file__).parent / "_transfer_nixl_owner.py"


def measure(where: str, quick: bool) -> list[Row]:
    """The rows of "host" or "cuda" (ipc), "nixl" or "nixl-cuda" (NIXL over host or device memory)."""
    from pdkv.testing.child import Child

    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = Path(tempfile.mkdtemp(prefix="pdkv-transfer-")) / "owner.log"

    def say(what: str) -> None:
        print(f"transfer: {where}: {what}", flush=True)

    if where.startswith("nixl"):
        from _transfer_nixl import nixl_rows

        driver = "cuda" if where == "nixl-cuda" else "host"
        with Child(NIXL_OWNER, log, driver, environment=environment) as owner:
            return nixl_rows(owner, driver, quick, say)
    with Child(OWNER, log, where, environment=environment) as owner:
        if where == "host":
            from _transfer_host import host_rows

            return host_rows(owner, quick, say)
        from _transfer_cuda import cuda_rows

        return cuda_rows(owner, quick, say)


def default_places() -> list[str]:
    """The host, NIXL where it is installed, and both on a GPU where there is one."""
    nixl = ["nixl"] * (find_spec("nixl") is not None)
    return ["host", *nixl] + (["cuda", *(f"{name}-cuda" for name in nixl)] if has_cuda() else [])


def has_cuda() -> bool:
    """Whether there is a GPU to measure."""
    import torch

    return bool(torch.cuda.is_available())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--only", help="some of host, nixl, cuda, nixl-cuda; by default all that can run here")
    arguments = parser.parse_args()
    places = arguments.only.split(",") if arguments.only else default_places()
    rows: list[Row] = []
    for place in places:
        rows += measure(place, arguments.quick)
        if arguments.json:  # after each place, so that a run cut short leaves what it had
            settings = {"quick": arguments.quick, "places": places}
            write_json(arguments.json, "transfer", settings, {}, [row.as_json() for row in rows])
    print(headline("Transfers between two processes"))
    print(table(HEADINGS, [row.cells() for row in rows]))
    if arguments.png:
        draw_bars(
            arguments.png, "GB/s", {"GB/s": {row.name: row.nbytes / row.seconds / 1e9 for row in rows if row.nbytes}}
        )
    for row in rows:
        keep_record({"table": "transfer", **row.as_json()})
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
