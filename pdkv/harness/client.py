"""Ask an OpenAI-compatible endpoint and get token ids back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdkv.errors import HarnessError
from pdkv.harness.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answered.

    Attributes:
        prompt_tokens: tokens of the prompt, as the engine counts them.
        token_ids: tokens of the output.
        text: the output as text.
        finish_reason: ``stop`` or ``length``.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


async def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    timeout_s: float,
    done: Callable[[], object] = lambda: None,
) -> tuple[Completion, ...]:
    """Answers to all prompts, in their order, with at most `concurrency` requests on the way at once.

    Args:
        url: base URL of the endpoint, without ``/v1``.
        timeout_s: deadline for each request.
        done: called after each answer.

    Raises:
        HarnessError: the endpoint cannot be reached, refuses, is late, or answers without token ids. Requests on the
            way are dropped then.
    """
    gate = asyncio.Semaphore(concurrency)

    async def ask(session: aiohttp.ClientSession, number: int, prompt: Prompt) -> Completion:
        async with gate:
            answer = await _post(session, url, number, prompt)
            done()
            return answer

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        tasks = [asyncio.ensure_future(ask(session, number, prompt)) for number, prompt in enumerate(prompts, 1)]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def check_reachable(url: str, *, timeout_s: float = 10.0) -> None:
    """Connect once; what the server answers does not matter here.

    Raises:
        HarnessError: nobody listens there.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session, session.get(f"{url}/health"):
            return
    except (aiohttp.ClientError, TimeoutError) as error:
        raise HarnessError(_unreachable(url, error)) from error


async def _post(session: aiohttp.ClientSession, url: str, number: int, prompt: Prompt) -> Completion:
    try:
        async with session.post(url + prompt.path, json=prompt.body) as response:
            if response.status != 200:
                reason = (await response.text())[:300]
                raise HarnessError(f"{url} answered problem {number} with status {response.status}: {reason}")
            return _parse(await response.json(), url, number)
    except TimeoutError as error:
        raise HarnessError(
            f"{url} did not answer problem {number} within {session.timeout.total:g} s; raise --request-timeout or "
            "look into the server's log."
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise HarnessError(_unreachable(url, error)) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise HarnessError(f"{url} broke off or answered problem {number} with something else: {error}") from error


def _unreachable(url: str, error: BaseException) -> str:
    return f"the endpoint {url} cannot be reached ({error or type(error).__name__}); is the server started there?"


def _parse(answer: Any, url: str, number: int) -> Completion:
    try:
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        token_ids = choice.get("token_ids")
        prompt_tokens = int(answer["usage"]["prompt_tokens"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise HarnessError(f"{url} answered problem {number} with no completion: {str(answer)[:300]}") from error
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise HarnessError(
            f"{url} answered problem {number} without token ids; it must be a vLLM that knows `return_token_ids`, "
            "and whatever is in front of it must hand that on."
        )
    return Completion(prompt_tokens, tuple(token_ids), text or "", str(choice.get("finish_reason")))
