"""Command line of the planner: ``python -m pdkv.plan``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pdkv.arguments import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, ArgumentParser, Number
from pdkv.errors import PdkvError
from pdkv.kvcache.sizing import SizingConstants
from pdkv.planner.dtypes import KV_CACHE_DTYPES
from pdkv.planner.plan import CUDA_GRANULE_BYTES, PlanRequest, Traffic, make_plan
from pdkv.planner.plot import save_plot
from pdkv.planner.presets import gpu_names, model_names, parse_bytes
from pdkv.planner.report import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan. Returns 0 if one request fits, 3 if none does, 2 after an error."""
    try:
        options = build_parser().parse_args(arguments)
        plan = make_plan(_request(options))
        if options.plot:
            save_plot(plan, options.plot)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan.as_dict(), indent=2) if options.json else render(plan), end="\n" if options.json else "")
    return 0 if plan.pool.fits_one else 3


def build_parser() -> ArgumentParser:
    """All options, in the groups of the documentation."""
    parser = ArgumentParser(
        prog="python -m pdkv.plan",
        description="What KV cache fits: tokens, requests, link and leases of a prefill/decode deployment.",
        epilog=f"Models: {', '.join(model_names())}. GPUs: {', '.join(gpu_names())}.",
    )
    parser.add_argument("--model", required=True, help="preset, config.json, or a model's folder")
    parser.add_argument("--gpu", help="preset or memory of one GPU, such as 141GiB")
    parser.add_argument("--tp", type=COUNT, default=1, help="tensor parallelism (1)")
    parser.add_argument("--pp", type=COUNT, default=1, help="pipeline parallelism (1)")
    parser.add_argument("--block-size", type=COUNT, default=16, help="tokens per block (16)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, metavar="DTYPE", help="(auto)")
    parser.add_argument("--dtype", help="the model's dtype, where not that of its config.json")
    parser.add_argument("--context", type=COUNT, help="tokens per request (the model's longest)")
    parser.add_argument("--concurrency", type=COUNT, help="requests that should run at once")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="write memory over context length as an image")
    _add_memory_options(parser)
    _add_traffic_options(parser)
    SizingConstants.add_arguments(parser)
    return parser


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory, per rank unless said otherwise; sizes as 2GiB, 500MB or bytes")
    group.add_argument("--util", type=SHARE, help="memory utilization (1.0 growable, 0.92 fixed)")
    group.add_argument("--fixed", action="store_true", help="a cache sized before warmup, as stock engines have it")
    group.add_argument("--kv-bytes", type=parse_bytes, metavar="SIZE", help="the KV cache itself, in place of --gpu")
    group.add_argument("--weights", type=parse_bytes, metavar="SIZE", help="weights over all ranks")
    group.add_argument("--activation", type=parse_bytes, metavar="SIZE", help="peak of a step beyond what is resident")
    group.add_argument("--non-torch", type=parse_bytes, metavar="SIZE", help="contexts, NCCL, workspaces")
    group.add_argument("--graphs", type=parse_bytes, metavar="SIZE", help="captured graphs")
    group.add_argument("--granule", type=parse_bytes, metavar="SIZE", default=CUDA_GRANULE_BYTES, help="(2MiB)")
    group.add_argument(
        "--watermark", type=Number(least=0, most=1), default=0.01, help="share of blocks kept free (0.01)"
    )
    group.add_argument(
        "--in-flight-tokens", type=COUNT, default=2, help="of one request, scheduled and not settled (2)"
    )
    group.add_argument("--state-blocks", type=COUNT, default=1, help="per request; 2 with prefix caching (1)")


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--arrivals", type=POSITIVE, metavar="PER_S", help="requests a second; needed for this section")
    group.add_argument("--prompt", type=COUNT, metavar="TOKENS", help="prompt length (half the context)")
    group.add_argument("--output", type=COUNT, default=256, metavar="TOKENS", help="output length (256)")
    group.add_argument("--queue-ms", type=NOT_NEGATIVE, default=0.0, help="wait before the transfer (0)")
    group.add_argument("--ttft-ms", type=POSITIVE, help="target for the time to first token")
    group.add_argument("--prefill-rate", type=POSITIVE, metavar="TOKENS_PER_S", help="of one P engine")
    group.add_argument("--decode-rate", type=POSITIVE, metavar="TOKENS_PER_S", help="of one D engine, all requests")
    group.add_argument("--link-gbps", type=POSITIVE, metavar="GB_PER_S", help="link from P to D in 10^9 bytes a second")
    group.add_argument("--tpot-ms", type=POSITIVE, help="time between two tokens of one request")


def _request(options: argparse.Namespace) -> PlanRequest:
    return PlanRequest(
        model=options.model,
        gpu=options.gpu,
        tensor_parallel=options.tp,
        pipeline_parallel=options.pp,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        model_dtype=options.dtype,
        context=options.context,
        concurrency=options.concurrency,
        utilization=options.util,
        growable=not options.fixed,
        granule=options.granule,
        cache_bytes=options.kv_bytes,
        weights_bytes=options.weights,
        activation_bytes=options.activation,
        non_torch_bytes=options.non_torch,
        graph_bytes=options.graphs,
        watermark=options.watermark,
        in_flight_tokens=options.in_flight_tokens,
        state_blocks=options.state_blocks,
        traffic=_traffic(options),
        constants=SizingConstants.from_arguments(options),
    )


def _traffic(options: argparse.Namespace) -> Traffic | None:
    if options.arrivals is None:
        return None

    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms / 1e3

    return Traffic(
        arrivals_per_s=options.arrivals,
        prompt_tokens=options.prompt if options.prompt is not None else max(1, (options.context or 8192) // 2),
        output_tokens=options.output,
        queue_s=options.queue_ms / 1e3,
        ttft_s=seconds(options.ttft_ms),
        prefill_tokens_per_s=options.prefill_rate,
        decode_tokens_per_s=options.decode_rate,
        link_bytes_per_s=None if options.link_gbps is None else options.link_gbps * 1e9,
        time_per_token_s=seconds(options.tpot_ms),
    )


__all__ = ["build_parser", "main"]
