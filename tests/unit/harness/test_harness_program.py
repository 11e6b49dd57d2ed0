"""How the harness's programs end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pdkv.errors import ConfigError, HarnessError
from pdkv.harness.program import run_program

pytestmark = pytest.mark.cpu

WAITING = """
import sys, threading
from pdkv.harness.program import run_program

def run():
    try:
        print("waiting", flush=True)
        threading.Event().wait(60)
    finally:
        print("let go", flush=True)

sys.exit(run_program(run))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_go_of_what_was_started_and_shows_in_the_exit_code(signum: signal.Signals) -> None:
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's job may ignore it
    with subprocess.Popen(
        [sys.executable, "-c", default + WAITING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signum)
        assert program.communicate(timeout=60)[0] == "let go\n"
    assert program.returncode == 128 + signum


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no such file"), 2), (HarnessError("no answer"), 3)])
def test_an_error_is_one_sentence_and_a_code_of_its_kind(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> dict[str, bool]:
        raise error

    assert run_program(run) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_report_that_has_not_passed_is_a_failure() -> None:
    assert [run_program(lambda passed=passed: {"passed": passed}) for passed in (True, False)] == [0, 1]
