"""A forked child has its parent's side channel, whose sockets and thread stay with the parent."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import pytest
from sidechannel_net import connecting_to, done, exchange, meet

from pdkv.errors import StateError
from pdkv.transfer.sidechannel import SideChannel

pytestmark = pytest.mark.cpu

REFUSED, TAKEN = 0, 1
DEADLINE_S = 60  # on a machine that has no time for it


def in_child(use: Callable[[], object]) -> int:
    """How a fork of this process ends that uses the channel: REFUSED, TAKEN, or by SIGALRM where it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        pid = os.fork()
    if not pid:
        signal.alarm(DEADLINE_S)
        how = TAKEN
        try:
            use()
        except StateError as error:
            how = REFUSED if "make one after the fork" in str(error) else TAKEN
        finally:
            os._exit(how)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_refused_at_once_and_takes_nothing_from_its_parent() -> None:
    with SideChannel("P/1") as prefill, SideChannel("D/1", connecting_to(prefill.address)) as decode:
        meet(prefill, decode)
        for use in (lambda: decode.send(done("D/1", "P/1", 1)), decode.receive, lambda: decode.wait(0.0)):
            assert in_child(use) == REFUSED
        exchange(prefill, decode, 2)


def test_a_forked_child_that_closes_its_parents_channel_is_not_noticed_there() -> None:
    with SideChannel("P/1") as prefill, SideChannel("D/1", connecting_to(prefill.address)) as decode:
        meet(prefill, decode)
        assert in_child(decode.close) == TAKEN
        assert not decode.wait(0.0)
        exchange(prefill, decode, 2)


def test_a_forked_child_closes_it_whoever_was_about_to_use_it_as_the_process_forked() -> None:
    with SideChannel("P/1") as channel, channel._inbox.signal._lock, channel._outgoing.signal._lock:
        assert in_child(channel.close) == TAKEN
