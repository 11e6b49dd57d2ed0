"""Every message that there is, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.messages import (
    Abort,
    Ack,
    AnyMessage,
    Cancel,
    Claim,
    Compatibility,
    Descriptor,
    Done,
    EngineRef,
    Fail,
    FailCode,
    Handshake,
    LeaseState,
    Refuse,
    Register,
    Renew,
    Renewed,
    TransferKey,
    Welcome,
)
from pdkv.transfer.shards import Shards

counts = st.integers(0, 2**53)
names = st.text(min_size=1, max_size=256)
texts = st.text(max_size=512)
seconds = st.floats(0, 86_400)
digests = st.binary(min_size=32, max_size=32)
ids = st.integers(0, 2**31 - 1)

# Mostly few engines and requests, so that messages meet.
engine_ids = st.one_of(st.sampled_from(("P/1", "P/2", "D/1", "D/2")), names)
engines = st.builds(EngineRef, engine_ids, st.one_of(st.integers(0, 3), counts))
keys = st.builds(
    TransferKey, st.one_of(st.sampled_from(("r", "s")), names), st.one_of(st.integers(0, 3), counts), st.integers(0, 3)
)
claims = st.one_of(st.none(), st.builds(Claim, digests, digests, counts))
runs = st.lists(st.builds(BlockRun, ids, st.lists(ids, max_size=8).map(tuple)), max_size=4).map(tuple)
numbers = st.one_of(st.integers(1, 8), st.integers(1, 2**31 - 1))
shards = st.builds(Shards, numbers, numbers, numbers, numbers)
descriptors = st.builds(
    Descriptor,
    compatibility=st.builds(
        Compatibility, texts, texts, texts, texts, counts, texts, st.one_of(st.none(), shards), st.booleans()
    ),
    num_blocks=counts,
    metadata=st.binary(max_size=64),
)
_ends = {"sender": engines, "receiver": engines, "floor": st.one_of(st.just(0), counts)}
_keyed = {**_ends, "key": keys, "claim": claims}
codes = st.sampled_from(FailCode)

MESSAGES: dict[str, st.SearchStrategy[AnyMessage]] = {
    "HANDSHAKE": st.builds(Handshake, **_ends, descriptor=descriptors),
    "WELCOME": st.builds(Welcome, **_ends, descriptor=descriptors),
    "REFUSE": st.builds(Refuse, **_ends, meant=engines, code=codes, reason=texts),
    "RENEW": st.builds(Renew, **_keyed, sequence=counts),
    "RENEWED": st.builds(Renewed, **_keyed, sequence=counts, state=st.sampled_from(LeaseState), remaining_s=seconds),
    "REGISTER": st.builds(Register, **_keyed, num_tokens=counts, runs=runs, remaining_s=seconds),
    "DONE": st.builds(Done, **_keyed),
    "FAIL": st.builds(Fail, **_keyed, code=codes, reason=texts),
    "ABORT": st.builds(Abort, **_keyed, reason=texts),
    "CANCEL": st.builds(Cancel, **_keyed),
    "ACK": st.builds(Ack, **_keyed, of=st.one_of(st.sampled_from(("DONE", "ABORT", "REGISTER")), texts)),
}
messages = st.one_of(*MESSAGES.values())
