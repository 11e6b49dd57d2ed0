"""Reads between caches of one process, on the host, that differ in block size, layout, heads or element type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pdkv.errors import GeometryError, ProtocolError, TransportError
from pdkv.kvcache import GrowableKVCache, Interior, KVCacheConfig, KVCacheLayout, KVCacheTensor, PageSpec
from pdkv.memory import HostDriver
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv_connectors import native
from pdkv_connectors.ipc import BlockColumns, IpcTransport, host_mover
from pdkv_connectors.ipc.host_leg import HostLeg

pytestmark = pytest.mark.cpu

LAYERS, HEAD_SIZE = 2, 16
P, D = EngineRef("P", 1), EngineRef("D", 1)


class Bench:
    """Builds caches and transports, and closes them.

    Args:
        compiled: the engines that use compiled kernels; the others use memoryview and numpy.
    """

    def __init__(self, stack: ExitStack, compiled: str) -> None:
        self._stack = stack
        self.compiled = compiled
        self.driver = HostDriver(4096)
        stack.callback(self.driver.close)

    def cache(
        self,
        *,
        heads: int = 4,
        tokens: int = 16,
        layout: str = "LBHNC",
        dtype: str = "bfloat16",
        blocks: int = 24,
        interior: Interior = "tokens",
    ) -> GrowableKVCache:
        item = 1 if dtype == "float8_e4m3fn" else 2
        spec = PageSpec(heads, tokens, 2 * HEAD_SIZE * item, tokens, dtype, interior=interior)
        return self.filled(
            KVCacheConfig.uniform([f"layer.{n}" for n in range(LAYERS)], spec, blocks, KVCacheLayout[layout])
        )

    def filled(self, config: KVCacheConfig) -> GrowableKVCache:
        """All blocks of it, with noise."""
        cache = self._stack.enter_context(GrowableKVCache(config, self.driver))
        cache.commit(config.num_blocks)
        for view in cache.views().values():
            view.copy_(torch.randn(view.shape).to(view.dtype))
        return cache

    def transport(self, cache: GrowableKVCache, engine: EngineRef, **options: Any) -> IpcTransport:
        transport = self.keep(IpcTransport(compiled=engine.engine_id in self.compiled, **options))
        transport.register(cache, engine)
        return transport

    def keep(self, transport: IpcTransport) -> IpcTransport:
        self._stack.callback(transport.close)
        return transport

    def read(
        self,
        source: GrowableKVCache,
        destination: GrowableKVCache,
        pairs: list[tuple[int, int]],
        heads: HeadSlice | None = None,
        **options: Any,
    ) -> None:
        owner, reader = self.transport(source, P), self.transport(destination, D, **options)
        reader.connect(P, owner.describe(), timeout_s=20.0, heads=heads)
        transfer = reader.read(P, BlockColumns(*zip(*pairs, strict=True)))
        assert transfer.wait(20.0) == "done", transfer.reason


@pytest.fixture(params=["compiled", "streamed", "compiled at P", "compiled at D", "not compiled"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    torch.manual_seed(1)
    compiled = {"compiled at P": "P", "compiled at D": "D", "not compiled": ""}.get(request.param, "PD")
    if request.param == "streamed":  # as only larger reads are
        monkeypatch.setattr(native, "STREAM_NBYTES", 1)
    with ExitStack() as stack:
        yield Bench(stack, compiled)


def units(cache: GrowableKVCache, tokens: int) -> list[torch.Tensor]:
    """``[units, H, tokens, C]`` of each layer."""
    return [v.unflatten(2, (-1, tokens)).transpose(1, 2).flatten(0, 1) for v in cache.views().values()]


def require_units_of_16_are_moved(bench: Bench, source: GrowableKVCache, destination: GrowableKVCache) -> None:
    """Read some units of 16 tokens; they hold what the source's do, and all others what they held."""
    before = [layer.clone() for layer in units(destination, 16)]
    pairs = [(5, 20), (0, 3), (21, 2), (22, 1), (7, 23)]
    bench.read(source, destination, pairs)
    for wanted, found, old in zip(units(source, 16), units(destination, 16), before, strict=True):
        for from_, to in pairs:
            old[to] = wanted[from_]
        assert torch.equal(found, old)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [((32, 64, 32, 64, 32), (0, 1, 2, 3, 4)), ((32, 32, 32), (2, 1, 0))],
    ids=["two sizes in turns", "descending"],
)
def test_layers_are_checked_against_their_own_sums_however_they_lie(
    bench: Bench, sizes: tuple[int, ...], places: tuple[int, ...]
) -> None:
    """Sums are looked up for several layers at once only where the layers, and their sums, lie at equal steps."""
    specs = {f"layer.{number}": PageSpec(2, 16, nbytes, 16, "bfloat16") for number, nbytes in enumerate(sizes)}
    room = 24 * max(page.page_bytes for page in specs.values())
    tensors = [
        KVCacheTensor(room * len(specs), (name,), room, specs[name].page_bytes, place * room)
        for name, place in zip(specs, places, strict=True)
    ]
    config = KVCacheConfig(24, tuple(tensors), specs, KVCacheLayout.LBNHC)
    require_units_of_16_are_moved(bench, bench.filled(config), bench.filled(config))


