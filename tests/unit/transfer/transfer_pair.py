"""One prefill and one decode endpoint, with a test in the place of the network, the transport and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.transfer import (
    BlockRun,
    Compatibility,
    Consumer,
    ConsumerSettings,
    Descriptor,
    EngineRef,
    FailCode,
    Producer,
    ProducerSettings,
    Reference,
)
from pdkv.transfer.actions import (
    AddPeer,
    Failed,
    FreeBlocks,
    Loaded,
    PostRead,
    PostWrite,
    RebuildAgent,
    Recompute,
    Send,
)
from pdkv.transfer.messages import AnyMessage, Keyed, decode, encode

COMPATIBILITY = Compatibility(
    model="m", dtype="float32", cache_dtype="auto", layout="LBNHC", block_size=16, connector="test/1"
)


@dataclass
class ManualClock:
    """Moves when told to."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


def descriptor(num_blocks: int = 100, **differences: Any) -> Descriptor:
    return Descriptor(
        compatibility=msgspec.structs.replace(COMPATIBILITY, **differences), num_blocks=num_blocks, metadata=b"agent"
    )


@dataclass
class Pair:
    """Two endpoints. `deliver` carries messages until there are none; `lose` says which do not arrive."""

    mode: str = "pull"
    settings: dict[str, Any] = field(default_factory=dict)
    decode_differs: dict[str, Any] = field(default_factory=dict)
    offset_s: float = 0.0
    prefill_settings: ProducerSettings = field(default_factory=ProducerSettings)
    lose: Callable[[AnyMessage], bool] = lambda message: False

    def __post_init__(self) -> None:
        self.clock, self.prefill_clock = ManualClock(), ManualClock(self.offset_s)
        self.prefill = Producer(self.prefill_clock, EngineRef("P/1", 1), descriptor(), self.prefill_settings)
        settings = ConsumerSettings(mode=self.mode, **self.settings)  # type: ignore[arg-type]
        self.decode = Consumer(self.clock, EngineRef("D/1", 1), descriptor(**self.decode_differs), settings)
        self.sent: list[AnyMessage] = []
        self.did: list[object] = []  # actions other than Send, of both sides
        self.on_the_way: list[tuple[str, bytes]] = []

    def collect(self) -> None:
        """Take both sides' actions; messages wait in `on_the_way`."""
        for endpoint in (self.prefill, self.decode):
            for action in endpoint.take_actions():
                if isinstance(action, Send):
                    self.sent.append(decode(encode(action.message)))
                    self.on_the_way.append((action.engine_id, encode(action.message)))
                else:
                    self.did.append(action)

    def deliver(self) -> None:
        """Carry messages until there are none."""
        self.collect()
        while self.on_the_way:
            engine_id, frame = self.on_the_way.pop(0)
            message = decode(frame)
            if not self.lose(message):
                (self.prefill if engine_id.startswith("P") else self.decode).received(message)
            self.collect()

    def wait(self, seconds: float, step_s: float = 0.25) -> None:
        """Time passes for both, who do what is due and hear from each other."""
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.pass_silently(min(step_s, end - self.clock.now))
            self.prefill.tick()
            self.decode.tick()
            self.deliver()

    def pass_silently(self, seconds: float) -> None:
        """Time passes and nobody notices."""
        self.clock.now += seconds
        self.prefill_clock.now += seconds

    # Shorthands.

    def prefilled(self, request_id: str = "r", blocks: tuple[int, ...] = (1, 2, 3), num_tokens: int = 40) -> Reference:
        return self.prefill.prefilled(request_id, (BlockRun(0, blocks),), num_tokens)

    def loading(self, blocks: tuple[int, ...] = (11, 12, 13), first: int = 0) -> Reference:
        """A request "d" whose transfer has been posted and not ended."""
        reference = self.prefilled()
        self.decode.arrived("d", reference, 40)
        self.deliver()
        self.decode.allocated("d", (BlockRun(first, blocks),))
        self.deliver()
        return reference

    def posted(self) -> PostRead | PostWrite:
        """The transfer that was posted last."""
        return [action for action in self.did if isinstance(action, PostRead | PostWrite)][-1]

    def transfer_ended(self, ok: bool = True, *, posted: bool = True) -> None:
        """The transport reports the last transfer."""
        post, code = self.posted(), FailCode.TRANSFER_FAILED if posted else FailCode.POST_FAILED
        if isinstance(post, PostRead):
            self.decode.read_ended(post.key, ok, code=code)
        else:
            self.prefill.write_ended(post.key, ok, code=code)
        self.deliver()

    def freed(self, side: str) -> set[int]:
        """Blocks that were freed on "P" (below 10 in these tests) or "D"."""
        ids = {block for action in self.did if isinstance(action, FreeBlocks) for block in action.block_ids}
        return {block for block in ids if (block < 10) == (side == "P")}

    def seen(self, kind: type) -> list[Any]:
        return [action for action in self.did if isinstance(action, kind)]

    def said(self, kind: type[Keyed]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


__all__ = [
    "AddPeer",
    "Failed",
    "FreeBlocks",
    "Loaded",
    "ManualClock",
    "Pair",
    "RebuildAgent",
    "Recompute",
    "descriptor",
]


def failure(pair: Pair) -> FailCode:
    """Why the one request that failed did."""
    (action,) = pair.seen(Failed)
    code: FailCode = action.code
    return code


def nothing_is_left(pair: Pair) -> bool:
    """All blocks are back and nobody waits for anything."""
    both = (pair.prefill, pair.decode)
    return all(not e.holders() and e.quarantine.num_blocks == 0 and e.next_deadline() is None for e in both)
