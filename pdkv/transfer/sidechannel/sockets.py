"""ZeroMQ sockets with every limit set. None of them waits, and each belongs to one thread."""

from __future__ import annotations

import zmq
import zmq.utils.monitor

from pdkv.transfer.messages import MAX_MESSAGE_NBYTES
from pdkv.transfer.sidechannel.keyfiles import KeyPair, as_z85
from pdkv.transfer.sidechannel.settings import Limits
from pdkv.transfer.sidechannel.zap import DOMAIN

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

LINGER_MS = 200  # for the last messages, when a channel is closed
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000
KEEPALIVE_PROBES = 3
WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def bound_socket(context: Context, limits: Limits, keys: KeyPair | None, *, ipv6: bool) -> Socket:
    """A ROUTER that tells when a peer cannot be reached. The caller binds it."""
    socket = _socket(context, zmq.ROUTER, limits, ipv6=ipv6)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, as_z85(keys.secret))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, as_z85(keys.public))
    return socket


def connecting_socket(
    context: Context, limits: Limits, keys: KeyPair | None, server_key: bytes | None, *, ipv6: bool
) -> Socket:
    """A DEALER to one peer. What is sent while there is no connection is refused, not kept for later."""
    socket = _socket(context, zmq.DEALER, limits, ipv6=ipv6)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if keys is not None and server_key is not None:
        socket.setsockopt(zmq.CURVE_SECRETKEY, as_z85(keys.secret))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, as_z85(keys.public))
        socket.setsockopt(zmq.CURVE_SERVERKEY, as_z85(server_key))
    return socket


def monitor_of(socket: Socket) -> Socket:
    """A socket on which the events of `WATCHED` arrive."""
    monitor: Socket = socket.get_monitor_socket(WATCHED)
    monitor.linger = 0
    return monitor


def has_input(socket: Socket) -> bool:
    """Whether there is something to receive."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def next_event(monitor: Socket) -> int | None:
    """The next event, without waiting."""
    try:
        message = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return int(zmq.utils.monitor.parse_monitor_message(message)["event"])


def _socket(context: Context, kind: int, limits: Limits, *, ipv6: bool) -> Socket:
    socket = context.socket(kind)
    options = {
        zmq.IPV6: int(ipv6),
        zmq.LINGER: LINGER_MS,
        zmq.SNDHWM: limits.peer_messages,
        zmq.RCVHWM: limits.peer_messages,
        zmq.MAXMSGSIZE: MAX_MESSAGE_NBYTES,
        zmq.SNDTIMEO: 0,
        zmq.RCVTIMEO: 0,
        zmq.HANDSHAKE_IVL: round(1000 * limits.handshake_s),
        # The kernel's, and not ZeroMQ's heartbeats: after a peer that has filled the queue and left, the next of these
        # ends the process (libzmq 4.3.5, assertion `!_io_error` in stream_engine_base.cpp).
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: limits.keepalive_s,
        zmq.TCP_KEEPALIVE_INTVL: limits.keepalive_s,
        zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
        zmq.TCP_MAXRT: 1000 * KEEPALIVE_PROBES * limits.keepalive_s,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket
