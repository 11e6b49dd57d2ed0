"""The line that matters in the log of a dead engine."""

from __future__ import annotations

import pytest

from pdkv.launch.diagnosis import clean, last_line, read_tail, root_cause

pytestmark = pytest.mark.cpu

WRAPPER = (
    "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore_DP0 pid=123) ERROR 11-29 22:00:00 [core.py:100] text",
        "\x1b[0;36m(APIServer pid=3)\x1b[0;0m INFO 11-29 22:00:00.123 [a.py:1] text",
        "(Worker pid=9) text",
        "WARNING 11-29 22:00:00 [x.py:2] text",
        "text",
    ],
)
def test_process_and_time_are_cut_off(line):
    assert clean(line) == "text"


def test_pdkvs_own_exception_wins_over_what_others_made_of_it():
    lines = ["(W pid=1) pdkv.errors.SeamError: gone", "(E pid=2) RuntimeError: worker 0 failed", WRAPPER]
    assert root_cause(lines) == "pdkv.errors.SeamError: gone"


def test_the_last_exception_that_is_no_wrapper_is_the_cause():
    lines = [
        "(W pid=1) KeyError: 'a'",
        "(E pid=2) ValueError: no weights",
        "Exception: WorkerProc initialization failed",
        WRAPPER,
    ]
    assert root_cause(lines) == "ValueError: no weights"


def test_a_wrapper_is_better_than_nothing():
    assert root_cause([WRAPPER]) == clean(WRAPPER)


def test_an_exceptions_message_over_several_lines_is_joined():
    lines = ["pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
             "  Value error, unknown dtype [type=value_error]",
             "    For further information visit https://errors.pydantic.dev"]  # fmt: skip
    assert root_cause(lines) == f"{lines[0]} Value error, unknown dtype [type=value_error]"


@pytest.mark.parametrize(
    "line",
    [
        "api_server.py: error: unrecognized arguments: --bogus",
        "/usr/bin/python: No module named vllm",
        "error: the decode engine at http://x did not answer",
    ],
)
def test_an_error_of_the_command_line_is_a_cause(line):
    assert root_cause(["usage: x", line]) == line


def test_a_log_without_an_exception_has_no_cause():
    assert root_cause(["INFO 11-29 22:00:00 [a.py:1] fd limit errors like `OSError: [Errno 24]`. See ulimit"]) is None


def test_the_tail_of_a_long_log_starts_at_a_whole_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert read_tail(log, 20) == ["line 98", "line 99"]


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path):
    assert read_tail(tmp_path / "log") == []
    assert last_line(tmp_path / "log") == ""


def test_the_last_line_is_the_last_with_text(tmp_path):
    (tmp_path / "log").write_text("a\n(W pid=1) b\n\n")
    assert last_line(tmp_path / "log") == "b"