@pytest.mark.parametrize("layouts", [("LBHNC", "LBNHC"), ("LBNHC", "BLHNC"), ("BLNHC", "LBHNC")])
@pytest.mark.parametrize(("there", "here"), [(16, 64), (64, 16), (16, 16), (32, 16)])
def test_block_sizes_and_layouts_are_converted(bench: Bench, there: int, here: int, layouts: tuple[str, str]) -> None:
    source = bench.cache(tokens=there, layout=layouts[0])
    destination = bench.cache(tokens=here, layout=layouts[1])
    require_units_of_16_are_moved(bench, source, destination)


def test_blocks_that_fit_as_they_are_are_verified_as_they_move_or_where_they_arrived_and_never_copied_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watch(name: str, stock: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return stock(*args, **options)

        return watched

    for name in ("move", "convert", "verify"):
        monkeypatch.setattr(HostLeg, name, watch(name, getattr(HostLeg, name)))
    source, destination = bench.cache(), bench.cache()
    bench.read(source, destination, [(3, 5), (4, 1)])
    assert set(calls) == {"move" if "D" in bench.compiled else "verify"}
    for wanted, found in zip(source.views().values(), destination.views().values(), strict=True):
        assert torch.equal(found[[5, 1]], wanted[[3, 4]])


@pytest.mark.parametrize("nbytes", [1, 4096])
@pytest.mark.parametrize("tokens", [16, 32])
def test_what_takes_many_steps_is_whole_at_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tokens: int, nbytes: int
) -> None:
    for name in ("STEP_NBYTES", "WORK_STEP_NBYTES"):
        monkeypatch.setattr(host_mover, name, nbytes)
    source, destination = bench.cache(), bench.cache(tokens=tokens)
    require_units_of_16_are_moved(bench, source, destination)


@pytest.mark.parametrize(("heads", "layout"), [(8, "LBNHC"), (8, "LBHNC"), (4, "LBNHC")])
def test_a_slice_of_the_heads_is_taken_into_a_slice(bench: Bench, heads: int, layout: str) -> None:
    source, destination = bench.cache(heads=heads, layout=layout), bench.cache(heads=8, layout="LBNHC")
    before = [view.clone() for view in destination.views().values()]
    bench.read(source, destination, [(3, 5), (4, 1)], HeadSlice(2, source=1, destination=5))
    for wanted, found, old in zip(source.views().values(), destination.views().values(), before, strict=True):
        for from_, to in ((3, 5), (4, 1)):
            old[to, 5:7] = wanted[from_, 1:3]
        assert torch.equal(found, old)


