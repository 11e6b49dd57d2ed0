"""Choices that depend on the machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, LaunchError
from pdkv.launch import PDDeployment, PDSettings, engine_settings, machine, read_status
from pdkv.sockets import bind

pytestmark = pytest.mark.cpu


def test_picked_ports_are_free_and_all_different():
    ports = machine.pick_free_ports(["127.0.0.1"] * 20)
    assert len(set(ports)) == 20
    for port in ports:
        bind("127.0.0.1", port).close()


@pytest.mark.parametrize(("lowest", "highest"), [(32768, 60999), (1024, 60000), (10_100, 65_535)])
def test_picked_ports_are_none_that_the_system_gives_out_for_connections(lowest, highest, tmp_path, monkeypatch):
    given_out = tmp_path / "ip_local_port_range"
    given_out.write_text(f"{lowest}\t{highest}\n")
    monkeypatch.setattr(machine, "EPHEMERAL_PORTS", given_out)
    monkeypatch.setattr(machine, "_picked", set())
    (port,) = machine.pick_free_ports(["127.0.0.1"])
    assert port >= machine.FIRST_PORT
    assert not lowest <= port <= highest


def test_where_the_system_gives_out_all_ports_it_chooses(tmp_path, monkeypatch):
    given_out = tmp_path / "ip_local_port_range"
    given_out.write_text("1024\t65535\n")
    monkeypatch.setattr(machine, "EPHEMERAL_PORTS", given_out)
    ports = machine.pick_free_ports(["127.0.0.1"] * 3)
    assert len(set(ports)) == 3


def test_a_port_that_is_taken_is_not_picked(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, bind("127.0.0.1", 0) as other:
        numbers = [taken.getsockname()[1], other.getsockname()[1]]
        other.close()
        monkeypatch.setattr(machine, "_quiet_ports", lambda: numbers[::-1])
        assert machine.pick_free_ports(["127.0.0.1"]) == (numbers[1],)


def test_a_port_that_somebody_listens_on_is_refused_even_where_the_listener_shares_it():
    with socket.socket() as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        port = shared.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            machine.check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:0 .* give --host an address of this machine"):
        machine.check_port("192.0.2.1", 0)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        machine.check_model(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        machine.check_model(tmp_path / "nowhere")


def engines(**values):
    return [
        engine_settings(**{"model": "m", "role": role, "device": "cpu", **values}) for role in ("prefill", "decode")
    ]


def test_engines_on_one_machine_get_cpus_of_their_own(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    assert [e.cpus for e in machine.share_cpus(engines())] == ["2,3", "4,5"]


@pytest.mark.parametrize(("values", "cpus"), [({"cpus": "0-3"}, "0-3"), ({"device": "cuda"}, None)])
def test_engines_that_name_their_cpus_or_run_elsewhere_keep_what_they_have(values, cpus):
    assert [e.cpus for e in machine.share_cpus(engines(**values))] == [cpus, cpus]


def test_one_cpu_is_left_to_both_engines(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {7})
    assert [e.cpus for e in machine.share_cpus(engines())] == [None, None]


def test_engines_on_one_host_that_name_no_budget_share_its_memory():
    total = machine.open_driver("host").memory_info().total
    shared = machine.share_memory(engines())
    assert [e.engine_memory for e in shared] == [int(total * 0.8 / 2)] * 2


def test_engines_on_one_card_that_name_no_budget_share_it():
    shared = machine.share_memory(engines(device="cuda"))
    assert [(e.engine_memory, e.extra_env) for e in shared] == [(None, {"PDKV_MEMORY_UTILIZATION": "0.4"})] * 2


@pytest.mark.parametrize(
    "values",
    [
        {"kv_bytes": 1 << 28},
        {"engine_memory": 1 << 30},
        {"extra_args": ["--gpu-memory-utilization", "0.3"]},
        {"device": "cuda", "extra_env": {"CUDA_VISIBLE_DEVICES": "1"}},
        {"kind": "stock-pd"},
    ],
)
def test_engines_that_were_told_their_memory_keep_it(values):
    given = engines(**values)
    assert list(machine.share_memory(given)) == list(given)


def test_one_port_for_two_servers_is_refused(model):
    settings = PDSettings.build(model, kind="stock-pd", device="cpu", proxy_port=8123, prefill={"port": 8123})
    with pytest.raises(ConfigError, match="port 8123 is given to more than one server"):
        PDDeployment(settings)


def test_a_deployment_knows_its_addresses_before_it_starts(model):
    deployment = PDDeployment(PDSettings.build(model, kind="stock-pd", device="cpu"))
    assert len({deployment.proxy_url, deployment.prefill_url, deployment.decode_url}) == 3
    assert deployment.status("prefill") == {"workers": [], "scheduler": None}
    assert not deployment.log_dir.exists()


def test_decode_in_a_deployment_is_told_where_its_prefill_listens(model):
    deployment = PDDeployment(
        PDSettings.build(model, kind="stock-pd", device="cpu", prefill={"side_channel_port": 18777})
    )
    assert deployment.settings.decode.side_channel_peers == ("127.0.0.1:18777",)


def test_status_files_are_read_in_the_order_of_ranks(tmp_path: Path):
    for rank in (10, 2, 0):
        (tmp_path / f"worker-rank{rank}.json").write_text(json.dumps({"rank": rank}))
    (tmp_path / "scheduler.json").write_text('{"requests": 3}')
    assert read_status(tmp_path) == {
        "workers": [{"rank": 0}, {"rank": 2}, {"rank": 10}],
        "scheduler": {"requests": 3},
    }


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000])
def test_a_status_file_of_nobody_is_one_sentence(tmp_path: Path, content):
    (tmp_path / "scheduler.json").write_text(content)
    (tmp_path / "worker-rankX.json").write_text("not one of a rank, and not looked at")
    with pytest.raises(LaunchError, match=r"scheduler\.json is no engine's status"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    ("cpus", "message"),
    [
        ("a-b", "'a-b' is no list of CPUs"),
        ("0-", "is no list of CPUs"),
        ("4", "names CPU 4; this process may use 0,1,2"),
        ("0-3", "names CPU 3"),
        ("0|7", "names CPU 7"),
    ],
)
def test_cpus_that_are_not_there_are_refused_before_an_engine_starts(monkeypatch, cpus, message):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    with pytest.raises(ConfigError, match=message):
        machine.check_cpus(engines(cpus=cpus)[0])


@pytest.mark.parametrize("cpus", [None, "auto", "nobind", "0", "0-2", "0,2", "0-1|2"])
def test_cpus_that_are_there_are_taken(monkeypatch, cpus):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    machine.check_cpus(engines(cpus=cpus)[0])
