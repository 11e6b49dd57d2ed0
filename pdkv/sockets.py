"""TCP sockets that programs listen on, and one sentence for each way in which that fails."""

from __future__ import annotations

import errno
import socket


def describe_bind_failure(error: OSError, host: str, port: int, option: str = "--port") -> str:
    """One sentence for a failed bind, with what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; end what listens there, or give {option} another (0 picks a free one)."
        )
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges; give {option} one above 1023."
    return f"cannot listen on {host}:{port} ({error.strerror or error}); give --host an address of this machine."


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host`:`port`, without listening. The caller closes it.

    Raises:
        OSError: the host has no such address, or the port is taken; :func:`describe_bind_failure` words it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # a label of a host name that is empty or longer than 63 letters
        raise socket.gaierror(socket.EAI_NONAME, "no host name") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
