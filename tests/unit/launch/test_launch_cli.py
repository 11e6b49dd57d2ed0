"""The launcher's command line and TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.launch.__main__ import main
from pdkv.launch.cli import build, parse
from pdkv.launch.deployment import EngineDeployment, PDDeployment

pytestmark = pytest.mark.cpu

TOML = """
role = "pd"
model = "model"
ready_timeout = 40

[engine]
kind = "stock-pd"
device = "cpu"
kv_bytes = "1MiB"
extra_args = ["--seed", "0"]

[prefill]
cpus = "0"

[decode]
cpus = "1"
kv_bytes = "2MiB"
"""


@pytest.fixture
def config(tmp_path: Path, model: Path) -> str:
    path = tmp_path / "pd.toml"
    path.write_text(TOML)
    return str(path)


def pd(arguments: list[str]) -> PDDeployment:
    deployment = build(parse(arguments), print, lambda: False)
    assert isinstance(deployment, PDDeployment)
    return deployment


def test_a_file_gives_common_settings_and_those_of_each_engine(config, model):
    settings = pd(["--config", config]).settings
    assert (settings.prefill.kv_bytes, settings.decode.kv_bytes) == (2**20, 2**21)
    assert (settings.prefill.cpus, settings.decode.cpus) == ("0", "1")
    assert settings.prefill.extra_args == ("--seed", "0")
    assert (settings.ready_timeout_s, settings.prefill.model) == (40, model.resolve())


def test_the_command_line_wins_over_the_file_for_both_engines(config):
    settings = pd(["--config", config, "--kv-bytes", "3MiB", "--ready-timeout", "9"]).settings
    assert (settings.prefill.kv_bytes, settings.decode.kv_bytes, settings.ready_timeout_s) == (3 * 2**20, 3 * 2**20, 9)


def test_what_follows_the_double_dash_goes_to_both_engines(config):
    settings = pd(["--config", config, "--", "--max-num-seqs", "4"]).settings
    assert settings.prefill.extra_args == settings.decode.extra_args == ("--seed", "0", "--max-num-seqs", "4")


def test_ports_of_role_pd(config):
    arguments = ["--port", "18901", "--prefill-port", "18902", "--decode-port", "18903", "--side-channel-port", "18904"]
    deployment = pd(["--config", config, *arguments])
    assert [u.rsplit(":", 1)[1] for u in (deployment.proxy_url, deployment.prefill_url, deployment.decode_url)] == [
        "18901", "18902", "18903",
    ]  # fmt: skip
    assert deployment.settings.prefill.side_channel_port == 18904
    assert deployment.settings.decode.side_channel_port == 18905


def test_a_single_role_takes_its_own_table(config):
    deployment = build(parse(["--config", config, "--role", "decode", "--port", "18906"]), print, lambda: False)
    assert isinstance(deployment, EngineDeployment)
    assert (deployment.settings.role, deployment.settings.port, deployment.settings.cpus) == ("decode", 18906, "1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1", "'x' is unknown at the top"),
        ("role = [", "is no TOML file"),
        ("engine = 3", "'engine' must be a table"),
        ("[role]", "'role' must not be a table"),
        ('role = "pd"\nmodel = "model"\n[engine]\nblocksize = 4', "'blocksize' is no setting of an engine"),
        ("model = 5", "model 5 is no text"),
        ("log_dir = 5", "log_dir 5 is no text"),
        ("prefill_url = 3", "prefill_url 3 is no text"),
        ('role = "pd"\nmodel = "model"\n[engine]\nextra_args = "--seed"', "extra_args '--seed' is no list"),
        ('role = "pd"\nmodel = "model"\n[engine]\nextra_env = "A=1"', "extra_env 'A=1' is no table"),
        ('role = "pd"\nmodel = "model"\n[engine]\nextra_env = {A = 1}', "extra_env .* are not all texts"),
        ('role = "pd"\nmodel = "model"\n[engine]\ncapacity_blocks = 1.5', "capacity-blocks 1.5 is not a whole number"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, model, content, message):
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(parse(["--config", str(tmp_path / "bad.toml")]), print, lambda: False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--role is missing"),
        (["--role", "both"], "role 'both' is unknown; choose one of: prefill, decode, proxy, pd"),
        (["--role", "pd"], "--model is missing"),
        (["--role", "proxy", "--prefill-url", "http://a:1"], "--decode-url is missing"),
        (["--role", "pd", "--model", "m", "--prefill-url", "http://a:1"], "--prefill-url does not go with role 'pd'"),
        (["--role", "pd", "--model", "/no/such/folder"], "the model folder /no/such/folder does not exist"),
        (["--role", "pd", "--model", "m", "--capacity-blocks", "0"], "capacity-blocks is 0; it must be at least 1"),
        (["--role", "pd", "--model", "m", "--kv-bytes", "0"], "kv-bytes is 0; it must be at least 1"),
        (["--role", "pd", "--model", "m", "--port", "x"], "invalid int value: 'x'"),
        (["--role", "pd", "--model", "m", "--ready-timeout", "nan"], "ready-timeout nan is not a number"),
        (["--role", "pd", "--model", "m", "--kv-bytes", "9" * 5000], "is not a size"),
        (["--role", "pd", "--model", "m", "--kv-bytes", "9" * 400 + ".5"], "is not a size"),
        (["--role", "pd", "--model", "m", "--capacity-blocks", str(2**63)], "which no machine has"),
        (["--role", "pd", "--model", "m", "--connector-config", "[1]"], "'[1]' is no JSON object"),
        (["--role", "pd", "--model", "m", "--connector-config", "{"], "'{' is no JSON"),
        (["--role", "pd", "--model", "m", "--max-queued", "0"], "max-queued is 0; it must be at least 1"),
        (
            ["--role", "decode", "--model", "m", "--queue-timeout", "3"],
            "--queue-timeout does not go with role 'decode'",
        ),
        (["--role", "pd", "--model", ""], "model '' is no text or an empty one"),
        (["--rol", "pd"], "unrecognized arguments: --rol"),
        (["--role", "pd", "--config", "/no/such.toml"], "cannot read --config /no/such.toml: No such file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_an_unknown_connector_is_one_sentence_that_names_the_known_ones(capsys, model):
    arguments = ["--role", "prefill", "--model", str(model), "--connector", "pigeon", "--device", "cpu"]
    assert main(arguments) == 2
    assert "no KV connector is called 'pigeon'; installed are:" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1", "a" * 300, "..."])
@pytest.mark.parametrize("option", ["--host", "--side-channel-host"])
def test_a_host_that_is_no_address_of_this_machine_is_one_sentence(capsys, model, option, host):
    arguments = ["--role", "prefill", "--kind", "stock-pd", "--device", "cpu", "--model", str(model), "--dry-run"]
    assert main([*arguments, option, host]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on {host}:0" in error
    assert error.count("\n") == 1
