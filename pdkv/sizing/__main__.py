"""``python -m pdkv.sizing sweep``: which margins would have held for this workload?

::

    python -m pdkv.sizing sweep --model DIR --engine-memory 3GiB --lengths 32,256,900 --concurrency 1,8,32
    python -m pdkv.sizing sweep --torch-workload llama-8b --device cuda --json sweep.json --plot sweep.png

The first starts an engine on the CPU and watches its worker. The second runs the forward of a random-weight model of
that shape in this process. Both print the smallest margin that would have held, and for each fraction the floor and for
each floor the fraction that gives it. Options after ``--`` go to vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdkv.arguments import COUNT, ArgumentParser
from pdkv.errors import ConfigError, PdkvError
from pdkv.kvcache.sizing_constants import MIB, SizingConstants
from pdkv.sizing.engine_sweep import Load, sweep_engine
from pdkv.sizing.fit import fit
from pdkv.sizing.plot import save_plot
from pdkv.sizing.torch_model import SHAPES, shape_named
from pdkv.sizing.torch_sweep import sweep_torch

EXIT_HOLDS, EXIT_TOO_SMALL, EXIT_ERROR = 0, 1, 2


def build_parser() -> ArgumentParser:
    """All options."""
    parser = ArgumentParser(prog="python -m pdkv.sizing", description="Fit the margins of sizing to a workload.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=ArgumentParser)
    sweep = commands.add_parser("sweep", help="run a workload and report the smallest margins that would have held")
    sweep.add_argument("--model", type=Path, help="folder of the model that an engine is to serve, on the CPU")
    sweep.add_argument("--torch-workload", metavar="NAME", help=f"in place of an engine: {', '.join(SHAPES)}")
    sweep.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of --torch-workload (cpu)")
    sweep.add_argument("--lengths", type=_numbers, default=(32, 256, 900), help="prompt tokens (32,256,900)")
    sweep.add_argument("--concurrency", type=_numbers, default=(1, 8, 32), help="requests at once (1,8,32)")
    sweep.add_argument("--output", type=COUNT, default=16, metavar="TOKENS", help="of each request (16)")
    sweep.add_argument("--batched-tokens", type=COUNT, default=2048, help="of one step (2048)")
    sweep.add_argument(
        "--warmup-seqs", type=COUNT, metavar="N", help="of --torch-workload: requests in warmup's step (most at once)"
    )
    sweep.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    sweep.add_argument("--plot", type=Path, metavar="FILE", help="write a picture; png, svg or pdf")
    engine = sweep.add_argument_group("engine")
    for name in ("engine-memory", "kv-bytes", "granule"):
        engine.add_argument(f"--{name}", metavar="SIZE", help="as the launcher's")
    for name in ("block-size", "max-model-len"):
        engine.add_argument(f"--{name}", type=COUNT, help="as the launcher's")
    engine.add_argument("--dtype", help="as the launcher's")
    engine.add_argument("--log-dir", type=Path, help="folder for the engine's log and status")
    SizingConstants.add_arguments(sweep)
    return parser


def run(options: argparse.Namespace, extra_args: Sequence[str] = ()) -> dict[str, Any]:
    """Carry the sweep out and return its report."""
    constants = SizingConstants.from_arguments(options)
    loads = [Load(length, options.output, number) for number in options.concurrency for length in options.lengths]
    if (options.model is None) == (options.torch_workload is None):
        raise ConfigError("give either --model, for an engine on the CPU, or --torch-workload.")
    if options.torch_workload is not None:
        baseline, points, proved = sweep_torch(
            shape_named(options.torch_workload),
            options.device,
            loads,
            max_num_batched_tokens=options.batched_tokens,
            warmup_seqs=options.warmup_seqs or max(options.concurrency),
            say=_say,
        )
        report = fit(baseline, points, constants, proved_margin_bytes=proved)
        return {"workload": f"{options.torch_workload} in torch on {options.device}", **report}
    names = ("engine_memory", "kv_bytes", "granule", "block_size", "max_model_len", "dtype")
    engine = {name: getattr(options, name) for name in names} | {
        "model": options.model,
        "extra_args": ("--max-num-batched-tokens", str(options.batched_tokens), *extra_args),
        "extra_env": constants.as_environment(),
    }
    baseline, points, worker = sweep_engine(engine, loads, log_dir=options.log_dir, say=_say)
    return {"workload": f"{options.model.name} served on the CPU", "engine": worker, **fit(baseline, points, constants)}


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    floors = [f"{r['fraction']:g}: {_mib(r['floor_bytes'])}" for r in report["smallest_floor_bytes_for_fraction"]]
    fractions = [
        f"{_mib(r['floor_bytes'])}: {'none' if r['fraction'] is None else format(r['fraction'], '.2f')}"
        for r in report["smallest_fraction_for_floor_bytes"]
    ]
    verdict = "holds" if report["default_holds"] else "TOO SMALL"
    lines = [
        report["workload"],
        f"warmup's transient peak      {_mib(report['baseline']['transient_peak_bytes'])}",
        f"smallest margin that holds   {_mib(report['needed_margin_bytes'])}",
        f"margin of the constants      {_mib(report['default_margin_bytes'])}, {verdict}",
        "fraction -> smallest floor   " + ", ".join(floors),
        "floor -> smallest fraction   " + ", ".join(fractions),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0: the margin of the constants holds; 1: it does not; 2: the sweep could not be carried out."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    try:
        options = build_parser().parse_args(argv[:cut])
        report = run(options, argv[cut + 1 :])
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        if options.plot is not None:
            save_plot(report, options.plot)
    except (PdkvError, OSError) as error:
        _say(f"error: {error}")
        return EXIT_ERROR
    print(render(report))
    return EXIT_HOLDS if report["default_holds"] else EXIT_TOO_SMALL


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(COUNT(part)) for part in text.split(","))


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
