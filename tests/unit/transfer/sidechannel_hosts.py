"""The smallest host of both endpoints: side channels carry what they say, and the test ends their transfers."""

from __future__ import annotations

import time

from transfer_pair import descriptor

from pdkv.transfer import BlockRun, Consumer, ConsumerSettings, EngineRef, Producer, SystemClock
from pdkv.transfer.actions import FreeBlocks, Loaded, PostRead, PostWrite, Send
from pdkv.transfer.sidechannel import SideChannel

DEADLINE_S = 20.0


def load_over(prefill_channel: SideChannel, decode_channel: SideChannel, mode: str) -> list[int]:
    """Load one request's three blocks; the blocks that P got back."""
    clock = SystemClock()
    prefill = Producer(clock, EngineRef("P/1", 1), descriptor())
    decode = Consumer(clock, EngineRef("D/1", 1), descriptor(), ConsumerSettings(mode=mode))  # type: ignore[arg-type]
    decode.arrived("d", prefill.prefilled("r", (BlockRun(0, (1, 2, 3)),), 40), 40)
    decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    until, loaded, freed = time.monotonic() + DEADLINE_S, False, list[int]()
    while not (loaded and freed):
        assert time.monotonic() < until, (prefill_channel.describe_state(), decode_channel.describe_state())
        for endpoint, channel in ((prefill, prefill_channel), (decode, decode_channel)):
            for message in channel.receive():
                endpoint.received(message)
            endpoint.tick()
            for action in endpoint.take_actions():
                match action:
                    case Send():
                        assert channel.send(action.message)
                    case PostRead():
                        decode.read_ended(action.key, True)
                    case PostWrite():
                        prefill.write_ended(action.key, True)
                    case Loaded():
                        loaded = True
                    case FreeBlocks():
                        freed.extend(action.block_ids)
            channel.wait(0.001)
    return freed
