"""A forked child has its parent's transports, and must not use up what they share: sockets, peers, memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pdkv.errors import StateError
from pdkv.testing.transports.side import TransportSide
from pdkv_connectors.ipc import IpcTransport

pytestmark = pytest.mark.cpu


def said_in_child(work: Callable[[], object], answer: Path) -> str:
    """The StateError that `work` raises in a fork of this process; "" where that ends otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        pid = os.fork()
    if not pid:
        try:
            work()
        except StateError as error:
            answer.write_text(str(error))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child was killed"
    return answer.read_text() if answer.exists() else ""


def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    p, d = (TransportSide(lambda: IpcTransport(drop_timeout_s=1.0)) for _ in range(2))
    for name, side in (("P", p), ("D", d)):
        side.do_open()
        side.do_build(8192)
        side.do_register(name, 1)
    d.do_connect("P", 1, p.do_describe())
    started = d.do_post("P", 1, [[0, 7, 8]], reads=True)
    post = partial(d.do_post, "P", 1, [[0, 1, 2]], reads=True)
    works: dict[str, Callable[[], object]] = {
        "poll": partial(d.do_poll, started),
        "read": post,
        "offer": partial(p.transport.offer, [1]),
        "withdraw": partial(p.transport.withdraw, [1]),
        "progress": p.transport.progress,
        "disconnect": partial(d.do_disconnect, "P"),
        "unregister": p.do_unregister,
        "close": p.do_close,
    }
    for name, work in works.items():
        said = said_in_child(work, tmp_path / name)
        assert said == f"this ipc transport belongs to process {os.getpid()}; make one after the fork.", name
    assert d.do_wait(started, 30.0) == "done"
    assert d.do_wait(post(), 30.0) == "done"
    closed = p.transport
    for side in (d, p):
        side.do_finish()
    assert said_in_child(closed.close, tmp_path / "closed") == "", "one that was closed before may be closed again"
