"""The rows of NIXL: neighbours merged beside one descriptor per block and layer, sums verified beside none, tcp beside
one large descriptor, the handshake of 80 layers beside stock vLLM's, and what an agent takes while it does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from _plain_memory import PLAIN
from _transfer_cache import PAGE_NBYTES_OF_TOKEN, build, require_moved
from _transfer_rows import Row, bandwidth_share, interleaved, reference, time_ratio, within

from pdkv.kvcache import GrowableKVCache
from pdkv.testing.child import Child
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transfer
from pdkv_connectors.nixl.agent import MEMORY
from pdkv_connectors.nixl.settings import NixlSettings
from pdkv_connectors.nixl.transport import NixlTransport

LAYERS = 32
PAGE_NBYTES = 16 * PAGE_NBYTES_OF_TOKEN
#: Blocks that follow each other on both sides; a pool that has served for a while gives shorter ones, a fresh one all.
RUN = 64
TIMEOUT_S = 120.0
#: UCX moves device memory over tcp only where it may also copy it to the host and back.
TCP = {"host": {"UCX_TLS": "tcp"}, "cuda": {"UCX_TLS": "tcp,cuda_copy"}}
IDLE_S = 2.0


class Reader:
    """D: a transport over a cache of its own, connected to a cache of the owner's."""

    def __init__(
        self,
        owner: Child,
        driver: str,
        name: str,
        stack: ExitStack,
        *,
        variables: dict[str, str],
        verify: bool = False,
        **shape: Any,
    ) -> None:
        how = {"name": name, "variables": variables, "verify": verify}
        metadata = bytes.fromhex(owner.ask("build", timeout_s=TIMEOUT_S, **how, **shape))
        self.cache: GrowableKVCache = build(driver, **shape)
        stack.callback(self.cache.close)
        self.transport = NixlTransport(NixlSettings(probe="never", variables=variables), verify=verify)
        stack.callback(self.transport.close)
        self.transport.register(self.cache, EngineRef(f"reader-{name}", 1))
        self.peer, self.metadata = EngineRef(name, 1), metadata
        self.transport.connect(self.peer, metadata)

    def read(self, pairs: list[BlockPair]) -> None:
        self._end(self.transport.read(self.peer, pairs))

    def _end(self, transfer: Transfer) -> None:
        if transfer.wait(TIMEOUT_S) != "done":
            raise SystemExit(f"transfer: {transfer.reason}")

    # NIXL itself, by the same two agents.

    def prepare(self) -> tuple[Any, Any]:
        """Descriptors of every block of every layer, ours and the peer's, layer by layer: what stock vLLM prepares."""
        agent, link = self.transport.agent, self.transport._connections.get(self.peer)
        sides = []
        for who, geometry in (("NIXL_INIT_AGENT", self.transport.geometry), (link.link.agent, link.geometry)):
            (run,) = geometry.layers
            layers = geometry.base + run.offset + np.arange(run.count) * run.layer_stride
            offsets = np.add.outer(layers, np.arange(geometry.num_blocks) * run.block_stride).ravel()
            sides.append(agent.prep_xfer_dlist(who, _rows(offsets, PAGE_NBYTES, geometry.device_id), self._memory))
        return sides[0], sides[1]

    def read_prepared(self, prepared: tuple[Any, Any], pairs: list[BlockPair], *, merge: bool) -> None:
        """One descriptor per block and layer, by number; NIXL merges neighbours itself if it may."""
        numbers = []
        for side in (2, 1):
            blocks = np.array([pair[side] for pair in pairs])
            layers = np.arange(LAYERS) * self.cache.num_committed_blocks
            numbers.append(np.add.outer(layers, blocks).ravel().astype(np.int32))
        here, there = prepared
        self._post(
            self.transport.agent.make_prepped_xfer(
                "READ", here, numbers[0], there, numbers[1], skip_desc_merge=not merge
            )
        )

    def read_whole(self) -> None:
        """The peer's first extent, by one descriptor."""
        agent, link = self.transport.agent, self.transport._connections.get(self.peer)
        sides = [
            agent.get_xfer_descs(
                _rows(np.array([side.base + side.extents()[0].offset]), side.extents()[0].nbytes, side.device_id),
                self._memory,
            )
            for side in (self.transport.geometry, link.geometry)
        ]
        self._post(agent.initialize_xfer("READ", *sides, link.link.agent))

    @property
    def _memory(self) -> str:
        return MEMORY[self.cache.driver.name]

    def _post(self, handle: Any) -> None:
        agent, deadline = self.transport.agent, time.monotonic() + TIMEOUT_S
        state = agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise SystemExit("transfer: NIXL itself did not end in time")
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"transfer: NIXL itself ended as {state}")
        agent.release_xfer_handle(handle)


