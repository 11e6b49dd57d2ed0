"""A process that has imported vLLM and nothing of pdkv, and forks one child for each request: see `zygote.Zygote`.

Importing takes longer than all else that an engine does to start, so it is done once. What was imported must be as if
just imported: before each fork this process has a single thread, so that no lock is held and no pool is missing in the
child, and it never runs anything of vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any

MOST_BYTES = 1 << 17
#: Descriptors of a request: standard input, standard output and error, replies, status.
NUM_FDS = 4


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; this process ends when nobody can ask it any more
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        import vllm.entrypoints.llm
        import vllm.v1.worker.cpu_worker  # noqa: F401

        gc.collect()
        gc.freeze()  # a collection in a child would copy all pages of what was imported
        Forks(requests).run()


class Forks:
    """Forks for requests, and tells of each child when and how it ended."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.selector = selectors.DefaultSelector()
        self.selector.register(requests, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the other end of the socket is closed. Children go on: they end with their own input."""
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    self.ended(key.fd, *key.data)
                elif not self.forked():
                    return

    def forked(self) -> bool:
        """Take one request; whether there was one."""
        data, fds, _, _ = socket.recv_fds(self.requests, MOST_BYTES, NUM_FDS)
        if not data:
            return False
        if len(os.listdir("/proc/self/task")) > 1:
            sys.exit("vLLM has started threads while it was imported: a fork of this process would not be a whole one")
        status = fds[-1]
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            try:
                os._exit(self.become(json.loads(data), fds))
            finally:  # whatever happens, a child must not go on as another zygote
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        for fd in fds[:-1]:
            os.close(fd)
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
        tell(status, pid)
        return True

    def ended(self, pidfd: int, pid: int, status: int) -> None:
        """Reap a child and tell how it ended."""
        self.selector.unregister(pidfd)
        os.close(pidfd)
        tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(status)

    def become(self, request: dict[str, Any], fds: list[int]) -> int:
        """Be the program that was asked for, in the child; its exit status."""
        siblings = [(key.fd, key.data[1]) for key in self.selector.get_map().values() if key.data is not None]
        self.selector.close()
        self.requests.close()
        input_fd, output_fd, reply_fd, status = fds
        os.dup2(input_fd, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        for fd in (input_fd, output_fd, status, *itertools.chain(*siblings)):
            os.close(fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        sys.argv = [request["program"], str(reply_fd), *request["arguments"]]
        return exit_status_of(request["program"])


def exit_status_of(program: str) -> int:
    """Run a program, and what it wants to be run at its exit.

    The interpreter is not taken down after that, which takes seconds for all that has been imported; `multiprocessing`
    ends its children in this way too.
    """
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def tell(status: int, number: int) -> None:
    """Say a number to whoever asked for a child, unless nobody listens any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{number}\n".encode())


if __name__ == "__main__":
    main()
