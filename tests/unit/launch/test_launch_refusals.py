"""Settings that an engine would refuse when its model is loaded are refused before it is started, in the same words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import environment, launched, run_to_end, started_pids

from pdkv.errors import ConfigError, ConnectorError
from pdkv.launch import PDDeployment, PDSettings, engine_settings
from pdkv.launch.deployment import EngineDeployment
from pdkv.registry import ConnectorEntry, find
from pdkv.transfer.sidechannel import write_key_pair

pytestmark = pytest.mark.cpu


def decode(model: Path, **values: Any) -> EngineDeployment:
    return EngineDeployment(
        engine_settings(model=model, role="decode", **{"connector": "pdkv", "device": "cpu"} | values)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"side_channel_peers": ["nowhere"]}, "side channel address 'nowhere' was given; write host:port"),
        ({"side_channel_peers": ["10.0.0.7:5600"]}, "can be reached from other machines and there is no key"),
        ({"side_channel_key_file": "/no/such.key"}, "cannot read the keys /no/such.key"),
        ({"side_channel_peers_file": "/no/such.peers"}, "cannot read the peers file /no/such.peers"),
        ({"connector_config": {"pdkv_transport": "pigeon"}}, "there is no transport 'pigeon'"),
        ({"connector_config": {"pdkv_verify": "twice"}}, "pdkv_verify must be 0 or 1, found 'twice'"),
        ({"connector_config": {"pdkv_holds_s": 3}}, "pdkv_holds_s, which this connector does not know"),
        ({"connector_config": {"pdkv_wait_s": float("nan")}}, "pdkv_wait_s must be a number"),
        ({"connector_config": {"pdkv_side_channel": "0.0.0.0:5600"}}, "can be reached from other machines"),
        ({"connector": "nixl-pull", "connector_config": {"pdkv_verify": 1}}, "this connector does not know"),
        ({"connector": "nixl-push", "connector_config": {"pdkv_wait_s": 0}}, "pdkv_wait_s must be a number of seconds"),
        ({"connector": "nixl-pull", "connector_config": {"kv_lease_duration": 0}}, "kv_lease_duration must be 1 to"),
    ],
)
def test_what_the_connector_would_refuse_is_refused_before_an_engine_starts(model, values, message):
    with pytest.raises(ConfigError, match=message):
        decode(model, **values)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PDKV_VERIFY", "2", "pdkv_verify must be 0 or 1"),
        ("PDKV_PROBE", "perhaps", "PDKV_PROBE must be 0 or 1"),
        ("PDKV_SLOW_PROBE", "cry", "PDKV_SLOW_PROBE must be warn or fail"),
        ("PDKV_MIN_PROBE_GBPS", "inf", "PDKV_MIN_PROBE_GBPS must be a number of at least 0"),
        ("PDKV_SLEEP_TIMEOUT", "nan", "PDKV_SLEEP_TIMEOUT must be a number above 0"),
        ("PDKV_MEMORY_UTILIZATION", "1.5", "PDKV_MEMORY_UTILIZATION must be a number above 0 and at most 1"),
        ("PDKV_ADMISSION_REQUESTS", "0", "PDKV_ADMISSION_REQUESTS must be a whole number of at least 1"),
        ("PDKV_SIZING_MARGIN_FRACTION", "nan", "margin_fraction must be a finite number"),
        ("PDKV_SIZING_MARGIN", "1", "PDKV_SIZING_MARGIN names no constant of sizing"),
    ],
)
@pytest.mark.parametrize("place", ["inherited", "extra_env"])
def test_variables_that_the_engine_would_refuse_are_refused_from_wherever_it_gets_them(
    model, monkeypatch, variable, value, message, place
):
    if place == "inherited":
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        decode(model, extra_env={variable: value} if place == "extra_env" else {})


def test_both_engines_of_a_deployment_are_checked(model):
    for role in ("prefill", "decode"):
        wrong = {role: {"connector_config": {"pdkv_hold_s": "soon"}}}
        with pytest.raises(ConfigError, match="pdkv_hold_s must be a number"):
            PDDeployment(PDSettings.build(model, connector="pdkv", device="cpu", **wrong))


def test_an_engine_that_reads_no_variable_of_pdkv_is_not_refused_for_one(model, monkeypatch):
    monkeypatch.setenv("PDKV_PROBE", "perhaps")
    decode(model, kind="stock-pd")


def test_a_secret_key_that_others_may_read_is_refused_before_an_engine_starts(model, tmp_path):
    write_key_pair(tmp_path / "p.key")
    decode(model, side_channel_key_file=str(tmp_path / "p.key"))
    (tmp_path / "p.key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        decode(model, side_channel_key_file=str(tmp_path / "p.key"))


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_the_program_says_it_in_one_sentence_with_and_without_a_dry_run_and_starts_nothing(model, pids, dry_run):
    arguments = ["--role", "pd", "--model", str(model), "--device", "cpu", "--connector", "pdkv", *dry_run,
                 "--connector-config", '{"pdkv_transport": "pigeon"}']  # fmt: skip
    with launched(arguments, environment(pids)) as process:
        code, error = run_to_end(process)
    assert (code, started_pids(pids), error.count("\n")) == (2, set(), 1)
    assert error.startswith("error: there is no transport 'pigeon'; choose one of auto,")


def test_checking_imports_neither_an_engine_nor_torch():
    program = (
        "import os, sys; from pdkv.registry import find, names\n"
        "for name in names(): assert find(name).check; find(name).check_settings({}, os.environ)\n"
        "print(sorted({'vllm', 'torch', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_connector_that_names_no_check_is_taken_as_it_is_and_one_that_names_a_wrong_one_is_a_sentence():
    ConnectorEntry("other", "Other", "other.module", "of somebody else").check_settings({"anything": 1}, {})
    wrong = ConnectorEntry("other", "Other", "other.module", "of somebody else", check="no_such_module:check")
    with pytest.raises(ConnectorError, match="'other' names 'no_such_module:check' to check its settings"):
        wrong.check_settings({}, {})
    assert find("pdkv").check == "pdkv_connectors.vllm.before_start:check_session"
