"""Clients that send slowly on purpose: each holds a connection for a bounded time."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from fake_pd_engines import DEADLINE_S, FakeEngine, engine, prefill_engine, running

pytestmark = pytest.mark.cpu

ANSWER = {"id": "cmpl-1", "choices": [{"text": " Paris"}]}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=DEADLINE_S)


def read_all(client: socket.socket) -> bytes:
    """Until the other side closes; a time-out where it does not."""
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow:"])
def test_a_header_that_is_not_complete_in_time_ends_the_connection(sent: bytes):
    with running(prefill_engine(), engine(ANSWER), header_timeout_s=0.2) as url, connect(url) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == 408


def test_a_client_that_sends_one_byte_after_another_does_not_prolong_its_time():
    with running(prefill_engine(), engine(ANSWER), header_timeout_s=0.3) as url, connect(url) as client:
        client.settimeout(0.01)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        received = b""
        for _ in range(int(DEADLINE_S / 0.01)):
            try:
                received = client.recv(65536)
                break
            except TimeoutError:
                client.sendall(b"x")
        assert received.startswith(b"HTTP/1.1 408 ")


def test_half_a_header_after_an_answered_request_ends_the_connection_too():
    with running(prefill_engine(), engine(ANSWER), header_timeout_s=0.2) as url, connect(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /hea")
        assert b"HTTP/1.1 408 " in read_all(client)


def test_an_answer_that_takes_longer_than_a_header_may_is_not_cut():
    async def slow(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response(ANSWER)

    with running(prefill_engine(), FakeEngine(slow), header_timeout_s=0.1) as url, connect(url) as client:
        body = json.dumps({"prompt": "a"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        received = read_all(client)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(json.dumps(ANSWER).encode())


def test_two_requests_on_one_connection_are_both_answered():
    with running(prefill_engine(), engine(ANSWER), header_timeout_s=0.3) as url, connect(url) as client:
        request = b"GET /health HTTP/1.1\r\nHost: a\r\n"
        client.sendall(request + b"\r\n" + request + b"Connection: close\r\n\r\n")
        assert read_all(client).count(b"HTTP/1.1 200 ") == 2
