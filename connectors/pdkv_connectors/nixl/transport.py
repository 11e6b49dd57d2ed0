"""Blocks over NIXL, by one-sided READ (pull) and WRITE (push).

Each extent is registered by itself, since a registration over several chunks is accepted and then moves wrong bytes.
Neighbouring blocks become one descriptor, cut where an extent ends on either side. Lists of descriptors are made for
each transfer: prepared ones save 80 µs of 250 for thirty blocks and 1 ms of 230 for eight thousand, but can only name
blocks one by one, and each descriptor costs 20 µs when it is posted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdkv.errors import ProtocolError, TransportError
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef, Name
from pdkv.transfer.runs import copies_for
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.unpacking import unpack
from pdkv_connectors.checking.keeper import SumKeeper
from pdkv_connectors.checking.transfer import moving
from pdkv_connectors.checking.transport import CheckingTransport
from pdkv_connectors.descriptors import require_to_connect
from pdkv_connectors.nixl.agent import MEMORY, destroy_agent, make_agent, translated
from pdkv_connectors.nixl.notes import Notes
from pdkv_connectors.nixl.probe_extents import probe_extents
from pdkv_connectors.nixl.settings import NixlSettings
from pdkv_connectors.nixl.transfers import Link, NixlAsked, NixlTransfer

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv_connectors.nixl.probe_extents import ProbedExtents

logger = logging.getLogger(__name__)

#: Without NVLink a READ of device memory needs it: 0.46 against 1605 GB/s were measured.
VRAM_VARIABLES = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}

#: How long :meth:`NixlTransport.close` lets transfers end by themselves, and how often it looks, in seconds.
GRACE_S = 1.0
POLL_S = 0.001

_probed: set[str] = set()  # kinds of memory, in this process


class _Own(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The transport's part of the metadata."""

    agent: Name
    metadata: bytes
    verifies: bool = False


_own_decoder = msgspec.msgpack.Decoder(_Own)


def read_own(own: bytes) -> _Own:
    """Raises ProtocolError where it is not valid."""
    return unpack(_own_decoder, own, "a peer's NIXL metadata")


