"""The command lines and environments that the launcher makes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.launch import engine_settings
from pdkv.launch.command import STOCK_NIXL, Command, engine_command, http_url, proxy_command
from pdkv.launch.settings import ProxyLimits
from pdkv.proxy.__main__ import parse as parse_proxy
from pdkv.registry import ConnectorEntry

pytestmark = pytest.mark.cpu

PULL = ConnectorEntry("nixl-pull", "PdkvNixlPullConnector", "pdkv_connectors.vllm.nixl", "")


def command(connector: ConnectorEntry | None = PULL, status_dir: Path | None = None, **values: Any) -> Command:
    settings = {"model": "/m", "role": "prefill", "port": 8100, "side_channel_port": 5600, "device": "cpu", **values}
    return engine_command(engine_settings(**settings), connector, status_dir)


def option(made: Command, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


def test_decode_is_told_where_prefill_listens():
    made = command(role="decode", side_channel_peers=["127.0.0.1:5601", "[::1]:5602"])
    assert made.env["PDKV_SIDE_CHANNEL_PEERS"] == "127.0.0.1:5601,[::1]:5602"
    assert made.env["PDKV_SIDE_CHANNEL"] == "127.0.0.1:5600"


def test_an_engine_is_told_of_its_keys_and_that_it_may_do_without():
    made = command(side_channel_key_file="/k/p.key", side_channel_peers_file="/k/peers", insecure_side_channel=True)
    assert made.env["PDKV_KEY_FILE"] == "/k/p.key"
    assert made.env["PDKV_PEERS_FILE"] == "/k/peers"
    assert made.env["PDKV_INSECURE_SIDE_CHANNEL"] == "1"
    assert not {"PDKV_KEY_FILE", "PDKV_INSECURE_SIDE_CHANNEL"} & set(command().env)
    with pytest.raises(ConfigError, match="neither true nor false"):
        command(insecure_side_channel="yes")


def test_an_ipv6_side_channel_gets_its_brackets():
    assert command(side_channel_host="::1").env["PDKV_SIDE_CHANNEL"] == "[::1]:5600"


@pytest.mark.parametrize(("device", "block_size", "nearest"), [("cpu", 48, "32 or 64"), ("cuda", 24, "16 or 32")])
def test_a_block_size_that_the_attention_kernels_do_not_take_is_refused_with_the_nearest_that_they_do(
    device: str, block_size: int, nearest: str
):
    with pytest.raises(ConfigError, match=f"use {nearest} tokens"):
        command(device=device, block_size=block_size)


def test_a_growable_prefill_engine_on_the_cpu():
    made = command(kv_bytes="256MiB", status_dir=Path("/s"), warmup_blocks=4, capacity_blocks=99, granule="64KiB")
    assert made.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert option(made, "--worker-cls") == "pdkv_connectors.vllm.worker.GrowableCPUWorker"
    assert json.loads(option(made, "--kv-transfer-config")) == {
        "kv_connector": "PdkvNixlPullConnector",
        "kv_connector_module_path": "pdkv_connectors.vllm.nixl",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    assert option(made, "--kv-cache-memory-bytes") == str(2**28)
    assert made.env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "PDKV_SIDE_CHANNEL": "127.0.0.1:5600",
        "PDKV_WARMUP_BLOCKS": "4",
        "PDKV_CAPACITY_BLOCKS": "99",
        "PDKV_GRANULE": "65536",
        "PDKV_STATUS_DIR": "/s",
    }
    assert made.url == "http://127.0.0.1:8100"


def test_settings_of_the_connector_reach_vllm_as_they_are():
    made = command(connector_config={"pdkv_lease_s": 2.5})
    assert json.loads(option(made, "--kv-transfer-config"))["kv_connector_extra_config"] == {"pdkv_lease_s": 2.5}


def test_decode_consumes():
    made = command(role="decode")
    assert json.loads(option(made, "--kv-transfer-config"))["kv_role"] == "kv_consumer"


def test_an_engine_that_may_sleep_has_vllms_endpoints_and_pdkvs_answers_to_them():
    cpu, cuda = command(enable_sleep=True), command(enable_sleep=True, device="cuda")
    assert (cpu.env["PDKV_SLEEP"], cpu.env["VLLM_SERVER_DEV_MODE"]) == ("1", "1")
    assert "pdkv_connectors.vllm.sleep_http.SleepAnswers" in cpu.argv
    assert "--enable-sleep-mode" not in cpu.argv
    assert option(cuda, "--sleep-mode-backend") == "pdkv"
    assert "--enable-sleep-mode" in cuda.argv


def test_an_engine_that_was_not_told_to_sleep_serves_no_development_endpoint():
    made = command()
    assert "VLLM_SERVER_DEV_MODE" not in made.env
    assert "pdkv_connectors.vllm.sleep_http.SleepAnswers" not in made.argv


def test_a_stock_engine_cannot_be_told_to_sleep():
    with pytest.raises(ConfigError, match="enable-sleep"):
        command(enable_sleep=True, kind="stock-pd")


def test_decode_bounds_who_waits_and_prefill_can_give_up_a_request():
    decode = command(role="decode", admission_requests=4, admission_blocks=90)
    assert option(decode, "--middleware") == "pdkv_connectors.vllm.http.DecodeAdmission"
    assert (decode.env["PDKV_ADMISSION_REQUESTS"], decode.env["PDKV_ADMISSION_BLOCKS"]) == ("4", "90")
    assert option(command(), "--middleware") == "pdkv_connectors.vllm.http_abort.AbortById"


def test_cuda_gets_its_own_worker_class_and_neither_eager_mode_nor_cpu_binding():
    made = command(device="cuda", cpus="0")
    assert option(made, "--worker-cls") == "pdkv_connectors.vllm.worker.GrowableGPUWorker"
    assert json.loads(option(made, "--kv-transfer-config"))["kv_buffer_device"] == "cuda"
    assert "--enforce-eager" not in made.argv
    assert "VLLM_CPU_OMP_THREADS_BIND" not in made.env


def test_a_stock_pd_engine_has_vllms_connector_and_nothing_of_pdkv():
    made = command(STOCK_NIXL, Path("/s"), kind="stock-pd", capacity_blocks=5)
    config = json.loads(option(made, "--kv-transfer-config"))
    assert config["kv_connector"] == "NixlConnector"
    assert "kv_connector_module_path" not in config
    assert "--middleware" not in made.argv
    assert "--worker-cls" not in made.argv
    inherited = {"PDKV_STATUS_DIR": "x", "PDKV_CAPACITY_BLOCKS": "3", "HOME": "/h"}
    assert not any(name.startswith("PDKV") for name in made.environment(inherited))


def test_a_stock_aggregated_engine_has_no_connector_and_no_side_channel():
    made = command(None, None, kind="stock", role="aggregated")
    assert "--kv-transfer-config" not in made.argv
    assert not any("SIDE_CHANNEL" in name for name in made.env)


def test_the_variable_that_would_override_a_budget_in_bytes_is_not_inherited():
    inherited = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert "VLLM_CPU_KVCACHE_SPACE" not in command(kv_bytes=1000).environment(inherited)
    assert "VLLM_CPU_KVCACHE_SPACE" in command().environment(inherited)


def test_extra_arguments_and_environment_come_last():
    made = command(extra_args=("--seed", "0"), extra_env={"PDKV_GRANULE": "8192"}, granule=4096)
    assert made.argv[-2:] == ("--seed", "0")
    assert made.env["PDKV_GRANULE"] == "8192"


@pytest.mark.parametrize("flag", ["--port", "--port=3", "--kv_transfer_config", "--worker-cls", "--model"])
def test_an_extra_argument_that_contradicts_the_launcher_is_refused(flag):
    with pytest.raises(ConfigError, match="would contradict what the launcher passes"):
        command(extra_args=(flag, "x"))


def test_the_shell_line_is_quoted_and_carries_the_environment():
    made = command(kv_bytes=5)
    words = shlex.split(made.shell())
    assert words[:3] == ["env", "-u", "VLLM_CPU_KVCACHE_SPACE"]
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in words
    assert tuple(words[-len(made.argv) :]) == made.argv


def test_the_proxys_command_line_is_one_that_the_proxy_takes():
    limits = ProxyLimits(request_timeout_s=9.5, queue_timeout_s=4, max_requests=70, max_queued=5)
    urls = (["http://a:1", "http://a:2"], ["http://b:2"])
    made = proxy_command(*urls, "127.0.0.1", 8000, ready_timeout_s=7, limits=limits)
    settings = parse_proxy(made.argv[3:])
    assert (settings.prefill_urls, settings.decode_urls) == (("http://a:1", "http://a:2"), ("http://b:2",))
    assert (settings.port, settings.ready_timeout_s, settings.request_timeout_s) == (8000, 7, 9.5)
    assert (settings.queue_timeout_s, settings.max_requests, settings.max_queued) == (4, 70, 5)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1"),
     ("::", "http://[::1]:1"), ("box", "http://box:1")],
)  # fmt: skip
def test_a_url_is_one_that_this_machine_reaches(host, url):
    assert http_url(host, 1) == url
