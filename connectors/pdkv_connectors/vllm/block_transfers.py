"""READs and WRITEs of block pairs through the stock NIXL worker's registrations and prepared descriptor lists.

The stock read and write paths pair two lists of block ids from one end. Here each pair is named, so that a prefix of
any length may be cached on decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.logger import init_logger

from pdkv.errors import TransportError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef, TransferKey

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer of which nothing is in flight any more."""

    key: TransferKey
    ok: bool


@dataclass(slots=True)
class _Peer:
    ref: EngineRef
    metadata: bytes
    stock_id: str
    suspect: bool = False  # a transfer with it has failed: NIXL must drop it and take it again


class BlockTransfers:
    """Transfers between this rank and the same rank of peers. Calls come from one thread at a time.

    Args:
        worker: the stock worker, registered.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._peers: dict[str, _Peer] = {}
        self._running: dict[TransferKey, tuple[Any, str]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def forget(self) -> None:
        """The agent is about to be destroyed: hold nothing of it."""
        self._running.clear()
        self._peers.clear()

    def add_peer(self, ref: EngineRef, metadata: bytes) -> None:
        """Take a peer's agent metadata; what was known of an earlier generation is dropped.

        Raises:
            TransportError: NIXL or the stock worker refuses it.
        """
        old = self._peers.pop(ref.engine_id, None)
        if old is not None:
            self._drop(old)
        try:
            stock_id = msgspec.msgpack.decode(metadata, type=NixlAgentMetadata).engine_id
        except msgspec.MsgspecError as error:
            raise TransportError(f"the agent metadata of {ref.engine_id} is not valid: {error}") from error
        peer = _Peer(ref, metadata, stock_id)
        self._load(peer)
        self._peers[ref.engine_id] = peer

    def post(self, operation: str, key: TransferKey, ref: EngineRef, pairs: Sequence[BlockPair]) -> None:
        """Begin a "READ" (the peer is the source) or a "WRITE" (this rank is).

        Raises:
            TransportError: it was not begun, and nothing of it is in flight.
        """
        peer = self._peers.get(ref.engine_id)
        if peer is None or peer.ref != ref:
            raise TransportError(f"{ref.engine_id} in generation {ref.generation} is not known to the transport.")
        self._heal(peer)
        reads = operation == "READ"
        here = _by_group(pairs, self._num_groups, "destination" if reads else "source")
        there = _by_group(pairs, self._num_groups, "source" if reads else "destination")
        try:
            handle = self._prepare(operation, peer.stock_id, here, there)
            self._running[key] = handle, ref.engine_id
            self._worker.nixl_wrapper.transfer(handle)
        except Exception as error:  # NIXL's errors have no common base but Exception
            peer.suspect = True
            if key in self._running and not self._release(key):
                logger.warning("a transfer that could not be posted cannot be released yet: %s", error)
                return  # poll() tries again; until then it counts as running
            raise TransportError(f"NIXL did not take the {operation} of {len(pairs)} blocks: {error}") from error
        self._worker._engine_last_active[peer.stock_id] = time.perf_counter()

    def poll(self) -> list[Ended]:
        """Transfers that have ended since the last call."""
        ended = []
        for key, (handle, engine_id) in list(self._running.items()):
            try:
                state = self._worker.nixl_wrapper.check_xfer_state(handle)
            except Exception as error:  # as above; also how NIXL reports a peer that has gone
                logger.warning("transfer %s with %s has failed: %s", key, engine_id, error)
                state = "ERR"
            if state == "PROC":
                continue
            if state != "DONE" and (peer := self._peers.get(engine_id)) is not None:
                peer.suspect = True
            # An error does not say that the backend has stopped: only a handle that lets itself be released does.
            if self._release(key):
                ended.append(Ended(key, state == "DONE"))
        return ended

    def _release(self, key: TransferKey) -> bool:
        try:
            self._worker.nixl_wrapper.release_xfer_handle(self._running[key][0])
        except Exception as error:
            logger.debug("transfer %s is not released yet: %s", key, error)
            return False
        del self._running[key]
        return True

    @property
    def _num_groups(self) -> int:
        return len(self._worker.kv_cache_config.transfer_groups)

    def _prepare(self, operation: str, stock_id: str, here: list[list[int]], there: list[list[int]]) -> Any:
        worker, rank = self._worker, self._worker.transfer_tp_rank
        info = worker.transfer_topo.get_engine_info(stock_id)
        local_ratio = worker._physical_blocks_per_logical_kv_block
        remote_ratio = info.remote_physical_blocks_per_logical
        if local_ratio != remote_ratio:
            raise TransportError(
                f"a block is {local_ratio} kernel blocks here and {remote_ratio} on the peer; use one backend."
            )
        local_ids = self._descriptors(worker.engine_id, worker._logical_to_kernel_block_ids(here, local_ratio))
        remote_ids = self._descriptors(stock_id, worker._logical_to_kernel_block_ids(there, remote_ratio))
        return worker.nixl_wrapper.make_prepped_xfer(
            operation,
            worker.src_xfer_handles_by_block_size[info.remote_block_size],
            local_ids,
            worker.dst_xfer_side_handles[stock_id][rank],
            remote_ids,
        )

    def _descriptors(self, stock_id: str, block_ids: Any) -> Any:
        """Indices into a prepared list of `[region, block]` descriptors."""
        worker = self._worker
        return worker._compute_desc_ids(
            block_ids=block_ids,
            dst_num_blocks=worker.dst_num_blocks[stock_id],
            block_size_ratio=None,
            physical_blocks_per_logical=worker._physical_blocks_per_logical_kv_block,
            region_num_blocks=worker.dst_region_num_blocks.get(stock_id) or None,
            region_group_ids=worker.dst_region_group_ids.get(stock_id) or None,
            uses_region_group_mapping=worker.dst_uses_region_group_mapping[stock_id],
        )

    def _load(self, peer: _Peer) -> None:
        worker, rank = self._worker, self._worker.transfer_tp_rank
        metadata = msgspec.msgpack.decode(peer.metadata, type=NixlAgentMetadata)
        try:
            name = worker.add_remote_agent(metadata, rank, worker.transfer_tp_size, metadata.dcp_size)
        except Exception as error:
            worker.dst_xfer_side_handles.pop(peer.stock_id, None)
            worker.dst_num_blocks.pop(peer.stock_id, None)
            raise TransportError(f"the agent of {peer.ref.engine_id} could not be added: {error}") from error
        with worker._handshake_lock:
            worker._remote_agents[peer.stock_id][(0, rank)] = name
            # Stock pull drops each agent that it does not find here.
            worker._engine_by_address[(f"pdkv/{peer.ref.engine_id}", 0)] = peer.stock_id
        worker._engine_last_active[peer.stock_id] = time.perf_counter()
        peer.suspect = False

    def _heal(self, peer: _Peer) -> None:
        """Take a peer's agent again after a failure, or after the stock worker has evicted it as idle."""
        busy = any(engine_id == peer.ref.engine_id for _, engine_id in self._running.values())
        if peer.suspect and not busy:
            self._drop(peer)
        if peer.stock_id not in self._worker._remote_agents:
            self._load(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.stock_id in self._worker._remote_agents:
            self._worker._cleanup_remote_engine(peer.stock_id, log_eviction=False)


def _by_group(pairs: Sequence[BlockPair], num_groups: int, side: str) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for pair in pairs:
        groups[pair.group].append(getattr(pair, side))
    return groups