class NixlTransport(CheckingTransport[Link]):
    """See the module's docstring. An agent lives from :meth:`register` to :meth:`unregister`.

    Args:
        settings: by default those of the environment.
        verify: have what arrives compared with its owner's sums; see :mod:`pdkv_connectors.checking`. A peer that keeps
            none is refused then.
    """

    name = "nixl"

    def __init__(self, settings: NixlSettings | None = None, *, verify: bool = False) -> None:
        super().__init__(verify=verify)
        self.settings = settings or NixlSettings.from_environment(os.environ)
        #: What the probe found after the last registration; None where it did not run.
        self.probed: ProbedExtents | None = None
        self._agent: Any = None
        self._registered: Any = None
        self._notes: Notes | None = None

    @property
    def agent(self) -> Any:
        """NIXL's agent, while a cache is registered."""
        if self._agent is None:
            raise TransportError("the NIXL agent is gone; register() again.")
        return self._agent

    def progress(self) -> None:
        """Let peers' transfers go on: what is not truly one-sided (tcp, emulation, sums) needs the owner's help."""
        self.require_process()
        self.receive()
        if self._notes is not None:
            self._notes.work()

    def describe_state(self) -> dict[str, Any]:
        probed = self.probed
        return {
            **super().describe_state(),
            "ucx_transport": probed.transport if probed is not None else None,
            "probe_gbps": round(probed.gb_per_s, 3) if probed is not None else None,
        }

    # Registration.

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        memory = MEMORY[geometry.driver]
        variables = {**(VRAM_VARIABLES if memory == "VRAM" else {}), **self.settings.variables}
        self._agent = make_agent(engine.engine_id, variables)
        extents = [(extent.address, extent.nbytes, extent.device_id, "") for extent in cache.extents()]
        try:
            with translated(f"register {len(extents)} extents"):
                self._registered = self._agent.register_memory(extents, memory)
            self.probed = self._probe(cache, memory) if self._is_to_probe(memory) else None
            if self.verifies:
                self._keeper = SumKeeper(cache, geometry, engine, self.counts)
                self._notes = Notes(self._agent, self._keeper.answer, self._known_agents)
        except BaseException:
            self._do_unregister()
            raise

    def _is_to_probe(self, memory: str) -> bool:
        """Once for a kind of memory, unless told to do it always: an engine that wakes has no seconds to spare."""
        if self.settings.probe == "device":
            return memory == "VRAM" and memory not in _probed
        return self.settings.probe == "always"

    def _probe(self, cache: GrowableKVCache, memory: str) -> ProbedExtents:
        probed = probe_extents(self._agent, cache, memory, timeout_s=self.settings.probe_timeout_s)
        _probed.add(memory)
        logger.info("NIXL probe: %s", probed)
        least_gbps = self.settings.least_gbps(memory)
        if probed.gb_per_s < least_gbps:
            problem = (
                f"a peer reads only {probed.gb_per_s:.2f} GB/s from the KV cache by {probed.transport}, at least "
                f"{least_gbps:g} GB/s are wanted; see which UCX transports work here (UCX_TLS)."
            )
            if self.settings.on_slow == "fail":
                raise TransportError(problem)
            self.counts["slow_probes"] += 1
            logger.warning("%s", problem)
        return probed

    def _do_unregister(self) -> None:
        if self._notes is not None:
            self._notes.close()
        self._notes = None
        if self._agent is not None and self._registered is not None:
            try:
                self._agent.deregister_memory(self._registered)
            except Exception:  # the agent is destroyed all the same, which is what counts
                logger.exception("NIXL could not deregister the KV cache.")
        self._registered = None
        holder, self._agent = [self._agent], None
        destroy_agent(holder)
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None

    def _do_stop(self, timeout_s: float) -> None:
        """Destroy the agent, which is the only way: cancelling leaves bytes that still land.

        Where peers serve this side's READs by emulation (tcp), UCX ends the *peer's* process when the reader goes under
        one. So what runs gets a moment to end by itself.
        """
        deadline = time.monotonic() + min(timeout_s, GRACE_S)
        while self._running and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._poll_running()
        for transfer in self._running:
            if isinstance(inner := moving(transfer), NixlTransfer):
                inner.drop()
        self._do_unregister()

    # Peers.

    def _do_describe(self) -> bytes:
        with translated("describe its agent"):
            return msgspec.msgpack.encode(_Own(self.agent.name, self.agent.get_agent_metadata(), self.verifies))

    def _do_connect(
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> Link:
        if geometry.driver not in MEMORY:
            raise TransportError(f"NIXL cannot reach memory of the peer's driver {geometry.driver!r}; use another one.")
        found = read_own(own)
        self._require_agreed(found.verifies)
        for known in (*self._connections.all(), *self._leaving):
            if known.link.agent == found.agent:
                return known.link  # NIXL has the agent already, or has it still
        link = Link(found.agent, found.metadata, found.verifies)
        self._add(link)
        return link

    def _known_agents(self) -> list[str]:
        return [known.link.agent for known in (*self._connections.all(), *self._leaving)]

    def _add(self, link: Link) -> None:
        require_to_connect("one more peer of a NIXL agent")
        with translated("add the peer's agent"):
            name = self.agent.add_remote_agent(link.metadata)
        if (name.decode() if isinstance(name, bytes) else name) != link.agent:
            self._remove(name)
            raise ProtocolError(f"a peer's metadata is of the NIXL agent {name!r}, not of {link.agent!r}.")

    def _do_disconnect(self, connection: Connection[Link]) -> None:
        used = any(known.link is connection.link for known in self._connections.all())
        if self._agent is not None and not used:
            self._remove(connection.link.agent)

    def _remove(self, agent: str) -> None:
        try:
            with translated("remove the peer's agent"):
                self.agent.remove_remote_agent(agent)
        except TransportError as error:
            logger.warning("%s It may have gone already.", error)

    def _renew(self, connection: Connection[Link]) -> None:
        """After a failure: remove and add the peer's agent, once."""
        link = connection.link
        if link.renewed:
            raise TransportError(
                f"transfers with {connection.peer.engine_id!r} fail, also after its agent was added again; handshake "
                "with it again, or give it up."
            )
        if any(transfer.connection.link is link for transfer in self._running):
            raise TransportError(f"a transfer with {connection.peer.engine_id!r} failed and others still run; wait.")
        link.renewed = True
        self.counts["renewed_peers"] += 1
        self._remove(link.agent)
        self._add(link)
        link.suspect = False

    # Transfers.

    def _do_post(self, connection: Connection[Link], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        # Notice first who has gone. On one host a READ goes through the kernel, which knows processes and no
        # registrations: it would succeed, with whatever is at those addresses now.
        self.progress()
        if connection.link.suspect:
            self._poll_running()
            self._renew(connection)
        return self._post_checked(connection, pairs, reads=reads, peer_verifies=connection.link.verifies)

    def _move(self, connection: Connection[Link], pairs: Sequence[BlockPair], *, reads: bool) -> NixlTransfer:
        ours, theirs = self._require_registered()[1], connection.geometry
        copies = copies_for(theirs, ours, pairs) if reads else copies_for(ours, theirs, pairs)
        here, there = (copies.destination, copies.source) if reads else (copies.source, copies.destination)
        with translated("post a transfer"):
            handle = self.agent.initialize_xfer(
                "READ" if reads else "WRITE",
                self._descriptors(ours, here, copies.nbytes),
                self._descriptors(theirs, there, copies.nbytes),
                connection.link.agent,
            )
        self.counts["descriptors"] += len(copies)
        transfer = NixlTransfer(self, connection, copies.total_nbytes, handle)
        transfer.start()
        return transfer

    def _ask(self, link: Link, body: bytes) -> NixlAsked:
        if self._notes is None:
            raise TransportError("the NIXL agent is gone; register() again.")
        try:
            return NixlAsked(self, link, self._notes.ask(link.agent, body))
        except TransportError:
            link.suspect = True
            raise

    def receive(self) -> None:
        """Take in what peers have sent, and let transfers of either side go on."""
        if self._agent is not None:
            with translated("make progress"):
                found = self._agent.get_new_notifs()
            if self._notes is not None:
                self._notes.take(found)

    def _descriptors(self, side: CacheGeometry, offsets: Any, nbytes: Any) -> Any:
        rows = np.empty((len(nbytes), 3), np.uint64)
        rows[:, 0] = offsets + side.base
        rows[:, 1] = nbytes
        rows[:, 2] = side.device_id
        return self.agent.get_xfer_descs(rows, MEMORY[side.driver])
