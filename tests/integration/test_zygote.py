"""A fork of the process that imported vLLM behaves as a fresh process would, for whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine import VARIABLES, EngineProcess, free_port
from zygote import Zygote

from pdkv.testing.child import Child, ChildEnded, ChildProcess, Start
from pdkv.testing.stopping import stopped

pytestmark = pytest.mark.vllm

PROGRAM = '''
"""Answers about the process that it runs in."""

import os, signal, sys, threading
from pdkv.testing.child import serve

imported = [name for name in sys.modules if name.split(".")[0] in ("vllm", "nixl", "pdkv_connectors")]
libraries = [line.split("/")[-1] for line in open("/proc/self/maps") if "libuc" in line]
threads = len(os.listdir("/proc/self/task"))


def open_files():
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass  # that of the folder itself


class Target:
    def do_facts(self, names):
        return {
            "pid": os.getpid(), "parent": os.getppid(), "main": __name__, "argv": sys.argv, "folder": os.getcwd(),
            "variables": {name: os.environ.get(name) for name in names}, "group": os.getpgid(0),
            "threads": threads, "imported": imported, "ucx": libraries,
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "open": list(open_files()),
        }

    def do_exit(self, code):
        import atexit
        atexit.register(print, "at exit")
        print("before the end")
        sys.exit(code)

    def do_raise(self):
        raise KeyboardInterrupt("out of serve")


serve(Target(), int(sys.argv[1]), lambda: None)
'''


#: What vLLM's import itself may leave open.
NO_MATTER = {"/dev/null", "/dev/urandom"}


class Fork(Child):
    """The program above, forked."""

    def __init__(self, folder: Path, name: str, **environment: str) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        super().__init__(program, folder / f"{name}.log", "argument", environment={**VARIABLES, **environment})

    def _start(self, start: Start) -> ChildProcess:
        zygote = EngineProcess.zygote
        assert zygote is not None
        assert zygote.suits(start.environment)
        return zygote.fork(start)

    def facts(self, *names: str) -> dict[str, Any]:
        return dict(self.ask("facts", names=names))


def test_a_fork_has_its_own_environment_arguments_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Fork(tmp_path, "a", PDKV_STATUS_DIR="here") as one, Fork(tmp_path, "b") as other:
        facts = one.facts("PDKV_STATUS_DIR", "OMP_NUM_THREADS")
        assert facts["variables"] == {"PDKV_STATUS_DIR": "here", "OMP_NUM_THREADS": "1"}
        assert other.facts("PDKV_STATUS_DIR")["variables"] == {"PDKV_STATUS_DIR": None}
        assert (facts["main"], facts["folder"]) == ("__main__", str(tmp_path))
        assert (facts["argv"][0], facts["argv"][2:]) == (str(tmp_path / "program.py"), ["argument"])
        assert (facts["pid"], facts["group"]) == (one.process.pid, os.getpgid(0))
        assert facts["interrupt"]


def test_a_fork_has_imported_vllm_and_neither_pdkvs_connectors_nor_nixl_and_has_one_thread(tmp_path: Path) -> None:
    with Fork(tmp_path, "a") as fork:
        facts = fork.facts()
        assert facts["ucx"] == []
        assert {name.split(".")[0] for name in facts["imported"]} == {"vllm"}
        assert facts["threads"] == 1


def test_a_fork_holds_nothing_of_the_others_open_so_that_each_ends_with_its_own_input(tmp_path: Path) -> None:
    with Fork(tmp_path, "a") as first, Fork(tmp_path, "b") as second:
        of_first, of_second = set(first.facts()["open"]), set(second.facts()["open"])
        assert str(tmp_path / "a.log") in of_first
        assert of_first & of_second <= NO_MATTER
        told = [os.readlink(f"/proc/self/fd/{fork.process._status_fd}") for fork in (first, second)]
        assert not {*told, "anon_inode:[pidfd]", "anon_inode:[eventpoll]"} & (of_first | of_second)
        first.end()
        assert first.wait() == 0
        assert second.is_alive()


@pytest.mark.parametrize("code", [0, 3])
def test_a_forks_exit_status_is_the_programs_and_what_was_registered_for_its_exit_runs(
    tmp_path: Path, code: int
) -> None:
    with Fork(tmp_path, "a") as fork:
        with pytest.raises(ChildEnded, match=rf"exit status {code}; log:\nbefore the end\nat exit"):
            fork.ask("exit", code=code)
        assert (fork.process.poll(), fork.is_alive()) == (code, False)


def test_what_a_program_raises_is_in_its_log_and_its_exit_status_is_1(tmp_path: Path) -> None:
    with Fork(tmp_path, "a") as fork, pytest.raises(ChildEnded, match=r"exit status 1; log:\n[\s\S]*out of serve"):
        fork.ask("raise")


def test_a_killed_or_stopped_fork_is_known_by_its_signal_and_others_go_on(tmp_path: Path) -> None:
    with Fork(tmp_path, "a") as killed, Fork(tmp_path, "b") as other:
        killed.facts()
        with stopped(other.process.pid):
            killed.process.kill()
            assert killed.process.wait(10) == -signal.SIGKILL
            with pytest.raises(subprocess.TimeoutExpired):
                other.process.wait(0.2)
        other.facts()
        killed.process.kill()  # sends nothing: the id may be another process's by now


def test_only_variables_that_are_read_late_may_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zygote = Zygote(tmp_path / "log", VARIABLES)
    usual = {**os.environ, **VARIABLES}
    assert zygote.suits({**usual, "PDKV_SLEEP": "1", "UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})
    for other in ("OMP_NUM_THREADS", "VLLM_PLUGINS", "PYTHONPATH", "PDKV_ENGINE_MEMORY"):
        assert not zygote.suits({**usual, other: "another"}), other
    assert not zygote.suits({name: value for name, value in usual.items() if name != "PATH"})
    with zygote:
        pass  # it has started nothing


def test_a_zygote_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "torch.py").write_text("raise ZeroDivisionError")
    variables = {**VARIABLES, "PYTHONPATH": str(tmp_path)}
    with Zygote(tmp_path / "log", variables) as zygote, open(os.devnull) as null:
        start = Start(tmp_path / "program.py", (), dict(os.environ), *(null.fileno(),) * 3)
        with pytest.raises(RuntimeError, match=r"the zygote has ended; its log:\nTraceback[\s\S]*ZeroDivisionError"):
            zygote.fork(start)
        with pytest.raises(RuntimeError, match="the zygote has ended"):
            zygote.fork(start)