def nixl_rows(owner: Child, driver: str, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All rows, of :data:`PLAIN` memory those of merging only; raises SystemExit where a byte is wrong."""
    wanted, repeats = (128, 3) if quick else (256, 9) if driver == "host" else (512, 9)
    with ExitStack() as stack:
        stack.callback(owner.ask, "close")
        rows = _merging(owner, driver, wanted, repeats, stack)
        say("merging done")
        if driver == PLAIN:
            return rows
        rows += _verified(owner, driver, wanted // 2, repeats, stack)
        say("sums done")
        rows += _over_tcp(owner, driver, wanted, repeats, stack)
        say("tcp done")
        rows += _handshake(owner, driver, repeats, stack)
        return [*rows, _idle()]


def in_runs(blocks: int, count: int, seed: int) -> list[BlockPair]:
    """`count` blocks in runs of :data:`RUN` that follow each other on both sides, the runs at random."""
    random = np.random.default_rng(seed)
    places = [random.permutation(blocks // RUN)[: count // RUN] * RUN for _ in range(2)]
    return [BlockPair(0, int(a) + i, int(b) + i) for a, b in zip(*places, strict=True) for i in range(RUN)]


def _merging(owner: Child, driver: str, wanted: int, repeats: int, stack: ExitStack) -> list[Row]:
    blocks, nbytes = 2 * wanted, wanted * LAYERS * PAGE_NBYTES
    reader = Reader(owner, driver, "merging", stack, variables={}, layers=LAYERS, blocks=blocks)
    pairs, prepared = in_runs(blocks, wanted, seed=1), reader.prepare()
    reader.read(pairs)
    descriptors = reader.transport.counts["descriptors"]
    times = interleaved(
        {
            "each": lambda: reader.read_prepared(prepared, pairs, merge=False),
            "nixl": lambda: reader.read_prepared(prepared, pairs, merge=True),
            "merged": lambda: reader.read(pairs),
        },
        repeats,
    )
    require_moved(reader.cache, [pair.source for pair in pairs], [pair.destination for pair in pairs])
    for side in prepared:
        side.release()
    each = reference(f"NIXL ({driver}), a descriptor per block and layer, none merged", times["each"], nbytes)
    # Growable memory of a GPU is emulated by UCX where it cannot be exported, at one speed whatever the descriptors.
    target = 10.0 if driver == PLAIN else None
    faster = bandwidth_share(f"nixl ({driver}), runs of {RUN} merged", times["merged"], each, target, nbytes)
    return [
        each,
        reference(f"NIXL ({driver}), a descriptor per block and layer, as vLLM posts them", times["nixl"], nbytes),
        faster,
        replace(
            faster,
            name=f"nixl ({driver}), how many times fewer descriptors",
            ratio=len(pairs) * LAYERS / descriptors,
            target=20.0,
        ),
    ]


def _verified(owner: Child, driver: str, wanted: int, repeats: int, stack: ExitStack) -> list[Row]:
    """Beside the same blocks as they come. They were offered, so that their owner only has to look its sums up."""
    blocks, nbytes = 2 * wanted, wanted * LAYERS * PAGE_NBYTES
    plain, checked = (
        Reader(owner, driver, f"sums-{verify}", stack, variables={}, verify=verify, layers=LAYERS, blocks=blocks)
        for verify in (False, True)
    )
    pairs = in_runs(blocks, wanted, seed=3)
    times = interleaved({"plain": lambda: plain.read(pairs), "checked": lambda: checked.read(pairs)}, repeats)
    for reader in (plain, checked):
        require_moved(reader.cache, [pair.source for pair in pairs], [pair.destination for pair in pairs])
    as_it_comes = reference(f"nixl ({driver}), {wanted} blocks in runs of {RUN}", times["plain"], nbytes)
    name = f"the same, sums verified ({driver})"
    return [as_it_comes, time_ratio(name, times["checked"], as_it_comes, None, nbytes)]


def _over_tcp(owner: Child, driver: str, wanted: int, repeats: int, stack: ExitStack) -> list[Row]:
    blocks, nbytes = 2 * wanted, wanted * LAYERS * PAGE_NBYTES
    reader = Reader(owner, driver, "tcp", stack, variables=TCP[driver], layers=LAYERS, blocks=blocks)
    whole = Reader(owner, driver, "tcp-whole", stack, variables=TCP[driver], layers=1, blocks=wanted * LAYERS)
    pairs = in_runs(blocks, wanted, seed=2)
    times = interleaved({"whole": whole.read_whole, "runs": lambda: reader.read(pairs)}, repeats)
    require_moved(reader.cache, [pair.source for pair in pairs], [pair.destination for pair in pairs])
    raw = reference(f"NIXL itself over tcp ({driver}), one large descriptor", times["whole"], nbytes)
    return [raw, bandwidth_share(f"nixl over tcp ({driver}), runs of {RUN}", times["runs"], raw, 0.9, nbytes)]


def _handshake(owner: Child, driver: str, repeats: int, stack: ExitStack) -> list[Row]:
    reader = Reader(owner, driver, "handshake", stack, variables={}, layers=80, blocks=64)

    def shake() -> None:
        reader.transport.describe()
        reader.transport.disconnect(reader.peer.engine_id)
        reader.transport.connect(reader.peer, reader.metadata)

    times = interleaved({"shake": shake}, 3 * repeats)["shake"]
    row = within(f"handshake of 80 layers ({driver}), describe and connect", times, 10e-3)
    stock = _stock_nbytes(reader)
    size = reference("its size beside stock vLLM's metadata, in bytes", times)
    ratio = len(reader.metadata) / stock
    return [row, replace(size, ratio=ratio, target=1.0, note=f"{len(reader.metadata)} and {stock} bytes")]


def _stock_nbytes(reader: Reader) -> int:
    """The size of vLLM 0.32's NixlAgentMetadata for the same cache, with as many names as it needs."""
    geometry, agent = reader.transport.geometry, reader.transport.agent
    (run,) = geometry.layers
    addresses = [geometry.base + run.offset + index * run.layer_stride for index in range(run.count)]
    fields = {
        "engine_id": "reader", "agent_metadata": agent.get_agent_metadata(), "kv_caches_base_addr": addresses,
        "device_id": 0, "num_blocks": geometry.num_blocks, "block_lens": [PAGE_NBYTES] * run.count,
        "block_strides": [run.block_stride] * run.count, "kv_cache_layout": "HND", "block_size": 16,
        "ssm_sizes": [0, 0], "attn_backend_name": "FLASH_ATTN", "physical_blocks_per_logical_kv_block": 1,
    }  # fmt: skip
    return len(msgspec.msgpack.encode(fields))


def _idle() -> Row:
    """All agents of this process, connected, nobody calling them."""
    before = time.process_time()
    time.sleep(IDLE_S)
    share = (time.process_time() - before) / IDLE_S
    return replace(within("nixl, idle: cores that the agents take", [share], 0.02), note="limit 2 % of a core")


def _rows(addresses: Any, nbytes: int, device_id: int) -> Any:
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device_id
    return rows
