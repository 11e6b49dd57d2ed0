"""Engines as real processes over real NIXL, killed and stopped, with a side channel that loses, repeats and is cut.

After each scenario no block is held, whoever is left serves the next request, and no token was wrong.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdkv.errors import HarnessError
from pdkv.testing.faults.__main__ import main
from pdkv.testing.faults.processes import OVER_TCP, SCENARIOS, SLEEP_SCENARIOS, Deployment, Totals, run_scenario
from pdkv.testing.faults.processes.toy import LAYERS, SPEC, ToyCache, page, true_token

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")

pytestmark = pytest.mark.nixl

#: The others are those of test_faults_sleep.py.
AWAKE = [name for name in SCENARIOS if name not in SLEEP_SCENARIOS]


@pytest.fixture(scope="module")
def pull(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("pull"), mode="pull", variables=OVER_TCP, seed=1) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def push(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("push"), mode="push", variables=OVER_TCP, seed=2) as deployment:
        yield deployment


@pytest.mark.parametrize("name", AWAKE)
def test_survivors_of_a_pull_serve_the_next_peer_and_nothing_is_lost(pull: Deployment, name: str) -> None:
    run_scenario(name, pull)
    assert pull.totals.is_good


# The others differ from pull by nothing that processes could show; the program runs all of them in both directions.
@pytest.mark.parametrize("name", [name for name in AWAKE if "transfer" in name or "side_channel_loses" in name])
def test_survivors_of_a_push_serve_the_next_peer_and_nothing_is_lost(push: Deployment, name: str) -> None:
    run_scenario(name, push)
    assert push.totals.is_good


@pytest.fixture(scope="module")
def ipc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("ipc"), transport="ipc", seed=3) as deployment:
        yield deployment


#: Those in which a READ that needs nothing of its owner, and memory that a peer has mapped, make a difference.
OVER_IPC = (
    "a_stopped_peer_goes_on_in_time",
    "a_peer_is_stopped_under_a_transfer_and_never_goes_on",
    "decode_is_stopped_as_prefill_goes_from_draining_to_asleep",
    "decode_is_stopped_as_prefill_goes_from_running_to_lent",
    "decode_sleeps_while_a_transfer_is_delayed",
)


@pytest.mark.parametrize("name", OVER_IPC)
def test_survivors_of_a_pull_over_ipc_serve_the_next_peer_and_nothing_is_lost(ipc: Deployment, name: str) -> None:
    run_scenario(name, ipc)
    assert ipc.totals.is_good


def test_over_the_default_transports_a_stopped_prefill_serves_and_goes_on(tmp_path: Path) -> None:
    """Without tcp a READ on one host needs nothing of its owner, once the two have met."""
    with Deployment(tmp_path) as deployment:
        run_scenario("all_is_well", deployment)
        asked = deployment.ask(held=True)
        deployment.until(lambda: deployment.d.ask("knows_lease", request_id=asked.request_id), "D knows P's lease")
        deployment.stop("P")
        deployment.d.ask("allocate", request_id=asked.request_id)
        deployment.finish("completed")
        deployment.resume("P")
        deployment.no_block_is_held()
        deployment.serves()
        assert deployment.totals.is_good
        assert deployment.totals.completed == 8


def test_runs_are_summed_and_reported_as_json() -> None:
    one, summed = Totals(schedules=1, completed=6), Totals()
    one.faults["kill_P"] += 1
    for _ in range(2):
        summed.add(one)
    report = json.loads(json.dumps(summed.as_dict(1.0)))
    assert (report["schedules"], report["completed"], report["wrong_tokens"]) == (2, 12, 0)
    assert report["faults"] == {"kill_P": 2}


@pytest.mark.parametrize("says", ["Fatal: unexpected error: Endpoint timeout", "Fatal: something else"])
def test_only_engines_that_ucx_ended_for_their_peers_death_are_replaced_and_not_counted_as_crashes(
    tmp_path: Path, says: str
) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.serves()
        prefill = deployment.p
        prefill.log.write_text(says)
        prefill.process.send_signal(signal.SIGABRT)
        with pytest.raises(HarnessError, match="has died"):
            deployment.until(lambda: bool(prefill.ask("state")) and False, "never")
        ours = "Endpoint timeout" not in says
        assert deployment.totals.crashes == ours
        assert deployment.starts_anew_after_ucx() is not ours
        assert deployment.totals.ucx_aborts == (not ours)
        if not ours:
            deployment.serves()


def test_a_transport_that_leaves_out_a_block_gives_a_wrong_token(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    transport = "lossy_transport:LossyTransport"
    with Deployment(tmp_path, transport=transport, variables={"PYTHONPATH": path}) as deployment:
        deployment.ask()
        deployment.finish("completed")
        assert deployment.totals.wrong_tokens == 2


def test_the_toy_model_looks_at_every_byte() -> None:
    toy = ToyCache()
    for index, block in enumerate((5, 9)):
        toy.write("a prompt", index, block)
    assert toy.token([5, 9], 0) == true_token("a prompt", 32, 0) != toy.token([9, 5], 0)
    for layer, view in enumerate(toy.cache.views().values()):
        for block in (5, 9):
            view[block, 0, 0, 0] += 1
            assert toy.token([5, 9], 0) != true_token("a prompt", 32, 0), (layer, block)
            view[block, 0, 0, 0] -= 1
    assert len({page("a prompt", index, layer) for index in range(3) for layer in range(LAYERS)}) == 3 * LAYERS
    assert len(page("a prompt", 0, 0)) == SPEC.page_bytes
    toy.cache.close()


def test_the_program_says_which_transports_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--processes", "--transport", "carrier-pigeon"]) == 2
    assert "no transport is called 'carrier-pigeon'; installed are: " in capsys.readouterr().err
