"""vLLM's own endpoints for sleep, in front of a prefill engine that was started by the launcher."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdkv.launch import engine_settings
from pdkv.launch.deployment import EngineDeployment

pytestmark = pytest.mark.vllm

MODEL_NAME = "m"
PROMPT = list(range(100, 170))
LEASE_S = 12.0  # longer than a sleep waits, and some tests wait for its end
SLEEP_TIMEOUT_S = 3


class Server:
    """A running engine, asked over HTTP."""

    def __init__(self, deployment: EngineDeployment) -> None:
        self.deployment = deployment

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        data = None if method == "GET" else (b"" if body is None else json.dumps(body).encode())
        request = urllib.request.Request(
            self.deployment.url + path, data=data, headers={"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else text.decode()

    def metrics(self) -> str:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            self.deployment.url + "/metrics", timeout=60
        ) as answer:
            return str(answer.read().decode())

    def complete(self, *, for_decode: bool = False, shift: int = 0) -> tuple[int, Any]:
        body: dict[str, Any] = {
            "model": MODEL_NAME, "prompt": [token + shift for token in PROMPT], "max_tokens": 1, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        if for_decode:
            body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        return self.call("/v1/completions", body)

    def is_sleeping(self) -> bool:
        return bool(self.call("/is_sleeping", method="GET")[1]["is_sleeping"])

    def worker(self) -> dict[str, Any]:
        return dict(self.deployment.status()["workers"][0])


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = engine_settings(
        model=str(model), role="prefill", enable_sleep=True, dtype="float32", max_model_len=512, block_size=32,
        kv_bytes="64MiB", granule="64KiB", device="cpu", extra_args=["--served-model-name", MODEL_NAME],
        connector_config={"kv_lease_duration": LEASE_S}, extra_env={"PDKV_SLEEP_TIMEOUT": str(SLEEP_TIMEOUT_S)},
    )  # fmt: skip
    with EngineDeployment(settings, log_dir=tmp_path_factory.mktemp("prefill")) as deployment:
        yield Server(deployment)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[int]:
    status, answer = server.complete()
    assert status == 200
    return list(answer["choices"][0]["token_ids"])


def require_serving(server: Server, expected: list[int]) -> None:
    status, answer = server.complete()
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
    assert server.is_sleeping() is False


def test_sleep_gives_memory_back_answers_503_meanwhile_and_wake_serves_the_same_tokens(
    server: Server, expected: list[int]
) -> None:
    awake = server.worker()
    assert server.call("/sleep")[0] == 200
    assert server.is_sleeping()
    asleep = server.worker()
    assert (asleep["bytes_committed"], asleep["given_back"]) == (0, awake["bytes_committed"])
    status, answer = server.complete()
    assert (status, answer["error"]["type"]) == (503, "asleep")
    assert server.call("/wake_up")[0] == 200
    assert server.worker()["registration"] > awake["registration"]
    require_serving(server, expected)


def test_between_waking_the_weights_and_waking_the_cache_requests_get_503(server: Server, expected: list[int]) -> None:
    assert server.call("/sleep?level=2")[0] == 200
    assert server.call("/wake_up?tags=weights")[1]["status"] == "sleeping"
    assert server.complete()[0] == 503
    assert server.call("/wake_up?tags=kv_cache")[1]["status"] == "awake"
    require_serving(server, expected)


def test_a_weight_update_over_http_keeps_the_engine_serving(server: Server, expected: list[int]) -> None:
    assert server.call("/collective_rpc", {"method": "reload_weights"})[0] == 200
    require_serving(server, expected)


def test_a_held_lease_answers_409_at_once_with_the_holders(server: Server, expected: list[int]) -> None:
    assert server.complete(for_decode=True, shift=1)[0] == 200
    began = time.monotonic()
    status, answer = server.call("/sleep")
    assert (status, answer["error"]["type"], len(answer["error"]["holders"])) == (409, "leases_held", 1)
    assert time.monotonic() - began < LEASE_S / 2
    require_serving(server, expected)


def test_mode_wait_waits_for_leases_too_and_answers_409_with_the_holders_at_its_deadline(
    server: Server, expected: list[int]
) -> None:
    assert server.complete(for_decode=True, shift=3)[0] == 200
    status, answer = server.call("/sleep?mode=wait")
    assert (status, answer["error"]["type"]) == (409, "leases_held")
    assert answer["error"]["holders"]
    require_serving(server, expected)


def test_mode_abort_ends_leases_that_nobody_has_asked_for_and_sleeps(server: Server, expected: list[int]) -> None:
    assert server.complete(for_decode=True, shift=4)[0] == 200
    assert server.call("/sleep")[0] == 409
    assert server.call("/sleep?mode=abort") == (200, {"status": "sleeping", "level": 1})
    assert server.is_sleeping()
    assert server.worker()["bytes_committed"] == 0
    assert server.call("/wake_up")[0] == 200
    require_serving(server, expected)


def test_a_sleep_that_waits_is_given_up_when_the_engine_is_woken_and_never_fires_later(
    server: Server, expected: list[int]
) -> None:
    """Stock vLLM lets it fire when the lease has ended, on the woken engine, and dies at the next request."""
    wait_until_free(server)
    answers: list[tuple[int, Any]] = []
    # a running request makes the sleep wait; it leaves a lease behind when it ends
    running = threading.Thread(target=lambda: server.complete(for_decode=True, shift=2))
    running.start()
    sleeper = threading.Thread(target=lambda: answers.append(server.call("/sleep?mode=wait")))
    sleeper.start()
    running.join(2 * SLEEP_TIMEOUT_S)  # where the sleep came first, the request ends only after the wake
    woken = server.call("/wake_up")
    running.join(60)
    sleeper.join(60)
    assert not running.is_alive()
    assert woken[0] == 200
    assert answers[0][0] in (200, 409)
    wait_until_free(server)
    require_serving(server, expected)


def test_a_sleep_that_waits_for_longer_than_its_deadline_answers_409_and_the_engine_serves_on(
    server: Server, expected: list[int]
) -> None:
    wait_until_free(server)
    stop = threading.Event()
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    running = threading.Thread(target=lambda: (server.call("/v1/completions", body), stop.set()))
    running.start()
    wait_until_running(server, stop)
    status, answer = server.call("/sleep?mode=wait")
    if not stop.is_set():  # a fast machine may have finished the request before the deadline
        assert status == 409, answer
    assert server.call("/sleep?mode=abort")[0] == 200  # ends the request, which a slow machine computes for minutes
    running.join(120)
    assert server.call("/wake_up")[0] == 200
    require_serving(server, expected)


def wait_until_running(server: Server, stop: threading.Event) -> None:
    """Until vLLM counts a running request."""
    deadline = time.monotonic() + 60
    while not stop.is_set() and not re.search(r"num_requests_running\{[^}]*\} 1\.0", server.metrics()):
        assert time.monotonic() < deadline


def wait_until_free(server: Server) -> None:
    """Until nobody holds blocks: a sleep is taken then, and undone at once."""
    deadline = time.monotonic() + 3 * LEASE_S
    while (answer := server.call("/sleep"))[0] != 200:
        assert answer[0] == 409, answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.5)
    assert server.call("/wake_up")[0] == 200
