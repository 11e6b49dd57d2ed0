"""Transfer parameters that cannot be used, sent to a real decode engine: a status and a sentence, no bare 500."""

from __future__ import annotations

import base64
import copy
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import random_hybrid
from random_llama import make_random_llama

from pdkv.launch import PDDeployment, PDSettings

pytestmark = pytest.mark.vllm

PROMPT = [11 * place % 400 + 20 for place in range(100)]
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
DEADLINE_S = 60.0
Params = dict[str, Any]


def settings_for(model: Path, connector: str, log_dir: Path, *extra: str) -> PDSettings:
    return PDSettings.build(
        model,
        connector=connector,
        device="cpu",
        dtype="float32",
        block_size=32,
        max_model_len=512,
        kv_bytes="16MiB",
        extra_args=["--skip-tokenizer-init", "--served-model-name", "model", *extra],
        log_dir=log_dir,
    )


@pytest.fixture(scope="module", params=["pdkv", "nixl-pull"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PDDeployment]:
    model = make_random_llama(tmp_path_factory.mktemp("tiny"), "tiny")
    with PDDeployment(settings_for(model, request.param, tmp_path_factory.mktemp("refusals"))) as running:
        yield running


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PDDeployment]:
    """Its engines speak the stock protocol only."""
    for name, value in random_hybrid.VARIABLES.items():
        monkeypatch.setenv(name, value)
    model = random_hybrid.make_random_hybrid(tmp_path / "model")
    with PDDeployment(settings_for(model, "nixl-pull", tmp_path / "logs", "--no-enable-prefix-caching")) as running:
        yield running


def ask(url: str, **more: Any) -> tuple[int, Any]:
    """Status and body; the body of a stream is its text."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=DEADLINE_S) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, text.decode() if text.startswith(b"data:") else json.loads(text)


def prefilled(deployment: PDDeployment) -> Params:
    status, body = ask(deployment.prefill_url, max_tokens=1, kv_transfer_params=dict(ASK))
    assert status == 200
    params: Params = body["kv_transfer_params"]
    return params


def no_reference(params: Params) -> None:
    params["pdkv"] = {"engine": "somebody"}


def no_table(params: Params) -> None:
    params["pdkv"] = "the usual place"


def another_mac(params: Params) -> None:
    for sealed in params["pdkv"].get("ranks", [params["pdkv"]]):
        sealed["mac"] = base64.b64encode(bytes(reversed(base64.b64decode(sealed["mac"])))).decode()


def nothing_but_the_wish(params: Params) -> None:
    params.clear()
    params["do_remote_prefill"] = True


def a_stock_one_without_blocks(params: Params) -> None:
    params.pop("pdkv", None)
    params["remote_block_ids"] = []


def a_stock_one_at_no_port(params: Params) -> None:
    params.pop("pdkv", None)
    params["remote_port"] = "somewhere"


def a_group_less(params: Params) -> None:
    params["remote_block_ids"] = params["remote_block_ids"][:-1]


def both_ways_at_once(params: Params) -> None:
    params["do_remote_decode"] = True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (no_reference, "malformed"),
        (no_table, "malformed"),
        (another_mac, "forged"),
        (nothing_but_the_wish, "malformed"),
        (a_stock_one_without_blocks, "malformed"),
        (a_stock_one_at_no_port, "malformed"),
        (both_ways_at_once, "malformed"),
    ],
)
def test_a_reference_that_is_none_or_was_altered_is_400(
    deployment: PDDeployment, spoil: Callable[[Params], None], failure: str, stream: bool
) -> None:
    params = prefilled(deployment)
    spoil(params)
    status, body = ask(deployment.decode_url, kv_transfer_params=params, stream=stream)
    assert (status, body["error"]["failure"], body["error"]["type"]) == (400, failure, "kv_reference_refused"), body
    assert body["error"]["message"].startswith("the KV that kv_transfer_params refer to cannot be had")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reference_that_is_used_twice_serves_once_and_is_409_then(deployment: PDDeployment, stream: bool) -> None:
    params = prefilled(deployment)
    first, second = (
        ask(deployment.decode_url, kv_transfer_params=copy.deepcopy(params), stream=stream) for _ in range(2)
    )
    assert first[0] == 200
    assert "error" not in first[1]
    assert (second[0], second[1]["error"]["failure"]) == (409, "replayed"), second
    assert ask(deployment.proxy_url, stream=stream)[0] == 200


def test_a_hybrid_that_speaks_the_stock_protocol_only_refuses_as_well_and_serves_on(hybrid: PDDeployment) -> None:
    for spoil, failure in (
        (nothing_but_the_wish, "malformed"),
        (no_reference, "malformed"),
        (a_stock_one_without_blocks, "malformed"),
        (a_stock_one_at_no_port, "malformed"),
        (both_ways_at_once, "malformed"),
        (a_group_less, "bad_blocks"),
    ):
        params = prefilled(hybrid)
        assert "pdkv" not in params
        spoil(params)
        status, body = ask(hybrid.decode_url, kv_transfer_params=params)
        assert (status, body["error"]["failure"]) == (400, failure), (spoil, body)
    assert ask(hybrid.decode_url, kv_transfer_params=prefilled(hybrid))[0] == 200
    assert ask(hybrid.proxy_url)[0] == 200
