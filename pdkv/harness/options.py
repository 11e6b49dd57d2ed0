"""The command line of the GSM8K harness."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pdkv.arguments import COUNT, SECONDS, ArgumentParser, check_writable
from pdkv.errors import ConfigError
from pdkv.harness.engines import EngineOptions, RequestOptions
from pdkv.harness.prompts import STYLES
from pdkv.launch.settings import ENGINE_READY_TIMEOUT_S
from pdkv.launch.sizes import parse_nbytes

DESCRIPTION = """\
Ask two deployments the same word problems, greedily, and compare their outputs token by token: a stock vLLM as the
reference, and prefill + decode behind a proxy. With --model the harness starts them one after the other; with
--reference-url and --candidate-url it asks servers that run already."""

EPILOG = """\
Everything after -- goes to every vLLM that is started.
Exit codes: 0 all conditions hold; 1 one does not, and a sentence says which; 2 bad input; 3 the comparison could not be
carried out; 130 interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for, checked. Either `engine` is set, or both URLs are.

    Attributes:
        data, few_shot: files in GSM8K's format; `few_shot` holds the solved examples.
        status_dir: folder with the status folders ``prefill`` and ``decode`` of servers that run already.
        tokens_only: compare tokens and look at nothing else; for servers whose status cannot be read.
        save_reference, load_reference: file for the reference's answers, so that several runs share them.
    """

    data: Path
    few_shot: Path
    limit: int | None
    prompt: str
    max_tokens: int
    requests: RequestOptions
    engine: EngineOptions | None
    reference_url: str | None
    candidate_url: str | None
    status_dir: Path | None
    tokens_only: bool
    save_reference: Path | None
    load_reference: Path | None
    report: Path | None


def parser() -> ArgumentParser:
    """The options, in the groups of ``--help``."""
    p = ArgumentParser(
        prog="python -m pdkv.harness.gsm8k",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_questions(p, max_tokens=128)
    _add_engines(p.add_argument_group("engines that the harness starts"))
    _add_endpoints(p.add_argument_group("servers that run already"))
    diagnostics = p.add_argument_group("diagnostics")
    diagnostics.add_argument("--save-reference", type=Path, metavar="FILE", help="keep the reference's answers")
    diagnostics.add_argument("--load-reference", type=Path, metavar="FILE", help="use kept answers as the reference")
    diagnostics.add_argument(
        "--corrupt-received-kv",
        action="store_true",
        help="negative control: decode overwrites the KV that it receives; the comparison must fail",
    )
    return p


def add_questions(p: ArgumentParser, *, max_tokens: int) -> None:
    """The options of every program of the harness: what to ask, and how; :func:`check_questions` looks at them."""
    p.add_argument("--data", type=Path, required=True, help="problems in GSM8K's JSON-lines format")
    p.add_argument("--limit", type=COUNT, help="ask the first N problems only")
    p.add_argument("--prompt", default=STYLES[0], help=f"{' or '.join(STYLES)} (default: %(default)s)")
    p.add_argument("--few-shot", type=Path, help="solved examples (default: few_shot.jsonl beside --data)")
    p.add_argument("--max-tokens", type=COUNT, default=max_tokens, help="tokens of an answer (default: %(default)s)")
    p.add_argument("--concurrency", type=COUNT, default=2, help="requests at once (default: %(default)s)")
    p.add_argument(
        "--request-timeout", type=SECONDS, default=300, metavar="S", help="per request (default: %(default)s)"
    )
    p.add_argument("--report", type=Path, help="write the JSON report here")


def check_questions(a: argparse.Namespace) -> None:
    """Refuse files that could not be written when a run of minutes is over.

    Raises:
        ConfigError: see above.
    """
    check_writable("--report", a.report)


def few_shot_of(a: argparse.Namespace) -> Path:
    """The solved examples: those that were named, or those beside the problems."""
    path: Path = a.few_shot or a.data.parent / "few_shot.jsonl"
    return path


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, help="local model folder")
    group.add_argument("--connector", default="nixl-pull", help="KV connector (default: %(default)s)")
    group.add_argument("--dtype", default="float32", help="default: %(default)s; 16 bits can tie two logits")
    group.add_argument("--kv-bytes", default="256MiB", metavar="SIZE", help="KV budget of an engine (%(default)s)")
    group.add_argument("--prefill-kv-bytes", metavar="SIZE", help="the same for prefill alone (default: --kv-bytes)")
    group.add_argument("--engine-memory", metavar="SIZE",
                       help="let prefill and decode size their caches by what warmup leaves of this")  # fmt: skip
    group.add_argument("--max-model-len", type=COUNT, default=1024, help="default: %(default)s")
    group.add_argument("--block-size", type=COUNT, default=32, help="tokens per block (default: %(default)s)")
    group.add_argument("--ready-timeout", type=SECONDS, default=ENGINE_READY_TIMEOUT_S, metavar="S",
                       help="seconds until an engine must be ready (default: %(default)s)")  # fmt: skip
    group.add_argument("--log-dir", type=Path, help="folder for logs (default: one that is removed after a clean end)")
    group.add_argument("--decode-prefix-caching", action="store_true",
                       help="let decode keep prompts; without it every block of a prompt is transferred")  # fmt: skip


def _add_endpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--reference-url", metavar="URL", help="one vLLM without disaggregation")
    group.add_argument("--candidate-url", metavar="URL", help="the proxy in front of prefill and decode")
    group.add_argument("--status-dir", type=Path, metavar="DIR",
                       help="holds prefill/ and decode/, the PDKV_STATUS_DIR of the two engines")  # fmt: skip
    group.add_argument("--tokens-only", action="store_true", help="compare tokens and look at no engine's status")


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line.

    Raises:
        ConfigError: an option is unknown, missing, or does not go with another.
    """
    arguments = list(argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    a = parser().parse_args(arguments[:split])
    check_questions(a)
    _check_sides(a)
    check_writable("--save-reference", a.save_reference)
    return Options(
        data=a.data,
        few_shot=few_shot_of(a),
        limit=a.limit,
        prompt=a.prompt,
        max_tokens=a.max_tokens,
        requests=RequestOptions(concurrency=a.concurrency, timeout_s=a.request_timeout),
        engine=_engine(a, tuple(arguments[split + 1 :])) if a.model else None,
        reference_url=_url(a.reference_url),
        candidate_url=_url(a.candidate_url),
        status_dir=a.status_dir,
        tokens_only=a.tokens_only,
        save_reference=a.save_reference,
        load_reference=a.load_reference,
        report=a.report,
    )


def _check_sides(a: argparse.Namespace) -> None:
    if a.model and (a.reference_url or a.candidate_url):
        raise ConfigError("--model starts engines and the --...-url options name running ones; give one or the other.")
    if a.save_reference and a.load_reference:
        raise ConfigError("--save-reference and --load-reference exclude each other; give one of them.")
    if a.model:
        if a.max_tokens >= a.max_model_len:
            raise ConfigError(
                f"--max-tokens {a.max_tokens} leaves no room for a prompt in --max-model-len {a.max_model_len}; lower "
                "the first or raise the second."
            )
        if a.status_dir or a.tokens_only:
            raise ConfigError("--status-dir and --tokens-only are for running servers; leave them out with --model.")
        return
    if a.corrupt_received_kv:
        raise ConfigError("--corrupt-received-kv needs engines that the harness starts; give --model.")
    if not a.candidate_url or not (a.reference_url or a.load_reference):
        raise ConfigError("give --model to have engines started, or --reference-url and --candidate-url.")
    if bool(a.status_dir) == bool(a.tokens_only):
        raise ConfigError(
            "with --candidate-url give either --status-dir, so that remote hits can be checked, or --tokens-only to "
            "compare tokens and nothing else."
        )


def _engine(a: argparse.Namespace, extra_args: tuple[str, ...]) -> EngineOptions:
    return EngineOptions(
        model=a.model,
        connector=a.connector,
        dtype=a.dtype,
        kv_bytes=parse_nbytes(a.kv_bytes),
        prefill_kv_bytes=parse_nbytes(a.prefill_kv_bytes) if a.prefill_kv_bytes else None,
        engine_memory=parse_nbytes(a.engine_memory) if a.engine_memory else None,
        max_model_len=a.max_model_len,
        block_size=a.block_size,
        log_dir=a.log_dir,
        ready_timeout_s=a.ready_timeout,
        decode_prefix_caching=a.decode_prefix_caching,
        corrupt_received_kv=a.corrupt_received_kv,
        extra_args=extra_args,
    )


def _url(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # what resolving it does first; fails on empty and overlong labels
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{text!r} is no URL of a server; give one like http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1")
