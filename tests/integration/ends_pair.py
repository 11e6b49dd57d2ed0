"""A prefill and a decode engine whose requests may end in any way, for `test_vllm_ends*.py`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine import GROWABLE, EngineProcess, nixl_connector, running

BLOCK = 32
MAX_TOKENS = 8
LEASE_S = 12.0
#: A round trip takes milliseconds; on a machine that does other things too it may be asked for this long.
ROUND_TRIP_S = LEASE_S / 3
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
#: Times short enough to be waited for.
TIMES = {"kv_lease_duration": LEASE_S, "pdkv_silence_s": 5, "pdkv_rebuild_after_s": 2, "pdkv_transfer_s": 60}
#: Of prefill's blocks after they have arrived; long enough for a request to be preempted meanwhile.
HOLD_S = 60.0


@dataclass
class Pair:
    """Two engines, and requests between them under names of their own."""

    prefill: EngineProcess
    decode: EngineProcess
    mode: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def prompt(self, length: int) -> list[int]:
        """Token ids that no other prompt of this pair begins with."""
        number = next(self._numbers)
        return [(31 * number + 7 * place) % 4000 + 100 for place in range(length)]

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """Transfer parameters of a prompt that prefill has computed."""
        request_id, leases = f"p{next(self._numbers)}", self.counts("prefill").get("leases", 0)
        self.prefill.ask("submit", request_id=request_id, prompt=prompt, max_tokens=1, transfer=dict(ASK))
        outcome = self.prefill.ask("outcome", request_id=request_id, within_s=60)
        assert "pdkv" in outcome["transfer"]
        assert self.until("prefill", "counters", "leases", value=leases + 1)  # the worker hears of it one step later
        return dict(outcome["transfer"])

    def submitted(
        self, prompt: list[int], transfer: dict[str, Any], max_tokens: int = MAX_TOKENS, steps: int | None = None
    ) -> str:
        """The id of a request that decode works on; `steps`: how many until its client is gone."""
        request_id = f"d{next(self._numbers)}"
        self.decode.ask(
            "submit", request_id=request_id, prompt=prompt, max_tokens=max_tokens, transfer=transfer, steps=steps
        )
        return request_id

    def outcome(self, request_id: str, timeout_s: float = 60) -> Any:
        """Tokens and reason of a request on decode; None where it has not ended by then."""
        return self.decode.ask("outcome", request_id=request_id, within_s=timeout_s)

    def run(self, prompt: list[int]) -> list[int]:
        """Tokens of a prompt by way of both."""
        outcome = self.outcome(self.submitted(prompt, self.prefilled(prompt)))
        assert outcome["reason"] == "length"
        return list(outcome["tokens"])

    def alone(self, prompt: list[int]) -> list[int]:
        """Tokens of a prompt that decode computes by itself."""
        return list(self.decode.generate([prompt], MAX_TOKENS)[0]["tokens"])

    def until(self, side: str, *path: str, value: int, timeout_s: float = ROUND_TRIP_S) -> bool:
        """Whether a gauge or counter of one side has, or takes within that time, this value."""
        engine = self.prefill if side == "prefill" else self.decode
        return bool(engine.ask("until", path=[side, *path], value=value, within_s=timeout_s)["found"] == value)

    def both_are_free(self, timeout_s: float = ROUND_TRIP_S) -> bool:
        """Whether within that time nobody holds anything for anybody."""
        return all(
            self.until(side, name, value=0, timeout_s=timeout_s)
            for side in ("prefill", "decode")
            for name in ("held_requests", "quarantined_blocks")
        )

    def counts(self, side: str) -> dict[str, int]:
        """What one side has counted."""
        engine = self.prefill if side == "prefill" else self.decode
        return dict(engine.ask("ends")[side]["counters"])

    def has_free_blocks(self, wanted: int) -> bool:
        """Whether so many blocks of decode's pool have no request, or have none within a round trip."""
        reply = self.decode.ask("until", path=["free_blocks"], value=wanted, within_s=ROUND_TRIP_S)
        return bool(reply["found"] == wanted)

    def all_blocks(self) -> int:
        """Blocks in the pool of decode's scheduler, but for the null block."""
        return int(self.decode.ask("pool_blocks")) - 1


@contextlib.contextmanager
def running_pair(
    model: Path, folder: Path, mode: str, times: Mapping[str, float] = MappingProxyType({}), **decode_options: Any
) -> Iterator[Pair]:
    """A pair by "Pull" or "Push"; times as in `TIMES`, but for `times`."""
    extra: dict[str, Any] = {"kv_connector_extra_config": {**TIMES, **times}}
    prefill = EngineProcess(model, folder / "p.log", **GROWABLE, **nixl_connector("kv_producer", mode, **extra))
    decode = EngineProcess(
        model, folder / "d.log", **GROWABLE, **{**nixl_connector("kv_consumer", mode, **extra), **decode_options}
    )
    with running(prefill, decode):
        yield Pair(prefill, decode, mode)
