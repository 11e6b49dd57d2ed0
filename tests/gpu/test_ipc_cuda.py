"""The ipc transport on CUDA: kernels against torch byte for byte, the contract, order, and who holds memory.

Its parts that need no GPU are tested in `tests/unit/ipc`, which the cases and the processes here come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "ipc"))

from kernel_cases import LAYERS, PLANS, Case, make_case  # noqa: E402

from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_driver_check, run_transport_check  # noqa: E402
from pdkv_connectors.ipc.legs import LayerPlace, Leg  # noqa: E402

UNITS = 200
PAGE = 98_304
ALL = [(block, 39 - block) for block in range(40)]
SLOW_CYCLES = 100_000_000  # some 55 ms at 1.8 GHz: short kernels end before anybody could read too early


@pytest.fixture(scope="module")
def mover() -> Iterator[Any]:
    import torch

    from pdkv_connectors.ipc.cuda_mover import CudaMover

    torch.cuda.init()
    mover = CudaMover(0)
    yield mover
    mover.close()


def leg_of(case: Case) -> Leg:
    plan = case.plan
    return Leg(
        plan,
        tuple(layer * case.source_stride for layer in range(LAYERS)),
        tuple(layer * case.destination_stride for layer in range(LAYERS)),
        tuple(8 * layer * case.sums.stride(0) for layer in range(LAYERS)),
        tuple(range(LAYERS)),
    )


def copy(mover: Any, case: Case, *, verify: bool, programs: int | None = None) -> tuple[int, int] | None:
    """Run the copy kernel; what it found wrong."""
    inverses = [tuple(pair) for pair in case.inverses.tolist()]
    sums = case.sums.data_ptr() if verify else None
    leg = mover.copy_leg(leg_of(case), case.source.data_ptr(), case.destination.data_ptr(), sums, inverses)
    ids = [units.int().cpu().numpy() for units in (case.source_units, case.destination_units)]
    work = mover.start_copy([([leg], *ids)], programs)
    mover.drain()
    assert work.is_done()
    mover.free([leg])
    fault: tuple[int, int] | None = work.fault
    return fault


def device_case(name: str, seed: int = 1) -> Case:
    import torch

    case = make_case(PLANS[name], UNITS, "cuda", seed)
    torch.cuda.synchronize()
    return case


@pytest.mark.parametrize("verify", [False, True], ids=["copied", "verified"])
@pytest.mark.parametrize("name", PLANS)
def test_the_copy_kernel_equals_torch(mover: Any, name: str, verify: bool) -> None:
    import torch

    if verify and not PLANS[name].can_verify:
        pytest.skip("a unit is less than a granule of sums")
    case = device_case(name)
    assert copy(mover, case, verify=verify) is None
    differing = (case.destination != case.expected).nonzero()
    assert torch.equal(case.destination, case.expected), f"{len(differing)} bytes differ, from {differing[0].item()} on"


@pytest.mark.parametrize("name", PLANS)
def test_few_programs_copy_everything_too_and_find_all_sums_right(mover: Any, name: str) -> None:
    import torch

    case = device_case(name)
    assert copy(mover, case, verify=PLANS[name].can_verify, programs=3) is None
    assert torch.equal(case.destination, case.expected)


@pytest.mark.parametrize("size", [1, 2, 17])  # the ids of a single unit are arguments of the kernel
def test_copies_of_few_units_add_up_to_one_of_all(mover: Any, size: int) -> None:
    import torch

    case = device_case("equal")
    source, destination = case.source_units, case.destination_units
    for first in range(0, UNITS, size):
        case.source_units, case.destination_units = source[first : first + size], destination[first : first + size]
        assert copy(mover, case, verify=True) is None
    assert torch.equal(case.destination, case.expected)


def test_the_end_of_a_copy_is_seen_from_a_thread_that_has_used_no_device(mover: Any) -> None:
    case = device_case("equal")
    leg = mover.copy_leg(leg_of(case), case.source.data_ptr(), case.destination.data_ptr(), None, [(1.0, 1.0)] * LAYERS)
    ids = [units.int().cpu().numpy() for units in (case.source_units, case.destination_units)]
    work = mover.start_copy([([leg], *ids)], None)
    mover.drain()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work.is_done).result(timeout=10)
    mover.free([leg])


def test_fp8_of_every_bf16_number_is_torchs_and_saturates(mover: Any) -> None:
    import torch

    case = device_case("fp8")
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    page = PLANS["fp8"].source.nbytes // 2
    case.source.view(torch.bfloat16)[: 4 * page] = every[torch.arange(4 * page, device="cuda") % 65536]
    units = torch.arange(4, dtype=torch.int64)
    case.source_units, case.destination_units = units.cuda(), units.cuda()
    case.inverses = torch.ones(LAYERS, 2)
    copy(mover, case, verify=False)
    found = case.destination[: 4 * page].view(torch.float8_e4m3fn).float()
    wanted = case.source.view(torch.bfloat16)[: 4 * page].float()
    assert bool((found.isnan() == wanted.isnan()).all())
    finite = ~wanted.isnan()
    rounded = wanted[finite].clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(found[finite], rounded)


@pytest.mark.parametrize("name", ["equal", "equal-large", "equal-odd", "mla", "nhc-to-hnc", "64-to-16-large"])
def test_the_sum_kernel_equals_torch(mover: Any, name: str) -> None:
    import numpy as np
    import torch

    case = device_case(name)
    shape, blocks = case.plan.source, case.sums.shape[1]
    found = torch.zeros_like(case.sums)
    places = [LayerPlace(0, shape, layer * case.source_stride, 8 * layer * found.stride(0)) for layer in range(LAYERS)]
    torch.cuda.synchronize()
    leg = mover.sum_leg(places, case.source.data_ptr(), found.data_ptr())
    work = mover.start_sums([([leg], np.random.default_rng(1).permutation(blocks).astype(np.int32))])
    mover.drain()
    assert work.is_done()
    assert torch.equal(found, case.sums)


@pytest.mark.parametrize("name", ["equal", "equal-large", "hnc-to-nhc", "half-the-heads-nhc", "fp8-and-all"])
def test_every_flip_swap_and_stale_piece_is_found(mover: Any, name: str, record: Callable[..., None]) -> None:
    import torch

    case = device_case(name)
    plan = case.plan
    generator = torch.Generator().manual_seed(7)
    words = case.source.view(torch.int64)
    pristine = words.clone()
    wrong = case.source.flip(0).view(torch.int64)  # what stale pieces are taken from
    rounds = 120
    for number in range(rounds):
        unit = int(torch.randint(0, UNITS, (1,), generator=generator))
        source_unit = int(case.source_units[unit])
        layer = number % LAYERS
        begin = layer * case.source_stride + source_unit // plan.source_units * plan.source.block_stride
        begin += plan.first_source_byte + source_unit % plan.source_units * plan.unit * plan.source.state_stride
        row = plan.source.content_bytes // 8
        first = begin // 8 + int(torch.randint(0, row, (1,), generator=generator))
        if number % 3 == 0:
            words[first] ^= 1 << int(torch.randint(0, 63, (1,), generator=generator))
        elif number % 3 == 1:
            other = begin // 8 + (first - begin // 8 + 1) % row
            words[[first, other]] = words[[other, first]]
        else:
            words[begin // 8 : begin // 8 + row] = wrong[begin // 8 : begin // 8 + row]
        torch.cuda.synchronize()
        assert copy(mover, case, verify=True, programs=3 if number % 2 else None) == (0, unit), f"round {number}"
        words.copy_(pristine)
    record("ipc-damage", plan=name, rounds=rounds, missed=0)


def test_the_driver_imports_what_was_exported() -> None:
    from pdkv.memory import open_driver

    run_driver_check("imports_what_was_exported", lambda: open_driver("cuda"))


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench("pdkv_connectors.ipc:IpcTransport", processes=2, driver="cuda") as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_it_keeps_the_contract_between_processes(rule: str, bench: TransportBench) -> None:
    run_transport_check(rule, bench)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Any]:
    from ipc_peers import peers

    with peers(tmp_path, "cuda", page=PAGE) as (p, d):
        d.meet(p)
        yield p, d


def test_blocks_behind_a_long_kernel_are_read_only_when_it_has_ended(pair: Any, record: Callable[..., None]) -> None:
    import time

    p, d = pair
    assert d.read(p, [(1, 1)]) == "done"
    for value in range(20, 26):
        p.ask("mark_slowly", block=3, value=value, cycles=SLOW_CYCLES)
        began = time.perf_counter()
        assert d.read(p, [(3, 2)]) == "done"
        record("ipc-order", how="asked", value=value, seconds=time.perf_counter() - began)
        assert d.ask("is_marked", block=2, value=value)


def test_blocks_offered_behind_a_long_kernel_are_announced_only_when_it_has_ended(pair: Any) -> None:
    from ipc_peers import until

    p, d = pair
    for value in range(30, 34):
        p.ask("mark_slowly", block=3, value=value, cycles=SLOW_CYCLES)
        p.ask("offer", blocks=[3])
        assert until(lambda: p.ask("offers_pending"), lambda left: left == 0) == 0
        assert d.read(p, [(3, 2)]) == "done"
        assert d.ask("is_marked", block=2, value=value)
    assert d.ask("state").get("offers_asked", 0) == 0


def test_damage_since_the_offer_fails_the_request(pair: Any) -> None:
    p, d = pair
    p.ask("offer", blocks=[4, 5])
    from ipc_peers import until

    until(lambda: p.ask("offers_pending"), lambda left: left == 0)
    p.ask("mark_quietly", layer=2, block=5, position=77)
    number = d.post(p, [(4, 1), (5, 2)])
    assert d.ask("wait", number=number, within_s=30.0) == "failed"
    assert "block 5" in d.ask("reason", number=number)
    assert d.ask("state")["checksum_failures"] == 1
    assert d.read(p, [(4, 1)]) == "done"


def test_memory_returns_as_the_driver_counts_it_while_a_peer_lives(pair: Any, record: Callable[..., None]) -> None:
    p, d = pair
    assert d.read(p, ALL) == "done"
    before = p.ask("free")
    p.ask("unregister")
    released = p.ask("release_report")[0]
    assert p.ask("free") - before >= released > 0
    record("ipc-given-back", released=released, free_rose=p.ask("free") - before)
    p.ask("recommit")
    p.ask("fill", seed=3)
    p.ask("register", engine="P", generation=2)
    d.meet(p, generation=2)
    assert d.read(p, ALL, generation=2) == "done"
    assert d.ask("differing", seed=2, moved={str(to): [3, source] for source, to in ALL}) == []


def test_decode_outlives_a_prefill_that_is_killed_and_lets_go_of_its_memory(pair: Any) -> None:
    from ipc_peers import until

    p, d = pair
    assert d.read(p, ALL[:3]) == "done"
    p.kill()
    free = until(lambda: d.ask("free"), lambda _: True)
    assert d.ask("differing", seed=2, moved={str(to): [1, source] for source, to in ALL[:3]}) == []
    assert d.ask("free") >= free


def test_memory_returns_when_a_decode_that_held_it_is_killed(pair: Any) -> None:
    from ipc_peers import until

    p, d = pair
    assert d.read(p, ALL[:3]) == "done"
    d.kill()
    assert until(lambda: p.ask("state")["holders"], lambda holders: holders == 0) == 0
    before = p.ask("free")
    p.ask("unregister")
    released = p.ask("release_report")[0]
    assert until(lambda: p.ask("free") - before, lambda rose: rose >= released) >= released
