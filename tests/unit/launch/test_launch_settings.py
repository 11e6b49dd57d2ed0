"""What the launcher's settings accept, and in which words they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkv.errors import CapacityError, ConfigError
from pdkv.launch import EngineSettings, PDSettings, engine_settings, parse_nbytes

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("268435456", 2**28), ("256MiB", 2**28), (" 1.5 GiB ", 3 * 2**29), ("4KiB", 4096), ("7B", 7), (12, 12)],
)
def test_sizes_are_plain_bytes_or_binary_units(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["256MB", "", "MiB", "-1MiB", "1e6", "0.3B", "ten", "1 MiB x", True, None, 1.5])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_nbytes(text)


@pytest.mark.parametrize(
    "name", ["kv_bytes", "engine_memory", "capacity_blocks", "warmup_blocks", "granule", "block_size", "max_model_len"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_and_sizes_below_one_are_refused_by_name(name, value):
    with pytest.raises(CapacityError, match=f"{name.replace('_', '-')} is {value}; it must be at least 1"):
        EngineSettings(model=Path("m"), role="prefill", **{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"role": "both"}, "role 'both' is unknown; choose one of: prefill, decode, aggregated"),
        ({"kind": "x"}, "kind 'x' is unknown"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"kind": "stock"}, "kind 'stock' does not go with role 'prefill'"),
        ({"granule": 5000}, "granule 5000 is not a power of two"),
        ({"warmup_blocks": 9, "capacity_blocks": 8}, "warmup-blocks 9 is more than capacity-blocks 8"),
        ({"port": 70000}, "port 70000 is no TCP port"),
        ({"port": "80"}, "port '80' is no TCP port"),
        ({"host": "http://x"}, "host 'http://x' is no host name"),
        ({"host": "0.0.0.0"}, "give --side-channel-host"),
        ({"cpus": 0}, "cpus 0 is no text"),
        ({"block_size": "16"}, "block-size '16' is not a number"),
        ({"extra_args": ("--seed", 0)}, "are not all texts"),
        ({"blocksize": 16}, "'blocksize' is no setting of an engine"),
    ],
)
def test_a_wrong_engine_setting_is_one_sentence(values, message):
    with pytest.raises(ConfigError, match=message):
        engine_settings(**{"model": "m", "role": "prefill", **values})


def test_a_wildcard_host_is_fine_once_peers_have_an_address():
    engine_settings(model="m", role="decode", host="0.0.0.0", side_channel_host="10.0.0.7")


def test_common_settings_go_to_both_engines_and_own_ones_win():
    settings = PDSettings.build("m", kv_bytes="256MiB", block_size=16, decode={"kv_bytes": 100}, proxy_port=8000)
    assert (settings.prefill.kv_bytes, settings.decode.kv_bytes) == (2**28, 100)
    assert (settings.prefill.block_size, settings.decode.block_size, settings.proxy_port) == (16, 16, 8000)
    assert (settings.prefill.role, settings.decode.role) == ("prefill", "decode")


def test_two_models_in_one_deployment_are_refused():
    with pytest.raises(ConfigError, match="KV of one model means nothing to another"):
        PDSettings.build("m", decode={"model": "n"})


def test_engines_in_each_others_place_are_refused():
    settings = PDSettings.build("m")
    with pytest.raises(ConfigError, match="are 'prefill' and 'decode'"):
        PDSettings(prefill=settings.decode, decode=settings.prefill)
