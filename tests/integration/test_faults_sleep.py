"""Sleep, wake and lending of real processes over real NIXL, whose peer is stopped or killed within each transition.

The engine that sleeps sends the signal itself, at a step of the lifecycle. It must give its memory back, as the driver
counts it, and take it again; nobody crashes, no token is wrong, no block is lost, and whoever is left serves the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from pdkv.lifecycle import states
from pdkv.testing.faults.processes import OVER_TCP, SLEEP_SCENARIOS, Deployment, run_scenario, scenarios_of
from pdkv.testing.faults.processes.sleep_scenarios import ARROWS

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")

pytestmark = pytest.mark.nixl

#: Where nothing is between the two, push differs from pull by nothing that processes could show.
IN_PUSH_TOO = [name for name in SLEEP_SCENARIOS if "draining" in name or "decode_sleeps" in name]


class Engines:
    """A prefill and a decode process for all scenarios of a direction; others where one has failed."""

    def __init__(self, mode: Literal["pull", "push"], folder: Path) -> None:
        self._mode, self._folder, self._number = mode, folder, 0
        self._deployment: Deployment | None = None

    def run(self, name: str) -> None:
        if self._deployment is None:
            self._number += 1
            folder = self._folder / str(self._number)
            folder.mkdir()
            self._deployment = Deployment(folder, mode=self._mode, variables=OVER_TCP, seed=self._number)
        totals = self._deployment.totals
        try:
            run_scenario(name, self._deployment)
            assert totals.is_good, totals
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._deployment is not None:
            self._deployment.close()
        self._deployment = None


@pytest.fixture(scope="module")
def pull(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines("pull", tmp_path_factory.mktemp("pull"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def push(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines("push", tmp_path_factory.mktemp("push"))
    yield engines
    engines.close()


@pytest.mark.parametrize("name", [name for name in scenarios_of("pull") if name in SLEEP_SCENARIOS])
def test_a_peer_struck_within_a_transition_costs_neither_engine_memory_blocks_or_right_tokens_in_pull(
    pull: Engines, name: str
) -> None:
    pull.run(name)


@pytest.mark.parametrize("name", IN_PUSH_TOO)
def test_a_peer_struck_within_a_transition_costs_neither_engine_memory_blocks_or_right_tokens_in_push(
    push: Engines, name: str
) -> None:
    push.run(name)


def test_every_arrow_of_the_table_of_states_is_struck_by_each_signal_on_each_side() -> None:
    """But for the one that is taken where memory is missing, which no peer has a part in."""
    arrows = {f"{one}_to_{other}" for one, others in states._ALLOWED.items() for other in others}
    assert arrows - {"lent_to_asleep"} == set(ARROWS)
    for arrow in ARROWS:
        struck = [name for name in SLEEP_SCENARIOS if name.endswith(f"goes_from_{arrow}")]
        assert len(struck) == 4
