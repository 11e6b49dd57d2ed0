"""From a client's request to the two that the engines get. Pure functions.

The prefill engine computes the prompt's KV and one token that is thrown away; the decode engine reads that KV and
generates the answer, the first token included. So the prefill leg must render exactly the decode leg's prompt, and what
only concerns the answer is left out of it. One request hands over the KV of one prompt, to one reader, once: what needs
more is refused, since the decode engine would compute it again without telling (or read blocks that are free by then):

- several prompts in one request: the answer carries the transfer parameters of the first alone;
- ``n`` above 1, ``best_of``, beam search: each sequence would read the same blocks, and the first to finish frees them;
- ``prompt_logprobs``, and ``echo`` with ``logprobs``, which implies it: vLLM then recomputes the whole prompt;
- ``truncate_prompt_tokens`` below 0: it depends on ``max_tokens``, which is not the same on both legs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pdkv.proxy.errors import bad_request, engine_error

Json = dict[str, Any]

TRANSFER_KEYS = ("kv_transfer_params", "ec_transfer_params")
# Text of the user, in which these words mean nothing.
_CONTENT = ("messages", "prompt", "tools")
# They concern the answer only; min_tokens above 1 contradicts max_tokens=1, the others cost time.
_ANSWER_ONLY = ("stream", "stream_options", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "echo")
_ASK_FOR_TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def parse(body: bytes) -> Json:
    """The request as a JSON object; ApiError 400 where it is none. NaN, infinities and lone surrogates are refused."""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(request, dict):
        raise bad_request("the body must be a JSON object.")
    return request


def check(request: Json) -> None:
    """Refuse what prefill/decode cannot do, and transfer parameters that come from outside (ApiError 400)."""
    _refuse_transfer_params(request)
    prompts = sum(_count_prompts(request.get(name)) for name in ("prompt", "prompt_embeds"))
    if prompts > 1:
        raise bad_request(
            f"prefill/decode serves one prompt a request, not {prompts}; send one request each.", "prompt"
        )
    for name in ("n", "best_of"):
        if request.get(name) not in (None, 1):
            raise bad_request(f"prefill/decode generates one answer a request; send {name}=1 several times.", name)
    if request.get("use_beam_search"):
        raise bad_request("prefill/decode does not support beam search.", "use_beam_search")
    if request.get("prompt_logprobs") is not None or (request.get("echo") and request.get("logprobs") is not None):
        raise bad_request(
            "prompt logprobs would make the decode engine compute the prompt again; ask an aggregated engine for them.",
            "prompt_logprobs" if request.get("prompt_logprobs") is not None else "echo",
        )
    truncate = request.get("truncate_prompt_tokens")
    if truncate is not None and not (isinstance(truncate, int) and truncate >= 0):  # vLLM takes "-1" and -1.0 too
        raise bad_request("give truncate_prompt_tokens as a positive number of tokens.", "truncate_prompt_tokens")


def prefill_request(request: Json, *, chat: bool) -> Json:
    """What the prefill engine gets: the same prompt, one token, and the wish to hand its KV over."""
    leg = {name: value for name, value in request.items() if name not in _ANSWER_ONLY}
    leg |= {"max_tokens": 1, "stream": False, "kv_transfer_params": dict(_ASK_FOR_TRANSFER)}
    if chat or "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1  # where both are given, this one wins
    return leg


def decode_request(request: Json, params: Json) -> Json:
    """What the decode engine gets: the client's request as it came, and where the KV is."""
    return {**request, "kv_transfer_params": params}


def transfer_params(answer: object) -> Json:
    """The transfer parameters in the prefill engine's answer, unchanged.

    Raises:
        ApiError: 502 where they would make the decode engine compute the prompt again.
    """
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict) or not params:
        raise engine_error(
            502,
            "the prefill engine returned no kv_transfer_params; it must run with a KV connector and the role "
            "kv_producer. The request was not sent on, since the decode engine would compute the prompt again.",
        )
    if params.get("do_remote_prefill") is not True or _is_empty(params.get("remote_block_ids", [0])):
        raise engine_error(
            502,
            "the prefill engine returned kv_transfer_params that hand over no blocks; see its log. The request was "
            "not sent on, since the decode engine would compute the prompt again.",
        )
    return params


def _refuse_transfer_params(request: Json) -> None:
    pending: list[object] = [{name: value for name, value in request.items() if name not in _CONTENT}]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for name in TRANSFER_KEYS:
                if name in value:
                    raise bad_request(f"{name} is set by the proxy and not accepted from clients; leave it out.", name)
        pending.extend(_children(value))


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _count_prompts(prompt: object) -> int:
    """Prompts in a completion request: a text or a list of token ids is one, a list of either as many as it holds."""
    if prompt is None:
        return 0
    if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt):
        return 1
    return len(prompt)


def _is_empty(block_ids: object) -> bool:
    """Whether no group holds a block: vLLM sends one list of ids for each KV cache group."""
    if isinstance(block_ids, list):
        return all(_is_empty(item) for item in block_ids)
    return block_ids is None
