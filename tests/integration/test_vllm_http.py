"""Prefill, decode and proxy as real HTTP servers, under more requests than fit and clients that do not stay.

One deployment serves all tests of this file. The last one kills its prefill engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine import GROWABLE, EngineProcess
from random_llama import make_random_llama, vocabulary

from pdkv.launch import PDDeployment, PDSettings, read_status
from pdkv.launch.guard import descendants
from pdkv.launch.settings import ProxyLimits
from pdkv.testing.stopping import kill, stopped

pytestmark = pytest.mark.vllm

CAPACITY = 4
QUEUED = 24
MAX_TOKENS = 6
#: Blocks must be free well before the lease on prefill would run out by itself.
LEASE_S = 20
SETTLE_S = 12.0
DEADLINE_S = 120.0
_random = random.Random(11)
PROMPTS = [[_random.randrange(10, vocabulary("tiny")) for _ in range(length)] for length in (1, 31, 32, 33, 100, 200)]
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Answer:
    status: int
    tokens: list[int]
    headers: Any
    body: Any


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture(scope="module")
def deployment(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PDDeployment]:
    settings = PDSettings.build(
        tiny,
        device="cpu",
        dtype="float32",
        block_size=32,
        max_model_len=512,
        kv_bytes="16MiB",
        admission_requests=CAPACITY,
        connector_config={"kv_lease_duration": LEASE_S},
        extra_args=["--skip-tokenizer-init", "--served-model-name", "model"],
        proxy_limits=ProxyLimits(queue_timeout_s=30, max_queued=QUEUED),
        log_dir=tmp_path_factory.mktemp("http"),
    )
    with PDDeployment(settings) as running:
        yield running


@pytest.fixture(scope="module")
def expected(deployment: PDDeployment) -> list[list[int]]:
    """The tokens of each prompt, by an engine that computes it alone."""
    return asyncio.run(_expected(deployment.decode_url))


async def _expected(url: str) -> list[list[int]]:
    async with client() as session:
        return [(await ask(session, url, prompt)).tokens for prompt in PROMPTS]


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


def request(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], **more: Any) -> Answer:
    async with session.post(f"{url}/v1/completions", json=request(prompt, **more)) as response:
        body = await response.json()
        tokens = body["choices"][0]["token_ids"] if response.status == 200 else []
        return Answer(response.status, tokens, response.headers, body)


async def prefilled(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> dict[str, Any]:
    """Transfer parameters of a prompt, asked of prefill past the proxy."""
    answer = await ask(session, url, prompt, max_tokens=1, kv_transfer_params=dict(ASK))
    params: dict[str, Any] = answer.body["kv_transfer_params"]
    return params


async def used_share(session: aiohttp.ClientSession, url: str) -> float:
    """Share of the engine's blocks that requests hold, by vLLM's own metric."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return max(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def until(condition: Callable[[], Any], what: str, timeout_s: float = SETTLE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s:g} s"
        await asyncio.sleep(0.1)


async def all_is_as_at_the_start(session: aiohttp.ClientSession, deployment: PDDeployment) -> None:
    """No block is held on either side, nobody waits on decode, and nothing is under way in the proxy."""

    async def is_free(url: str) -> bool:
        return await used_share(session, url) == 0

    async def nobody_waits() -> bool:
        room, status = (
            await get(session, f"{deployment.decode_url}/pdkv/room"),
            await get(session, f"{deployment.proxy_url}/pdkv/status"),
        )
        return room["waiting"] == room["waiting_blocks"] == status["under_way"] == status["queued"] == 0

    await until(nobody_waits, "nobody waits any more")
    await until(lambda: is_free(deployment.decode_url), "all blocks of decode are free")
    await until(lambda: is_free(deployment.prefill_url), "all blocks of prefill are free")


def counts(deployment: PDDeployment) -> Counter[str]:
    """What decode's scheduler counted so far."""
    status = deployment.status("decode")["scheduler"]
    return Counter({name: value for name, value in status.items() if isinstance(value, int) and name != "pid"})


