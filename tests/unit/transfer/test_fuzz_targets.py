"""What `make fuzz` feeds: each target takes every message that is right, alone and several in any order."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))

from endpoints import Endpoints
from transports import Descriptions, IpcSocket, UcxConnection

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", [Endpoints, Descriptions, IpcSocket, UcxConnection])
def test_a_target_of_the_fuzzer_survives_its_own_seeds(kind: type) -> None:
    target, chance = kind(), random.Random(1)
    for seed in target.seeds:
        target.run([seed])
    for _ in range(10):
        target.run(chance.choices(target.seeds, k=6))
