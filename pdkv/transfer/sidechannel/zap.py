"""Decides whose connection is let in: ZeroMQ's authentication protocol (ZAP, RFC 27) for CURVE keys."""

from __future__ import annotations

from collections.abc import Callable

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"pdkv"


class Doorkeeper:
    """Answers libzmq's question for each new connection of one context. Driven by the thread that polls `socket`.

    Args:
        is_allowed: whether a public key of 32 bytes is on the allow-list.
        refused: told of each key that was not, and of the address that it came from.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        is_allowed: Callable[[bytes], bool],
        refused: Callable[[bytes, str], None],
    ) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)
        self._is_allowed = is_allowed
        self._refused = refused

    def answer(self) -> None:
        """Answer one question, if there is one. A key that is let in becomes the connection's ``User-Id``, in hex."""
        try:
            version, request_id, _domain, address, _identity, mechanism, *credentials = self.socket.recv_multipart(
                zmq.NOBLOCK
            )
        except zmq.Again:
            return
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if self._is_allowed(key):
            status, text, user = b"200", b"OK", key.hex().encode()
        else:
            status, text, user = b"400", b"this key is not on the allow-list", b""
            self._refused(key, address.decode(errors="replace"))
        self.socket.send_multipart([version, request_id, status, text, user, b""], zmq.NOBLOCK)
