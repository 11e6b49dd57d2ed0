"""The P/D protocol, engine-agnostic: what P and D say to each other, and how every request ends on both sides.

:class:`Producer` and :class:`Consumer` are state machines without threads, sockets or sleeps: the host hands them
events and does the actions that they return. :class:`Session` is such a host, over any transport and message carrier.
`pdkv.testing.faults` runs them under every fault that a network, a transport or a peer can have.
"""

from __future__ import annotations

from pdkv.transfer.admission import Admission, Room
from pdkv.transfer.blocks import BlockPair, BlockRun, pair_by_index, units_of
from pdkv.transfer.carrier import MessageCarrier
from pdkv.transfer.clock import Clock, SystemClock
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.consumer_state import ConsumerSettings
from pdkv.transfer.counters import Counters
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.hosting import LocalHost, TransportHost
from pdkv.transfer.issued import ReferenceSettings
from pdkv.transfer.leases import LeaseSettings, LeaseTable, Renewer
from pdkv.transfer.messages import Claim, Compatibility, Descriptor, EngineRef, FailCode, TransferKey, decode, encode
from pdkv.transfer.peers import Peer
from pdkv.transfer.producer import Producer
from pdkv.transfer.producer_books import ProducerSettings
from pdkv.transfer.quarantine import Quarantine, QuarantineSettings
from pdkv.transfer.reference import Reference
from pdkv.transfer.session import Session, SessionSettings
from pdkv.transfer.shards import HeadSlice, Shards, parts_of
from pdkv.transfer.transport import Transfer, TransferState, Transport

__all__ = [
    "Admission",
    "BlockPair",
    "BlockRun",
    "CacheGeometry",
    "Claim",
    "Clock",
    "Compatibility",
    "Consumer",
    "ConsumerSettings",
    "Counters",
    "Descriptor",
    "EngineRef",
    "FailCode",
    "HeadSlice",
    "LeaseSettings",
    "LeaseTable",
    "LocalHost",
    "MessageCarrier",
    "Peer",
    "Producer",
    "ProducerSettings",
    "Quarantine",
    "QuarantineSettings",
    "Reference",
    "ReferenceSettings",
    "Renewer",
    "Room",
    "Session",
    "SessionSettings",
    "Shards",
    "SystemClock",
    "Transfer",
    "TransferKey",
    "TransferState",
    "Transport",
    "TransportHost",
    "decode",
    "encode",
    "pair_by_index",
    "parts_of",
    "units_of",
]
