"""Which transport a peer is reached by: the best of those that both sides have and that connects.

A transport that should have worked and did not is counted as a fall back, and logged with its reason (I13). Where
nobody says whether to verify, it is a preference like the order: for a peer that keeps no sums the next transport is
taken, unverified; that is counted by itself and logged.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pdkv.errors import GeometryError, PdkvError, TransportError
from pdkv.transfer.connecting import Steps, connected
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import Transport
from pdkv_connectors.auto.description import Description
from pdkv_connectors.auto.makers import ORDER, listed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a peer is reached by, whether that verifies, and why it is not something better."""

    peer: EngineRef
    transport: str
    verified: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Chooser:
    """One engine's part in choosing.

    Attributes:
        host: the machine that it is on.
        registered: the transports that it has, by name.
        unavailable: why others are not there.
        counts: where fall backs are counted.
    """

    host: str
    registered: Mapping[str, Transport]
    unavailable: Mapping[str, str]
    counts: Counter[str]

    def connect(self, peer: EngineRef, theirs: Description, timeout_s: float, heads: HeadSlice | None) -> Steps[Choice]:
        """Try what both have, the best first, in steps that do not wait.

        Raises as :meth:`pdkv.transfer.transport.Transport.connect` does.
        """
        deadline, failed = time.monotonic() + timeout_s, dict[str, PdkvError]()
        why = {name: self._why_not(name, theirs) for name in ORDER}
        for name in ORDER:
            if why[name]:
                continue
            left_s = max(0.05, deadline - time.monotonic())
            try:
                description = theirs.transports[name]
                begun = self.registered[name].begin_connect(peer, description, timeout_s=left_s, heads=heads)
                yield from connected(begun)
            except TransportError as error:
                failed[name], why[name] = error, str(error)
                self.counts["fallbacks"] += 1
                logger.warning("Peer %s cannot be reached by %s: %s", peer.engine_id, name, error)
            else:
                better = {other: why[other] for other in ORDER[: ORDER.index(name)]}
                verified = self.registered[name].verifies
                if not verified and any(self.registered[other].verifies for other in failed):
                    self.counts["unverified_fallbacks"] += 1
                    logger.warning("What peer %s sends is not verified; set `verify` alike on both.", peer.engine_id)
                return Choice(peer, name, verified, listed(better) or "the peer is on this host")
        raise self._refusal(peer, failed, why)

    def _refusal(self, peer: EngineRef, failed: Mapping[str, PdkvError], why: Mapping[str, str]) -> PdkvError:
        """What to raise where no transport has connected."""
        misfits = [name for name, error in failed.items() if isinstance(error, GeometryError)]
        if misfits and len(failed) > len(misfits):
            others = {name: reason for name, reason in why.items() if name not in misfits}
            return GeometryError(f"{failed[misfits[0]]} What else there is: {listed(others)}.")
        if failed:
            return next(iter(failed.values()))
        return TransportError(f"engine {peer.engine_id!r} has no transport in common with this one: {listed(why)}.")

    def _why_not(self, name: str, theirs: Description) -> str:
        if name not in self.registered:
            return self.unavailable.get(name, "it is not wanted here")
        if name not in theirs.transports:
            return "the peer does not have it"
        return "the peer is on another host" if name == "ipc" and theirs.host != self.host else ""
