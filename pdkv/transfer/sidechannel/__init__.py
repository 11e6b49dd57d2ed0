"""The side channel: messages between engines over ZeroMQ, with CurveZMQ keys, bounded in everything.

Each engine listens with a ROUTER and connects with a DEALER to each address of its peer book. Whoever connects says
HELLO (:mod:`~pdkv.transfer.sidechannel.hello`); from then on both send frames of :mod:`pdkv.transfer.messages`. Where
messages go is known from these introductions and the peer book, never from what a request says.

Needs pyzmq; nothing else in `pdkv` does.
"""

from __future__ import annotations

from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.channel import SideChannel
from pdkv.transfer.sidechannel.keyfiles import KeyPair, read_key_pair, write_key_pair
from pdkv.transfer.sidechannel.peers import PeerBook, PeerEntry, PeersFile, StaticPeers
from pdkv.transfer.sidechannel.settings import Limits, SideChannelSettings

__all__ = [
    "Address",
    "KeyPair",
    "Limits",
    "PeerBook",
    "PeerEntry",
    "PeersFile",
    "SideChannel",
    "SideChannelSettings",
    "StaticPeers",
    "read_key_pair",
    "write_key_pair",
]
