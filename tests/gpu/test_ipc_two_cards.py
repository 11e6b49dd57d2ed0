"""The ipc transport between engines on two cards of one host: P sees the first card only, D has the second one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check

pytestmark = pytest.mark.gpu

IPC = "pdkv_connectors.ipc:IpcTransport"
P_SEES = {"CUDA_VISIBLE_DEVICES": "0"}
#: A process's first card is where its cache lies.
BOTH, OWN = {"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "1"}
PAIRS = [(0, 3, 10), (0, 4, 11), (0, 39, 0)]


@pytest.fixture(autouse=True, scope="module")
def _two_cards() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, found {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench(IPC, processes=2, driver="cuda", environment=P_SEES, d_environment=BOTH) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_it_keeps_the_contract_between_cards(rule: str, bench: TransportBench) -> None:
    run_transport_check(rule, bench)


def test_a_process_that_sees_its_own_card_only_reads_from_the_other() -> None:
    with TransportBench(IPC, processes=2, driver="cuda", environment=P_SEES, d_environment=OWN) as bench:
        bench.open()
        bench.meet()
        bench.move(PAIRS)
        bench.require_moved(PAIRS)
        bench.finish()
