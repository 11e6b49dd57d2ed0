"""A streaming client that takes the time of each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

REQUEST_TIMEOUT_S = 300.0
_FIRST_ID, _LAST_ID = 1000, 30000  # plain words of every vocabulary used here, no control tokens


@dataclass(frozen=True)
class Answer:
    """Times of one streamed answer, in seconds from sending the request."""

    first_token_s: float
    last_token_s: float
    output_tokens: int

    @property
    def per_token_s(self) -> float:
        """Time per output token after the first."""
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids; no two seeds share a first block, so that no prefix cache has seen them."""
    generator = random.Random(seed)
    return [generator.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)]


def ask(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Answer]:
    """Send all prompts at once and take the time of each answer.

    Raises:
        RuntimeError: the server refused, or broke off, or gave another number of tokens than asked for.
    """
    return asyncio.run(_ask_all(url, prompts, output_tokens))


async def _ask_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        return await asyncio.gather(*(_ask(session, url, prompt, output_tokens) for prompt in prompts))


async def _ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], output_tokens: int) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered with status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"{url} broke off: {event['error']}")
            if event["choices"]:
                arrivals.append(time.perf_counter() - began)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if tokens != output_tokens or not arrivals:
        raise RuntimeError(f"{url} gave {tokens} tokens in {len(arrivals)} pieces, asked for were {output_tokens}")
    return Answer(arrivals[0], arrivals[-1], tokens)
