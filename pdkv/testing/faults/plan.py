"""What happens in one schedule: requests and faults, as plain data, so that a failing one can be shrunk and kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal

BLOCK_TOKENS = 16


class FaultKind(StrEnum):
    """What can go wrong. `at` counts messages, counts transfers, or is tenths of a second; see each."""

    DROP = "drop"  # message `at` is lost
    DELAY = "delay"  # message `at` takes `amount` seconds more; later ones overtake it
    DUPLICATE = "duplicate"  # message `at` comes again `amount` seconds later
    PARTITION = "partition"  # from `at` on no message passes, for `amount` seconds; injected once per message
    POST_FAILS = "post_fails"  # transfer `at` is not taken by the transport
    TRANSFER_FAILS = "transfer_fails"  # transfer `at` reports an error when half of it has been moved
    SLOW = "slow"  # transfer `at` takes `amount` seconds more
    NEVER_COMPLETES = "never_completes"  # transfer `at` never reports its end, but its bytes land `amount` seconds late
    BAD_REGION = "bad_region"  # chunk `at` of decode is registered without an error, and transfers of it fail
    KILL_PREFILL = "kill_prefill"  # at `at`
    RESTART_PREFILL = (
        "restart_prefill"  # at `at` it is killed, and comes back after `amount` seconds, as another engine
    )
    STOP_PREFILL = "stop_prefill"  # SIGSTOP at `at`, SIGCONT `amount` seconds later
    STOP_DECODE = "stop_decode"
    KILL_DECODE = "kill_decode"
    SLEEP_PREFILL = "sleep_prefill"  # at `at` it goes to sleep, for `amount` seconds, if nothing holds it
    ABORT_PREFILL = "abort_prefill"  # at `at` prefill wants all blocks back, and gives up what it computes
    REBUILD_PREFILL = "rebuild_prefill"  # at `at` its agent is rebuilt for reasons of its own, transfers or not
    REBUILD_DECODE = "rebuild_decode"


MESSAGE_FAULTS = (FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE)
TRANSFER_FAULTS = (FaultKind.POST_FAILS, FaultKind.TRANSFER_FAILS, FaultKind.SLOW, FaultKind.NEVER_COMPLETES)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong; see :class:`FaultKind`."""

    kind: FaultKind
    at: int
    amount: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One request. Times in seconds.

    Attributes:
        start_s: when prefill gets it.
        num_tokens: length of the prompt.
        chunks: prefill writes its KV in so many steps.
        prefill_s: time from the first to the last of them.
        early: push: decode gets it at the same time, not when prefill has finished.
        extra_block: prefill ends with a block more than the prompt needs.
        cached_blocks: of the prompt's blocks, such that decode has in its prefix cache.
        queue_s: time in decode's queue before blocks are allocated.
        steps: tokens to decode, half a second each.
        gone_s: when the client disconnects, after `start_s`.
        preempt: decode takes the blocks away while they are being loaded, or after the first token.
        altered: whoever routes changes the block ids in the reference.
        replay_s: whoever routes sends the reference to decode once more, so much later, as another request.
    """

    start_s: float = 0.0
    num_tokens: int = 40
    chunks: int = 1
    prefill_s: float = 0.1
    early: bool = False
    extra_block: bool = False
    cached_blocks: int = 0
    queue_s: float = 0.0
    steps: int = 3
    gone_s: float | None = None
    preempt: Literal["loading", "decoding"] | None = None
    altered: bool = False
    replay_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt."""
        return -(-self.num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule.

    `prefill_blocks` and `decode_blocks` count the null block too; `clock_offset_s` is between the two.

    `block_s` is the time that a transfer takes for each block. `fenced`: the transport fences READs, so that decode
    reads early, and ends what it does not want any more. `observer_raises`: whoever is told of counts raises.
    """

    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...] = ()
    mode: Literal["pull", "push"] = "pull"
    on_failure: Literal["fail", "recompute"] = "fail"
    prefill_blocks: int = 64
    decode_blocks: int = 32
    hold_s: float = 0.0
    capacity: int = 64
    clock_offset_s: float = 0.0
    block_s: float = 0.002
    observer_raises: bool = False
    fenced: bool = False


def random_plan(seed: int) -> Plan:
    """A schedule by its number: the same on every machine."""
    random = Random(seed)
    mode: Literal["pull", "push"] = "push" if random.random() < 0.6 else "pull"
    requests = tuple(_random_request(random, mode) for _ in range(random.randint(1, 8)))
    return Plan(
        requests=requests,
        faults=tuple(_random_fault(random) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6)))),
        mode=mode,
        on_failure=random.choice(("fail", "recompute")),
        prefill_blocks=random.choice((10, 16, 64)),
        decode_blocks=random.choice((9, 12, 16, 40)),
        hold_s=random.choice((0.0, 0.0, 3.0, 30.0)),
        capacity=random.choice((2, 4, 64)),
        clock_offset_s=random.choice((0.0, 1e6, -1e3)),
        block_s=random.choice((0.002, 0.002, 0.3, 5.0)),
        observer_raises=random.random() < 0.1,
        fenced=mode == "pull" and random.random() < 0.6,
    )


def _random_request(random: Random, mode: str) -> RequestPlan:
    num_tokens = random.choice(
        (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, random.randint(1, 6 * BLOCK_TOKENS))
    )
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    return RequestPlan(
        start_s=random.choice((0.0, random.uniform(0, 10), random.uniform(0, 60))),
        num_tokens=num_tokens,
        chunks=random.randint(1, 4),
        prefill_s=random.choice((0.05, 1.0, 8.0)),
        early=mode == "push" and random.random() < 0.3,
        extra_block=random.random() < 0.3,
        cached_blocks=random.choice((0, 0, random.randint(0, num_blocks), num_blocks)),
        queue_s=random.choice((0.0, 0.2, random.uniform(0, 45))),
        steps=random.randint(1, 5),
        gone_s=random.uniform(0, 12) if random.random() < 0.2 else None,
        preempt=random.choice((None, None, None, "loading", "decoding")),
        altered=random.random() < 0.05,
        replay_s=random.choice((0.0, random.uniform(0, 3), random.uniform(0, 40))) if random.random() < 0.1 else None,
    )


def _random_fault(random: Random) -> Fault:
    kind = random.choice(tuple(FaultKind))
    amount = random.choice((random.uniform(0, 0.1), random.uniform(0, 3), random.uniform(0, 60)))
    if kind in MESSAGE_FAULTS:
        at = random.randint(0, 60)
    elif kind in TRANSFER_FAULTS or kind is FaultKind.BAD_REGION:
        at = random.randint(0, 5)
    else:
        at = random.randint(0, 300)
    return Fault(kind, at, amount)
