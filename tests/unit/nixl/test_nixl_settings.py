"""Settings of the nixl transport, and what its probe reads out of UCX's tables."""

from __future__ import annotations

import pytest

from pdkv.errors import ConfigError
from pdkv_connectors.nixl.probe import transport_used
from pdkv_connectors.nixl.settings import NixlSettings

pytestmark = pytest.mark.cpu

STAMP = "[1796003162.668988] [vm:13710:0]   "
TABLES = """\
+--------+-------------+-----------------------------------+
| a self cfg#0                                             |
| remote memory read by ucp_get* from host memory to host  |
+--------+-------------+-----------------------------------+
| Range  | Description |              Config               |
+--------+-------------+-----------------------------------+
| 0..inf | zero-copy   | self/memory                       |
+--------+-------------+-----------------------------------+
+------------+--------------------+-------------------------+
| a intra-node cfg#1                                        |
| remote memory read by ucp_get* into host memory from host |
+------------+--------------------+-------------------------+
|   Range    |    Description     |         Config          |
+------------+--------------------+-------------------------+
|   0..16515 | software emulation | tcp/lo                  |
| 16516..inf | {description}      | {config}                |
+------------+--------------------+-------------------------+
+-----------+--------------------+---------------+
| a intra-node cfg#1                             |
| active message by ucp_am_send* from host memory |
+-----------+--------------------+---------------+
|   0..8184 | short              | tcp/eth0      |
+-----------+--------------------+---------------+
"""


@pytest.mark.parametrize(("description", "config"), [("zero-copy", "cma/memory"), ("software emulation", "tcp/lo")])
def test_the_way_of_large_reads_from_a_peer_is_read_out_of_ucxs_tables(description: str, config: str) -> None:
    text = TABLES.format(description=description, config=config)
    assert transport_used([STAMP + line for line in text.splitlines()]) == f"{description}, {config}"


def test_without_tables_the_way_is_unknown() -> None:
    assert transport_used(["2026-11-30 NIXL INFO", '{"seconds": 1}']) == "unknown"


def test_by_default_device_memory_is_probed_once_and_found_slow_below_5_gbps() -> None:
    settings = NixlSettings.from_environment({})
    assert (settings.probe, settings.on_slow) == ("device", "warn")
    assert (settings.least_gbps("VRAM"), settings.least_gbps("DRAM")) == (5.0, 0.0)


def test_the_environment_says_otherwise() -> None:
    given = {"PDKV_PROBE": "0", "PDKV_MIN_PROBE_GBPS": "0.5", "PDKV_SLOW_PROBE": "fail"}
    settings = NixlSettings.from_environment(given)
    assert (settings.probe, settings.on_slow) == ("never", "fail")
    assert settings.least_gbps("VRAM") == settings.least_gbps("DRAM") == 0.5


@pytest.mark.parametrize(
    "given",
    [{"PDKV_PROBE": "yes"}, {"PDKV_SLOW_PROBE": "stop"}, *({"PDKV_MIN_PROBE_GBPS": t} for t in ("fast", "-1", "nan"))],
)
def test_a_value_that_makes_no_sense_is_an_error_that_names_the_variable(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        NixlSettings.from_environment(given)
