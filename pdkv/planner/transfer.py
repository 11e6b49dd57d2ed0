"""What prefill/decode separation asks of the link, of the leases and of the number of engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pdkv.errors import ConfigError

#: P keeps a finished prefill's blocks for this long unless D renews the lease; seconds. vLLM 0.33's NIXL connector.
LEASE_S = 30.0
#: D renews this often from the moment the request reaches it; seconds (a sixth of the lease).
RENEWAL_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkNeed:
    """What one request moves from P to D, and the rate that keeps the time to first token under its target.

    Attributes:
        bytes_per_request: KV of the prompt over all ranks, without replicas.
        transfer_budget_s: target less queueing and prefill; what is left for the transfer.
        bytes_per_s: rate needed for one request; None where nothing is left.
        transfer_s: time at the link rate given; None where none was given.
        sustained_bytes_per_s: mean rate at the arrival rate given.
        meets_target: whether the link given is fast enough; None where none was given.
    """

    bytes_per_request: int
    transfer_budget_s: float
    bytes_per_s: float | None
    transfer_s: float | None
    sustained_bytes_per_s: float
    meets_target: bool | None


def link_need(
    bytes_per_request: int,
    *,
    prompt_tokens: int,
    ttft_s: float,
    prefill_tokens_per_s: float,
    queue_s: float = 0.0,
    arrivals_per_s: float = 0.0,
    link_bytes_per_s: float | None = None,
) -> LinkNeed:
    """The link rate that keeps TTFT under `ttft_s`: bytes over what queueing and prefill leave of it.

    The first decode step is not counted: it is a few milliseconds, and starts before the last bytes are needed only in
    connectors that load layer by layer.

    Raises:
        ConfigError: a rate or the target is not positive.
    """
    if prefill_tokens_per_s <= 0 or ttft_s <= 0:
        raise ConfigError("The prefill rate and the target for the time to first token must be above 0")
    if link_bytes_per_s is not None and link_bytes_per_s <= 0:
        raise ConfigError("The link rate must be above 0")
    left = ttft_s - queue_s - prompt_tokens / prefill_tokens_per_s
    takes = None if link_bytes_per_s is None else bytes_per_request / link_bytes_per_s
    return LinkNeed(
        bytes_per_request=bytes_per_request,
        transfer_budget_s=left,
        bytes_per_s=bytes_per_request / left if left > 0 else None,
        transfer_s=takes,
        sustained_bytes_per_s=arrivals_per_s * bytes_per_request,
        meets_target=None if takes is None else takes <= left,
    )


@dataclass(frozen=True, slots=True)
class LeasePressure:
    """What P holds for D.

    Attributes:
        leases: requests whose blocks P keeps, on average (Little's law: arrivals times the time each is held).
        blocks: P's blocks that they hold.
        renewals_per_s: renewals that D sends, on average; each request renews every 5 s while it waits.
        expires_unrenewed: whether a request that nobody renews would lose its blocks before D has read them.
    """

    leases: float
    blocks: int
    renewals_per_s: float
    expires_unrenewed: bool


def lease_pressure(arrivals_per_s: float, queue_s: float, transfer_s: float, prompt_blocks: int) -> LeasePressure:
    """Leases that P holds at an arrival rate; `queue_s` is the time at D before the transfer starts (s)."""
    held_s = queue_s + transfer_s
    leases = arrivals_per_s * held_s
    return LeasePressure(
        leases=leases,
        blocks=ceil(leases * prompt_blocks),
        renewals_per_s=arrivals_per_s * (held_s // RENEWAL_INTERVAL_S),
        expires_unrenewed=held_s > LEASE_S,
    )


@dataclass(frozen=True, slots=True)
class EngineRatio:
    """Engines that an arrival rate needs on each side, and their ratio (P engines for one D engine).

    `decode_engines_by_memory` counts those that the KV of all running requests needs; None where no time per token was
    given.
    """

    prefill_engines: float
    decode_engines_by_rate: float
    decode_engines_by_memory: float | None
    prefill_per_decode: float


def engine_ratio(
    *,
    arrivals_per_s: float,
    prompt_tokens: int,
    output_tokens: int,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
    max_requests: int,
    time_per_token_s: float | None = None,
) -> EngineRatio:
    """P:D ratio from what one engine of each side does per second, and from what fits into D.

    Args:
        prefill_tokens_per_s: prompt tokens that one P engine prefills per second.
        decode_tokens_per_s: output tokens that one D engine makes per second, over all its requests.
        max_requests: requests that fit into one D engine.
        time_per_token_s: time between two tokens of one request, which says how long it stays in D.

    Raises:
        ConfigError: a rate is not positive.
    """
    if min(arrivals_per_s, prefill_tokens_per_s, decode_tokens_per_s) <= 0:
        raise ConfigError("Arrival, prefill and decode rates must be above 0")
    prefill = arrivals_per_s * prompt_tokens / prefill_tokens_per_s
    by_rate = arrivals_per_s * output_tokens / decode_tokens_per_s
    by_memory = None
    if time_per_token_s is not None:
        running = arrivals_per_s * output_tokens * time_per_token_s
        by_memory = running / max_requests if max_requests else float("inf")
    return EngineRatio(prefill, by_rate, by_memory, prefill / max(by_rate, by_memory or 0.0))


__all__ = [
    "LEASE_S",
    "RENEWAL_INTERVAL_S",
    "EngineRatio",
    "LeasePressure",
    "LinkNeed",
    "engine_ratio",
    "lease_pressure",
    "link_need",
]
