"""``python -m pdkv.launch`` with real processes: what it says, how it ends, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from launched import DEADLINE_S, environment, launched, read_urls, run_to_end, started_pids, survivors

from pdkv.testing.stopping import stop

pytestmark = pytest.mark.cpu

PD = ("prefill", "decode", "proxy")


def pd_arguments(model: Path, *more: str) -> list[str]:
    return ["--role", "pd", "--kind", "stock-pd", "--device", "cpu", "--model", str(model), *more]


def prefill_arguments(model: Path, *more: str) -> list[str]:
    return ["--role", "prefill", "--kind", "stock-pd", "--device", "cpu", "--model", str(model), *more]


def test_role_pd_answers_a_request_and_sigterm_ends_everything_with_0(model, pids):
    with launched(pd_arguments(model), environment(pids)) as process:
        url = read_urls(process, PD)["proxy"]
        request = urllib.request.Request(f"{url}/v1/completions", b'{"prompt": "a"}')
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["choices"][0]["text"] == " Paris"
        started = started_pids(pids)
        code, _ = run_to_end(process, signal.SIGTERM)
    assert (code, survivors(started), len(started)) == (0, set(), 6)
    assert len(list(pids.glob("sigterm-*"))) == 2


def test_ctrl_c_ends_with_130(model, pids):
    with launched(prefill_arguments(model), environment(pids)) as process:
        read_urls(process, ["prefill"])
        code, _ = run_to_end(process, signal.SIGINT)
    assert (code, survivors(started_pids(pids))) == (130, set())


def test_ctrl_c_while_waiting_for_an_engine_ends_it(model, pids):
    with launched(prefill_arguments(model), environment(pids, "hang")) as process:
        assert process.stderr is not None
        assert "started prefill" in process.stderr.readline()
        code, _ = run_to_end(process, signal.SIGINT)
    assert (code, survivors(started_pids(pids))) == (130, set())


def test_a_killed_launcher_leaves_no_process_behind(model, pids):
    with launched(pd_arguments(model), environment(pids)) as process:
        read_urls(process, PD)
        started = started_pids(pids) | children(process.pid)
        process.kill()
        assert survivors(started) == set()


def test_a_killed_guard_ends_the_engine_and_the_deployment(model, pids):
    with launched(prefill_arguments(model), environment(pids)) as process:
        read_urls(process, ["prefill"])
        (guard,) = children(process.pid)
        # what the engine put into a session of its own is out of reach once both guard and engine are gone
        in_group = {pid for pid in started_pids(pids) if os.getpgid(pid) == guard}
        os.kill(guard, signal.SIGKILL)
        code, error = run_to_end(process)
    assert (code, survivors(in_group), len(in_group)) == (1, set(), 2)
    assert "prefill was killed by SIGKILL" in error
    for pid in started_pids(pids) - in_group:
        os.kill(pid, signal.SIGKILL)


def test_an_engine_that_dies_at_start_is_reported_by_its_root_cause(model, pids):
    with launched(pd_arguments(model), environment(pids, "die")) as process:
        code, error = run_to_end(process)
    assert (code, survivors(started_pids(pids))) == (1, set())
    assert "ended with exit code 1: pdkv.errors.CapacityError: 3 blocks hold no request; raise it." in error
    assert "Engine core initialization failed" not in error


def test_an_engine_that_dies_later_ends_the_deployment(model, pids):
    with launched(pd_arguments(model), environment(pids)) as process:
        read_urls(process, PD)
        engine = next(pid for pid in started_pids(pids) if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(engine, signal.SIGKILL)
        code, error = run_to_end(process)
    assert (code, survivors(started_pids(pids))) == (1, set())
    assert "was killed by SIGKILL" in error


def test_an_engine_that_never_gets_ready_is_ended_at_the_deadline(model, pids):
    with launched(prefill_arguments(model, "--ready-timeout", "1"), environment(pids, "hang")) as process:
        code, error = run_to_end(process)
    assert (code, survivors(started_pids(pids))) == (1, set())
    assert "did not answer" in error
    assert "within 1 s; raise --ready-timeout" in error


def test_a_port_in_use_is_refused_before_anything_starts(model, pids):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(prefill_arguments(model, "--port", str(port)), environment(pids)) as process:
            code, error = run_to_end(process)
    assert (code, started_pids(pids)) == (2, set())
    assert error == (
        f"error: port {port} on 127.0.0.1 is in use; end what listens there, or give --port another "
        "(0 picks a free one).\n"
    )


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_proxy_whose_engine_is_unreachable_names_it_and_ends(model, pids, missing):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with launched(prefill_arguments(model), environment(pids)) as engine:
        alive = read_urls(engine, ["prefill"])["prefill"]
        urls = {"prefill": alive, "decode": alive, missing: dead}
        arguments = ["--role", "proxy", "--ready-timeout", "1", "--prefill-url", urls["prefill"],
                     "--decode-url", urls["decode"]]  # fmt: skip
        with launched(arguments, environment(pids)) as process:
            code, error = run_to_end(process)
    assert code == 1
    assert f"the {missing} engine at {dead} did not answer /health within 1 s; start it, or correct" in error


def test_a_dry_run_prints_commands_that_a_shell_takes_and_starts_nothing(model, pids, tmp_path):
    logs = tmp_path / "logs"
    arguments = pd_arguments(model, "--dry-run", "--log-dir", str(logs), "--", "--seed", "0")
    with launched(arguments, environment(pids)) as process:
        output, _ = process.communicate(timeout=30)
    lines = output.splitlines()
    assert (process.returncode, lines[::2]) == (0, ["# prefill", "# decode", "# proxy"])
    assert all(line.endswith("--seed 0") for line in lines[1:4:2])
    subprocess.run(["sh", "-n", "-c", output], check=True)
    assert (started_pids(pids), logs.exists()) == (set(), False)


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_log_that_cannot_be_written_is_one_sentence(model, pids, tmp_path):
    (tmp_path / "logs" / "prefill.log").mkdir(parents=True)
    with launched(prefill_arguments(model, "--log-dir", str(tmp_path / "logs")), environment(pids)) as process:
        code, error = run_to_end(process)
    assert (code, started_pids(pids)) == (1, set())
    assert error == f"error: cannot start prefill with its log in {tmp_path}/logs/prefill.log: Is a directory.\n"


@pytest.mark.parametrize(("stream", "code"), [("stdout", 1), ("stderr", 0)])
def test_a_full_disk_behind_an_output_ends_with_an_exit_code_and_leaves_nothing(model, pids, stream, code):
    arguments = [sys.executable, "-m", "pdkv.launch", *prefill_arguments(model)]
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        process = subprocess.Popen(arguments, env=environment(pids), text=True, start_new_session=True, **streams)
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    if stream == "stderr":
        read_urls(process, ["prefill"])
        process.send_signal(signal.SIGTERM)
    error = process.communicate()[1]
    watchdog.cancel()
    assert (process.returncode, survivors(started_pids(pids))) == (code, set())
    if stream == "stdout":
        assert error.endswith("error: cannot write the addresses to standard output: No space left on device.\n")


def test_stopped_guards_do_not_keep_a_deployment_from_ending(model, pids):
    with launched(pd_arguments(model), environment(pids)) as process:
        read_urls(process, PD)
        started = started_pids(pids)
        for guard in children(process.pid):
            stop(guard)
        code, _ = run_to_end(process, signal.SIGTERM)
    assert (code, survivors(started)) == (0, set())
    assert len(list(pids.glob("sigterm-*"))) == 2
