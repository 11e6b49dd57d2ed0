"""The parent's half of `gpu_peer_main`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdkv.testing.child import Child

HERE = Path(__file__).parent
ACCEPT_TIMEOUT_S = 30.0
#: What UCX and NIXL can name as the way that bytes take, most telling first.
TRANSPORTS = ("software emulation", "cuda_ipc", "cuda_copy", "rc_", "tcp", "cma", "posix", "sysv")


class GpuPeer(Child):
    """One process called `name` with a CUDA driver; UCX says in its log which transports it chose."""

    def __init__(self, name: str, folder: Path, **variables: str) -> None:
        paths = [str(HERE.parents[1]), str(HERE.parent / "integration"), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "UCX_PROTO_INFO": "used", **variables}
        super().__init__(HERE / "gpu_peer_main.py", folder / f"{name}.log", name, environment=environment)
        self.name = name

    def transports(self) -> list[str]:
        """Which transports its log names."""
        log = self.log.read_text(errors="replace")
        return [transport for transport in TRANSPORTS if transport in log]


@contextmanager
def serving(path: Path, fds: list[int], sizes: list[int]) -> Iterator[None]:
    """Send the descriptors and the sizes behind them to the first process that connects to `path`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(ACCEPT_TIMEOUT_S)

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [" ".join(map(str, sizes)).encode()], fds)

        thread = threading.Thread(target=send)
        thread.start()
        yield
        thread.join(ACCEPT_TIMEOUT_S)
