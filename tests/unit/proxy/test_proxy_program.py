"""``python -m pdkv.proxy`` as a program: its options, its errors, its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest
from fake_pd_engines import DEADLINE_S, engine, prefill_engine, running

from pdkv.errors import ConfigError
from pdkv.proxy.__main__ import main, parse

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ("127.0.0.1:8100", "http://b:2", "--prefill-url '127.0.0.1:8100' is no base URL"),
        ("http://a:1", "http://b:2/v1", "--decode-url 'http://b:2/v1' is no base URL"),
        ("http://a:x", "http://b:2", "--prefill-url 'http://a:x' is no base URL"),
        ("http://a:1", "http://a:1/", "are both http://a:1"),
    ],
)
def test_a_url_that_cannot_work_is_refused(prefill, decode, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--prefill-url", prefill, "--decode-url", decode])


@pytest.mark.parametrize("option", [["--port", "70000"], ["--ready-timeout", "0"], ["--request-timeout", "-1"],
                                    ["--max-body", "0"], ["--bogus"]])  # fmt: skip
def test_an_option_that_cannot_work_is_refused(option):
    with pytest.raises(ConfigError):
        parse(["--prefill-url", "http://a:1", "--decode-url", "http://b:2", *option])


def test_a_port_in_use_is_one_sentence_and_exit_code_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["--prefill-url", "http://a:1", "--decode-url", "http://b:2", "--port", str(port)])
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_running_proxy(signum, code):
    prefill, decode = prefill_engine(), engine({})
    with running(prefill, decode):
        arguments = ["--prefill-url", prefill.url, "--decode-url", decode.url, "--port", "0"]
        process = subprocess.Popen([sys.executable, "-m", "pdkv.proxy", *arguments], stderr=subprocess.PIPE, text=True)
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        assert process.stderr is not None
        assert "listens on 127.0.0.1:" in process.stderr.readline()
        process.send_signal(signum)
        process.communicate()
        watchdog.cancel()
    assert process.returncode == code


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_proxy_that_waits_for_its_engines(signum, code):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pdkv.proxy", "--prefill-url", url, "--decode-url", "http://127.0.0.1:1",
             "--port", "0"], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        assert process.stderr is not None
        assert f"waiting for the prefill engine at {url}" in process.stderr.readline()
        process.send_signal(signum)
        process.communicate()
        watchdog.cancel()
    assert process.returncode == code


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--ready-timeout", "nan", "ready_timeout_s is nan; it must be a number above 0"),
        ("--request-timeout", "inf", "request_timeout_s is inf; it must be a number above 0"),
        ("--prefill-url", "http://...:1", "--prefill-url 'http://...:1' is no base URL"),
        ("--host", "...", "cannot listen on ...:0"),
    ],
)
def test_a_value_that_would_never_end_or_resolve_exits_2_with_one_sentence(capsys, option, value, message):
    given = {"--prefill-url": "http://127.0.0.1:1", "--decode-url": "http://127.0.0.1:2", "--port": "0", option: value}
    assert main([text for pair in given.items() for text in pair]) == 2
    assert message in capsys.readouterr().err