async def test_200_requests_at_a_capacity_of_4_end_in_the_right_tokens_or_in_a_time_to_come_back(
    deployment: PDDeployment, expected: list[list[int]]
) -> None:
    before = counts(deployment)
    async with client() as session:
        numbers = [number % len(PROMPTS) for number in range(200)]
        answers = await asyncio.gather(*(ask(session, deployment.proxy_url, PROMPTS[n]) for n in numbers))
        await all_is_as_at_the_start(session, deployment)
    served = [(n, answer.tokens) for n, answer in zip(numbers, answers, strict=True) if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(served) >= CAPACITY + QUEUED
    assert [tokens for _, tokens in served] == [expected[n] for n, _ in served]
    assert {answer.status for answer in refused} <= {429, 503}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    grown = counts(deployment) - before
    assert grown["remote_prefill_hits"] == len(served)
    assert (grown["recomputed_tokens"], grown["failed_loads"]) == (0, 0)


async def test_decode_refuses_what_comes_past_the_proxy_and_has_prefill_free_its_blocks(
    deployment: PDDeployment, expected: list[list[int]]
) -> None:
    async with client() as session:
        params = await asyncio.gather(*(prefilled(session, deployment.prefill_url, PROMPTS[-1]) for _ in range(24)))
        answers = await asyncio.gather(
            *(ask(session, deployment.decode_url, PROMPTS[-1], kv_transfer_params=given) for given in params)
        )
        await all_is_as_at_the_start(session, deployment)
    assert {answer.status for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status == 200:
            assert answer.tokens == expected[-1]
        else:
            error = answer.body["error"]
            assert (error["type"], error["limit"], error["most"]) == ("no_room", "requests", CAPACITY)
            assert int(answer.headers["Retry-After"]) >= 1
            assert "X-Pdkv-Room" in answer.headers


async def test_blocks_that_nobody_will_come_for_are_freed_on_prefill_when_decode_is_told(
    deployment: PDDeployment,
) -> None:
    async with client() as session:
        params = await prefilled(session, deployment.prefill_url, PROMPTS[-1])
        assert await used_share(session, deployment.prefill_url) > 0
        body = {"kv_transfer_params": params}
        async with session.post(f"{deployment.decode_url}/v1/pdkv/release", json=body) as response:
            assert await response.json() == {"released": True}
        await all_is_as_at_the_start(session, deployment)


async def test_a_request_that_only_decode_refuses_leaves_no_blocks_on_prefill(deployment: PDDeployment) -> None:
    async with client() as session:
        # Neither field concerns the prompt, so that prefill never sees them: one of a wrong type, one out of range.
        for wrong in ({"logprobs": "x"}, {"min_tokens": 10_000}):
            assert (await ask(session, deployment.proxy_url, PROMPTS[-1], **wrong)).status == 400
        await all_is_as_at_the_start(session, deployment)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind_on_either_side(
    deployment: PDDeployment, expected: list[list[int]]
) -> None:
    leaving = random.Random(5)

    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        prompt = [(17 * number + place) % 400 + 10 for place in range(450)]
        task = asyncio.ensure_future(ask(session, deployment.proxy_url, prompt, max_tokens=50))
        await asyncio.wait({task}, timeout=leaving.uniform(0, 0.6))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with client() as session:
        for round_ in range(4):
            await asyncio.gather(*(leave(session, 12 * round_ + number) for number in range(12)))
        await all_is_as_at_the_start(session, deployment)
        answers = [await ask(session, deployment.proxy_url, prompt) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == expected


async def test_a_lease_that_ran_out_while_decode_was_stopped_never_becomes_a_200(
    deployment: PDDeployment, expected: list[list[int]]
) -> None:
    """The blocks are given to other prompts meanwhile, so that what decode would read is not the prompt's KV."""
    decode = descendants(deployment.pid("decode"))
    prompt = [(5 * place) % 400 + 30 for place in range(200)]  # nothing of it is in decode's prefix cache
    async with client() as session:
        params = await prefilled(session, deployment.prefill_url, prompt)
        with stopped(*decode):
            late = asyncio.ensure_future(
                ask(session, deployment.decode_url, prompt, kv_transfer_params=params, max_tokens=20)
            )

            async def is_free() -> bool:
                return await used_share(session, deployment.prefill_url) == 0

            await until(is_free, "the lease has run out", LEASE_S + SETTLE_S)
            assert not late.done()
            for number in range(40):
                await ask(
                    session, deployment.prefill_url, [(3 * number + k) % 400 + 20 for k in range(400)], max_tokens=1
                )
        answer = await late
        assert (answer.status, answer.body["error"]["failure"]) == (410, "lease_lost")
        await all_is_as_at_the_start(session, deployment)
        assert (await ask(session, deployment.proxy_url, PROMPTS[-1])).tokens == expected[-1]


async def test_a_stream_whose_client_leaves_is_ended_on_decode(deployment: PDDeployment) -> None:
    async with client() as session:
        body = request(PROMPTS[-1], max_tokens=250, stream=True, ignore_eos=True)
        async with session.post(f"{deployment.proxy_url}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.content.readany()
            assert await used_share(session, deployment.decode_url) > 0
        await all_is_as_at_the_start(session, deployment)


def test_a_second_engine_on_the_same_status_folder_is_refused_at_the_start(
    deployment: PDDeployment, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(deployment.log_dir) / "status" / "decode"
    before = read_status(folder)["workers"][0]["pid"]
    options = {**GROWABLE, "kv_cache_memory_bytes": 16 << 20}
    with (
        pytest.raises(Exception, match="another engine"),
        EngineProcess(tiny, tmp_path / "log", {"PDKV_STATUS_DIR": str(folder)}, **options) as engine,
    ):
        engine.wait_ready()
    assert read_status(folder)["workers"][0]["pid"] == before


async def test_a_prefill_engine_that_dies_leaves_decode_and_proxy_healthy_and_clients_informed(
    deployment: PDDeployment, expected: list[list[int]]
) -> None:
    for pid in descendants(deployment.pid("prefill")):
        kill(pid)
    async with client() as session:
        answers = [await ask(session, deployment.proxy_url, PROMPTS[-1]) for _ in range(3)]
        for url in (deployment.decode_url, deployment.proxy_url):
            async with session.get(f"{url}/health") as response:
                assert response.status == 200
        alone = await ask(session, deployment.decode_url, PROMPTS[-1])
        assert (await get(session, f"{deployment.decode_url}/pdkv/room"))["waiting"] == 0
    assert alone.tokens == expected[-1]
    for answer in answers[1:]:  # the first may have met a connection that the proxy kept open
        assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (503, True)
        assert "the prefill engine at" in answer.body["error"]["message"]
