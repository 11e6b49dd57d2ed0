"""Transfer parameters that vLLM takes on trust, sent to real engines: they end their request, and no engine.

Among the engines is a hybrid with recurrent states, which speaks the stock protocol only, also to another pdkv.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import random_hybrid
from engine import GROWABLE, EngineProcess, free_port, nixl_connector, pdkv_connector, running
from random_hybrid import make_random_hybrid
from random_llama import make_random_llama

pytestmark = pytest.mark.vllm

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
MAX_TOKENS = 6
LENGTH = 100
Params = dict[str, Any]


@dataclass
class Engines:
    """Prefill and decode, and what they answer to prompts of their own."""

    prefill: EngineProcess
    decode: EngineProcess
    kind: str
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def prompt(self) -> list[int]:
        """Token ids that no other prompt begins with."""
        number = next(self.numbers)
        return [(31 * number + 7 * place) % 400 + 20 for place in range(LENGTH)]

    def prefilled(self, prompt: list[int]) -> Params:
        (answer,) = self.prefill.generate([prompt], 1, [dict(ASK)], 1000 + next(self.numbers))
        return dict(answer["transfer"])

    def outcome(self, engine: EngineProcess, params: Params, prompt: list[int]) -> Any:
        request_id = f"h{next(self.numbers)}"
        engine.ask("submit", request_id=request_id, prompt=prompt, max_tokens=MAX_TOKENS, transfer=params)
        return engine.ask("outcome", request_id=request_id, within_s=20)

    def is_whole(self, engine: EngineProcess) -> bool:
        """Whether it holds nothing for requests that have ended, and serves the next one."""
        blocks = engine.ask("free_blocks", within_s=60)
        answers = engine.generate([self.prompt()], MAX_TOKENS)
        return blocks == {"free": engine.ask("pool_blocks") - 1, "left": []} and len(answers[0]["tokens"]) == MAX_TOKENS


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture(scope="module", params=["hybrid Pull", "hybrid Push", "llama Pull", "llama pdkv"])
def engines(
    request: pytest.FixtureRequest, hybrid: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    model, connector = request.param.split()
    folder, port = tmp_path_factory.mktemp("hostile"), free_port()
    sides = []
    for role in ("kv_producer", "kv_consumer"):
        lease = {"kv_connector_extra_config": {"kv_lease_duration": 12}}
        config = pdkv_connector(role, port) if connector == "pdkv" else nixl_connector(role, connector, **lease)
        more: dict[str, Any] = {}
        if model == "hybrid":
            more = {"environment": random_hybrid.VARIABLES, "fresh": True, **random_hybrid.OPTIONS}
        path = hybrid if model == "hybrid" else llama
        sides.append(EngineProcess(path, folder / f"{role}.log", **more, **GROWABLE, **config))
    with running(*sides):
        yield Engines(*sides, request.param)


def stock(**changed: Any) -> Params:
    """What a stock prefill engine says, of an engine that is nowhere."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "nowhere",
        "remote_request_id": "none",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1, 2, 3, 4], [1, 2, 3, 4]],
        "remote_num_tokens": LENGTH,
        "tp_size": 1,
        **changed,
    }


#: To decode.
HOSTILE: dict[str, Params] = {
    "nothing but the wish": {"do_remote_prefill": True},
    "no rank": stock(tp_size=0),
    "no port": stock(remote_port="somewhere"),
    "an id that is none": stock(remote_engine_id=["e"]),
    "blocks beyond all memory": stock(remote_block_ids=[[2**31, 1, 1, 1]] * 2),
    "blocks that are none": stock(remote_block_ids="all of them"),
    "tokens that are none": stock(remote_num_tokens="many"),
    "both ways at once": stock(do_remote_decode=True),
    "a reference that is none": {"do_remote_prefill": True, "pdkv": {"engine": "somebody"}},
}
#: To prefill.
MISDIRECTED: dict[str, Params] = {
    "a load": stock(),
    "both ways at once": stock(do_remote_decode=True),
    "a load without a word of where": {"do_remote_prefill": True},
}


def test_parameters_that_cannot_be_used_fail_their_request_and_leave_the_engine_whole(engines: Engines) -> None:
    for name, params in HOSTILE.items():
        assert engines.outcome(engines.decode, dict(params), engines.prompt())["reason"] == "error", name
    assert engines.is_whole(engines.decode)


def test_parameters_of_a_request_that_was_refused_before_it_was_one_leave_the_engine_whole(engines: Engines) -> None:
    for params in HOSTILE.values():
        request_id = f"r{next(engines.numbers)}"
        engines.decode.ask("submit", request_id=request_id, prompt=[7], max_tokens=1, transfer=dict(params), steps=0)
    assert engines.is_whole(engines.decode)


def test_a_prefill_engine_that_is_asked_to_load_fails_the_request_and_stays_whole(engines: Engines) -> None:
    for name, params in MISDIRECTED.items():
        assert engines.outcome(engines.prefill, dict(params), engines.prompt())["reason"] == "error", name
    assert engines.is_whole(engines.prefill)


@pytest.mark.parametrize("engines", ["hybrid Pull", "llama Pull"], indirect=True)
def test_blocks_to_read_back_are_refused_where_none_are_read_back(engines: Engines) -> None:
    for tokens in (LENGTH, "many", None):
        params = stock(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=tokens)
        assert engines.outcome(engines.prefill, params, engines.prompt())["reason"] == "error", tokens
    assert engines.is_whole(engines.prefill)


# A push names no blocks of prefill's.
@pytest.mark.parametrize("engines", ["hybrid Pull", "llama Pull"], indirect=True)
@pytest.mark.parametrize(
    "spoil",
    [lambda groups: groups[:-1], lambda groups: [group[:1] for group in groups]],
    ids=["a group less", "one block each"],
)
def test_blocks_of_a_live_prefill_that_do_not_pair_fail_the_request(
    engines: Engines, spoil: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    prompt = [*engines.prompt(), *engines.prompt(), *engines.prompt()]
    params = engines.prefilled(prompt)
    params.pop("pdkv", None)
    params["remote_block_ids"] = spoil(params["remote_block_ids"])
    if not any(params["remote_block_ids"]):
        params["remote_block_ids"] = [[1]] * 5  # the one group of an ordinary model
    assert engines.outcome(engines.decode, params, prompt)["reason"] == "error"
    assert engines.is_whole(engines.decode)


def test_what_prefill_answers_is_served_beside_them(engines: Engines) -> None:
    prompt, first_id = engines.prompt(), 5000 + next(engines.numbers)
    (answer,) = engines.prefill.generate([prompt], 1, [dict(ASK)], first_id)
    (found,) = engines.decode.generate([prompt], MAX_TOKENS, [dict(answer["transfer"])], first_id)
    before = engines.decode.ask("facts")["counts"]
    assert found["tokens"] == engines.decode.generate([prompt], MAX_TOKENS)[0]["tokens"]
    assert before["remote_prefill_hits"] > 0