def keys_and_values(cache: GrowableKVCache) -> list[torch.Tensor]:
    """``[2, B, H, N, head size]`` of each layer of a cache of columns, as its engine would read it."""
    found = []
    for view in cache.views().values():
        blocks, heads, tokens, _ = view.shape
        keys, values = view.reshape(blocks, heads, 2, -1).unbind(2)
        keys = keys.view(blocks, heads, HEAD_SIZE, tokens).transpose(2, 3)
        found.append(torch.stack((keys, values.view(blocks, heads, tokens, HEAD_SIZE))))
    return found


@pytest.mark.parametrize(("there", "here"), [(16, 32), (32, 16), (16, 64), (64, 16)])
def test_pages_that_hold_keys_by_column_become_blocks_of_another_size(bench: Bench, there: int, here: int) -> None:
    source = bench.cache(tokens=there, interior="columns")
    destination = bench.cache(tokens=here, heads=2, layout="BLHNC", interior="columns")
    before, pairs = keys_and_values(destination), [(5, 20), (0, 3), (21, 2), (22, 1), (7, 23)]
    bench.read(source, destination, pairs, HeadSlice(2, source=1))
    for wanted, found, old in zip(keys_and_values(source), keys_and_values(destination), before, strict=True):
        for from_, to in pairs:
            tokens = slice(from_ % (there // 16) * 16, from_ % (there // 16) * 16 + 16)
            place = slice(to % (here // 16) * 16, to % (here // 16) * 16 + 16)
            old[:, to // (here // 16), :, place] = wanted[:, from_ // (there // 16), 1:3, tokens]
        assert torch.equal(found, old)


def test_damage_is_found_in_pages_that_hold_keys_by_column(bench: Bench) -> None:
    source = bench.cache(tokens=32, interior="columns")
    owner = bench.transport(source, P)
    owner.offer([3])
    source.views()["layer.1"][3, 2, 30, 1] += 1
    reader = bench.transport(bench.cache(interior="columns"), D)
    reader.connect(P, owner.describe(), timeout_s=20.0)
    transfer = reader.read(P, BlockColumns([6], [1]))
    assert transfer.wait(20.0) == "failed"
    assert "block 3" in transfer.reason


@pytest.mark.parametrize("interior", ["columns", "heads"])
def test_heads_are_taken_out_of_blocks_of_one_size_whatever_is_in_them(bench: Bench, interior: Interior) -> None:
    source, destination = bench.cache(interior=interior), bench.cache(heads=2, interior=interior)
    bench.read(source, destination, [(3, 5)], HeadSlice(2, source=2))
    for wanted, found in zip(source.views().values(), destination.views().values(), strict=True):
        assert torch.equal(found[5], wanted[3, 2:])


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({"interior": "heads"}, {"interior": "heads", "tokens": 32}, "use blocks of one size"),
        ({"interior": "columns"}, {"interior": "columns", "layout": "LBNHC"}, "neither in dtype nor in order"),
        ({"interior": "columns"}, {}, "by columns in the source"),
        ({"interior": "opaque"}, {"interior": "opaque", "heads": 2}, "not known"),
    ],
)
def test_pages_of_which_not_enough_is_known_are_refused(
    bench: Bench, there: dict[str, Any], here: dict[str, Any], message: str
) -> None:
    owner, reader = bench.transport(bench.cache(**there), P), bench.transport(bench.cache(**here), D)
    with pytest.raises(GeometryError, match=message):
        reader.connect(P, owner.describe(), heads=HeadSlice(2))


def test_bf16_becomes_fp8_with_its_scales_saturated_and_nan_kept(bench: Bench) -> None:
    source, destination = bench.cache(), bench.cache(dtype="float8_e4m3fn", layout="LBNHC")
    first = source.views()["layer.0"][2]
    first[0, 0, :4] = torch.tensor([1e6, float("-inf"), float("nan"), -float("nan")], dtype=torch.bfloat16)
    scales = [(0.5, 2.0), (1.0, 0.25)]
    bench.read(source, destination, [(2, 7)], fp8_scales=scales)
    for layer, (k, v) in enumerate(scales):
        values = source.views()[f"layer.{layer}"][2].float()
        scaled = torch.cat((values[..., :HEAD_SIZE] / k, values[..., HEAD_SIZE:] / v), -1)
        found = destination.views()[f"layer.{layer}"][7]
        assert torch.equal(found.float().isnan(), scaled.isnan())
        wanted = scaled.nan_to_num(0.0, 448, -448).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(found.float().nan_to_num(0.0), wanted)
    assert destination.views()["layer.0"][7].view(torch.uint8)[0, 0, :4].tolist() == [0x7E, 0xFE, 0x7F, 0x7F]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dtype": "float8_e4m3fn"}, "holds"),
        ({"heads": 8}, "heads"),
        ({"tokens": 24}, "one must divide the other"),
        ({"tokens": 8}, "granule"),
    ],
)
def test_what_is_not_asked_for_or_cannot_be_is_refused(bench: Bench, shape: dict[str, Any], message: str) -> None:
    owner, reader = bench.transport(bench.cache(), P), bench.transport(bench.cache(**shape), D)
    with pytest.raises(GeometryError, match=message):
        reader.connect(P, owner.describe())


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_cache_whose_pages_are_spread_is_refused_when_it_is_registered(bench: Bench, layout: str) -> None:
    transport, cache = bench.keep(IpcTransport()), bench.cache(layout=layout)
    with pytest.raises(GeometryError, match=f"layout {layout} are not runs of memory.* choose another transport"):
        transport.register(cache, P)


def test_a_cache_whose_pages_are_no_words_is_refused_when_it_is_registered(bench: Bench) -> None:
    config = KVCacheConfig.uniform(["layer"], PageSpec(2, 4, 12, 4, "bfloat16"), 8, KVCacheLayout.LBNHC)
    with GrowableKVCache(config, bench.driver) as cache:
        cache.commit(8)
        with pytest.raises(GeometryError, match=r"pages of 12 bytes .* do not consist of words"):
            bench.keep(IpcTransport()).register(cache, P)


def test_units_that_are_not_there_are_refused(bench: Bench) -> None:
    owner, reader = bench.transport(bench.cache(), P), bench.transport(bench.cache(tokens=64, blocks=4), D)
    reader.connect(P, owner.describe())
    with pytest.raises(ProtocolError, match="block 16 was named as a destination"):
        reader.read(P, BlockColumns([1], [16]))
    with pytest.raises(ProtocolError, match="occur twice"):
        reader.read(P, BlockColumns([1, 2], [15, 15]))


def test_sums_are_asked_of_a_peer_that_keeps_some_only(bench: Bench) -> None:
    cache = bench.cache()
    without, reader = bench.transport(cache, P, verify=False), bench.transport(bench.cache(), D)
    with pytest.raises(TransportError, match="keeps no sums"):
        reader.connect(P, without.describe())


def test_blocks_that_are_offered_without_a_group_are_summed_as_blocks_of_each(bench: Bench) -> None:
    owner, reader = IpcTransport(), IpcTransport()
    for transport, engine in ((owner, P), (reader, D)):
        bench.keep(transport)
        transport.register(bench.cache(), engine, groups=[["layer.0"], ["layer.1"]])
    reader.connect(P, owner.describe(), timeout_s=20.0)
    owner.offer([4, 5])
    for group in (0, 1):
        transfer = reader.read(P, BlockColumns([4, 5], [7, 8], group))
        assert transfer.wait(20.0) == "done", transfer.reason
    assert reader.counts["offers_asked"] == 0
    assert owner.cache is not None
    assert reader.cache is not None
    for wanted, found in zip(owner.cache.views().values(), reader.cache.views().values(), strict=True):
        assert torch.equal(found[[7, 8]], wanted[[4, 5]])
