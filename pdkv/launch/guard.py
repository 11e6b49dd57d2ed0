"""A small process between the launcher and an engine that makes sure nothing of the engine outlives the launcher.

Run by path (``python -P guard.py --parent PID --grace SECONDS -- ARGV...``), of the standard library only, so that it
starts in tens of milliseconds and needs no import path.

What ends an engine must reach its grandchildren: vLLM's API server starts an EngineCore, which starts workers. A killed
launcher cannot tell anyone, and ``PR_SET_PDEATHSIG`` alone reaches the direct child only and fires when the *thread*
that started it ends. So the guard

- watches the launcher through a pidfd, which becomes readable when the whole process has ended, however it ended;
- is the *child subreaper* of everything below it, so that every orphan becomes its child and can be found and ended;
- passes SIGTERM and SIGINT on as one SIGTERM to the engine's first process, which ends its own in order, waits for
  `grace`, then kills all that is left;
- gives the engine ``PR_SET_PDEATHSIG`` in turn, for the case that the guard itself is killed.

Exit code: the engine's own; 128 + n where signal n ended it; 127 where it could not be started.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 10.0
# What lives on after the engine's first process. Python's resource tracker needs a moment to remove shared memory.
STRAGGLER_GRACE_S = 3.0
_POLL_S = 0.05


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def parents() -> dict[int, int]:
    """Parent of every process that is no zombie, from ``/proc/*/stat``."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # the command's name may hold spaces and brackets
        except OSError:
            continue  # it ended while we looked
        if fields[0] != "Z":
            found[int(name)] = int(fields[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, found again at every call."""
    tree = parents()
    below = {root}
    while grown := {pid for pid, parent in tree.items() if parent in below} - below:
        below |= grown
    return sorted(below - {root})


def reap() -> None:
    """Collect every child that has ended, adopted ones too."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def wait_until_none_left(timeout_s: float, signum: int) -> bool:
    """Signal all that is below, again and again as more appears, until nothing is left or the time is over."""
    deadline = time.monotonic() + timeout_s
    signalled: set[int] = set()
    while True:
        reap()
        alive = set(descendants(os.getpid()))
        if not alive:
            return True
        if time.monotonic() >= deadline:
            return False
        for pid in alive - signalled:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        signalled |= alive
        time.sleep(_POLL_S)


def say(text: str) -> None:
    print(f"[pdkv.launch.guard] {text}", file=sys.stderr, flush=True)


def start_engine(argv: list[str]) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:  # the guard died before the line above took effect
            os._exit(128 + signal.SIGTERM)

    return subprocess.Popen(argv, preexec_fn=in_child)


def wait_for_end(engine: subprocess.Popen[bytes], parent_fd: int, wakeup_fd: int, grace_s: float) -> None:
    """Until the engine's first process has ended, or had to be given up after a request to end."""
    engine_fd = os.pidfd_open(engine.pid)
    watched = [engine_fd, parent_fd, wakeup_fd]
    deadline: float | None = None
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(watched, [], [], timeout)[0]
        if engine_fd in ready:
            return
        if not ready:
            say(f"the engine did not end within {grace_s:g} s of SIGTERM; killing it")
            return
        if parent_fd in ready:
            say("the launcher is gone; ending the engine")
            watched.remove(parent_fd)
        if wakeup_fd in ready:
            os.read(wakeup_fd, 64)
        if deadline is None:
            deadline = time.monotonic() + grace_s
            engine.send_signal(signal.SIGTERM)


def main(arguments: list[str]) -> int:
    options, argv = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parent, grace_s = int(options[1]), float(options[3])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup_fd, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_write)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 128 + signal.SIGTERM
    if os.getppid() != parent:  # the launcher died, and the pid may be another's by now
        return 128 + signal.SIGTERM
    try:
        engine = start_engine(argv)
    except OSError as error:
        say(f"cannot start {argv[0]}: {error.strerror}")
        return 127
    wait_for_end(engine, parent_fd, wakeup_fd, grace_s)
    code = engine.poll()
    ended = code is not None and wait_until_none_left(STRAGGLER_GRACE_S, signal.SIGTERM)
    if not ended and not wait_until_none_left(KILL_TIMEOUT_S, signal.SIGKILL):
        say(f"still alive after SIGKILL: {descendants(os.getpid())}")
    if code is None:
        return 128 + signal.SIGKILL
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
