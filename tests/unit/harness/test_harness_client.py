"""Asking endpoints over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness_protocol import Endpoint, Respond, answer_with

from pdkv.errors import ConfigError, HarnessError
from pdkv.harness.client import Completion, ask_all, check_reachable
from pdkv.harness.dataset import Problem
from pdkv.harness.prompts import Prompt, build_prompts, fingerprint
from pdkv.launch.machine import pick_free_ports

pytestmark = pytest.mark.cpu

Serve = Callable[[Respond], Endpoint]
PROBLEMS = [Problem(n, f"Question {n}?", f"#### {n}") for n in range(1, 9)]
PROMPTS = build_prompts(PROBLEMS, "few-shot", PROBLEMS, 16)


async def ask(endpoint: Endpoint, prompts: tuple[Prompt, ...] = PROMPTS, **options: Any) -> tuple[Completion, ...]:
    return await ask_all(endpoint.url, prompts, **{"concurrency": 3, "timeout_s": 10.0, **options})


async def test_answers_come_in_the_order_of_the_prompts(serve: Serve) -> None:
    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, answer_with([PROMPTS.index(Prompt(path, body))])

    answers = await ask(serve(respond))
    assert [answer.token_ids for answer in answers] == [(n,) for n in range(len(PROMPTS))]
    assert answers[0].prompt_tokens == 7


async def test_requests_overlap_up_to_the_concurrency(serve: Serve) -> None:
    together = threading.Barrier(3, timeout=10)  # nobody is answered until three requests are there at once
    inside, most, lock = 0, 0, threading.Lock()

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait()
        with lock:
            inside -= 1
        return 200, answer_with([1])

    await ask(serve(respond), PROMPTS[:6])
    assert most == 3


async def test_all_requests_are_greedy_seeded_and_ask_for_token_ids(serve: Serve) -> None:
    endpoint = serve(lambda path, body: (200, answer_with([1])))
    await ask(endpoint)
    for path, body in endpoint.requests:
        assert path == "/v1/completions"
        assert (body["temperature"], body["seed"], body["stream"], body["return_token_ids"]) == (0, 0, False, True)
        assert body["prompt"].count("Question:") == 6, "five examples and the question"


async def test_chat_answers_are_read_too(serve: Serve) -> None:
    endpoint = serve(lambda path, body: (200, answer_with([4, 2], "#### 42", chat=True)))
    (answer,) = await ask(endpoint, build_prompts(PROBLEMS[:1], "chat", (), 16))
    assert endpoint.requests[0][0] == "/v1/chat/completions"
    assert (answer.token_ids, answer.text) == ((4, 2), "#### 42")


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (502, {"error": "no kv_transfer_params"}, "status 502.*no kv_transfer_params"),
        (200, {"choices": []}, "with no completion"),
        (200, {"choices": [{"text": "5"}], "usage": {"prompt_tokens": 1}}, "without token ids"),
        (200, "[", "something else"),
    ],
)
async def test_an_answer_that_is_none_names_problem_and_endpoint(
    serve: Serve, status: int, content: Any, sentence: str
) -> None:
    endpoint = serve(lambda path, body: (status, content))
    with pytest.raises(HarnessError, match=rf"{endpoint.url} .*problem 1.*{sentence}"):
        await ask(endpoint, PROMPTS[:1])


async def test_a_late_answer_is_an_error_and_no_endless_wait(serve: Serve) -> None:
    release = threading.Event()

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(10)
        return 200, answer_with([1])

    try:
        with pytest.raises(HarnessError, match=r"did not answer problem 1 within 0\.2 s"):
            await ask(serve(respond), PROMPTS[:1], timeout_s=0.2)
    finally:
        release.set()


async def test_an_endpoint_where_nobody_listens_is_named() -> None:
    url = f"http://127.0.0.1:{pick_free_ports(['127.0.0.1'])[0]}"
    with pytest.raises(HarnessError, match=f"{url} cannot be reached"):
        await ask_all(url, PROMPTS, concurrency=2, timeout_s=10)
    with pytest.raises(HarnessError, match=f"{url} cannot be reached"):
        await check_reachable(url)


def test_a_prompt_needs_five_examples_and_a_known_style() -> None:
    with pytest.raises(ConfigError, match="need 5 examples, found 4"):
        build_prompts(PROBLEMS, "few-shot", PROBLEMS[:4], 16)
    with pytest.raises(ConfigError, match="few-shot, chat"):
        build_prompts(PROBLEMS, "zero-shot", PROBLEMS, 16)


def test_other_requests_have_another_fingerprint() -> None:
    assert fingerprint(PROMPTS) == fingerprint(build_prompts(PROBLEMS, "few-shot", PROBLEMS, 16))
    assert fingerprint(PROMPTS) != fingerprint(build_prompts(PROBLEMS, "few-shot", PROBLEMS, 17))
