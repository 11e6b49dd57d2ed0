"""Sessions in real time: engines that take no steps, and threads that keep their sessions going."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from session_pair import contents, fill, make_cache, make_session, run

import pdkv
from pdkv.errors import ConnectorError
from pdkv.transfer import session_thread
from pdkv.transfer.actions import FreeBlocks, Loaded
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.inproc_carrier import InprocNetwork
from pdkv.transfer.session import Session
from pdkv.transfer.session_thread import FD_SETSIZE, SessionThread, Turn
from pdkv.transfer.signals import Signal
from pdkv.transfer.transport import LONGEST_PAUSE_S

pytestmark = pytest.mark.cpu

DEADLINE_S = 30.0


class Idle:
    """An engine that sleeps until its session has something for it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._event = threading.Event()
        session.start(self._event.set)

    def wait_for(self, wanted: object) -> None:
        seen: list[object] = []
        while wanted not in seen:
            assert self._event.wait(DEADLINE_S), f"{wanted} has not come, only {seen}"
            self._event.clear()
            seen += self.session.poll()


@pytest.fixture
def caches() -> Iterator[tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache]]:
    made = make_cache(40), make_cache(40)
    yield made
    for cache in made:
        cache.close()


def test_two_idle_engines_exchange_requests_by_their_threads_alone(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache],
) -> None:
    network = InprocNetwork()
    prefill = Idle(make_session(network, "P", "prefill", caches[0]))
    decode = Idle(make_session(network, "D", "decode", caches[1]))
    for index in range(20):
        fill(caches[0], [1, 2], seed=index)
        reference = prefill.session.offer(f"r{index}", run(1, 2), 32)
        decode.session.arrived(f"r{index}", reference, 32)
        decode.session.allocated(f"r{index}", run(4, 3))
        decode.wait_for(Loaded(f"r{index}"))
        assert torch.equal(contents(caches[1], [4, 3]), contents(caches[0], [1, 2]))
        prefill.wait_for(FreeBlocks(f"r{index}", (1, 2)))
    prefill.session.close()
    decode.session.close()


def test_calls_and_polls_of_many_threads_lose_no_request(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache],
) -> None:
    network = InprocNetwork()
    prefill = make_session(network, "P", "prefill", caches[0])
    decode = Idle(make_session(network, "D", "decode", caches[1]))
    prefill.start()

    def ask(first: int) -> None:
        for index in range(first, first + 8):
            reference = prefill.offer(f"r{index}", run(index + 1), 16)
            decode.session.arrived(f"r{index}", reference, 16)
            decode.session.allocated(f"r{index}", run(index + 1))

    threads = [threading.Thread(target=ask, args=(8 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    seen: set[str] = set()
    while len(seen) < 32:
        assert decode._event.wait(DEADLINE_S), f"only {sorted(seen)} have come"
        decode._event.clear()
        seen |= {event.request_id for event in decode.session.poll() if isinstance(event, Loaded)}
    for thread in threads:
        thread.join(DEADLINE_S)
    prefill.close()
    decode.session.close()


def test_an_idle_session_makes_turns_only_when_something_is_due(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_thread, "LONGEST_WAIT_S", 4 * DEADLINE_S)  # however long this takes
    session = make_session(InprocNetwork(), "P", "prefill", caches[0])
    session.start()
    thread = session._thread
    assert thread is not None
    for _ in range(50):
        session.metrics()
    assert thread.turns <= 2
    session.close()


def test_an_error_of_the_thread_reaches_the_engine(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(InprocNetwork(), "P", "prefill", caches[0])
    ended = threading.Event()

    def broken() -> None:
        ended.set()
        raise ZeroDivisionError

    monkeypatch.setattr(session.host, "progress", broken)
    session.start()
    assert ended.wait(DEADLINE_S)
    assert session._thread is not None
    session._thread._thread.join(DEADLINE_S)
    with pytest.raises(ConnectorError, match="ZeroDivisionError"):
        session.poll()
    session.close()


def test_a_session_whose_transfer_moves_in_polls_does_not_back_off(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache],
) -> None:
    network = InprocNetwork()
    prefill = make_session(network, "P", "prefill", caches[0])
    slow = make_session(network, "D", "decode", caches[1], make_transport=lambda: InprocTransport(copies_per_poll=1))
    slow.arrived("r", prefill.offer("r", run(1, 3, 5), 48), 48)
    slow.allocated("r", run(2, 4, 6))
    turns = []
    while not slow._events:
        assert len(turns) < 100
        prefill.poll()
        turns.append(slow._turn())
    copying = [turn.worked for turn in turns if turn.polls]
    assert len(copying) > 3
    assert all(copying)
    prefill.close()
    slow.close()


NOTHING = Turn(worked=False, polls=False, serves=False, due_in_s=None)


def test_messages_are_worked_on_by_the_thread_that_brings_them_unless_another_one_works() -> None:
    message = Signal()
    thread = SessionThread(lambda: NOTHING, message.fileno())
    assert thread.instead(lambda: NOTHING)
    assert not thread.instead(lambda: None)
    thread.close(DEADLINE_S)
    assert not thread.instead(lambda: NOTHING)
    message.close()


def test_what_a_turn_of_another_thread_has_set_off_is_looked_at_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_thread, "LONGEST_WAIT_S", 4 * DEADLINE_S)
    begun = threading.Event()
    message = Signal()

    def look() -> Turn:
        begun.set()
        return NOTHING

    thread = SessionThread(look, message.fileno())
    deadline = time.monotonic() + DEADLINE_S
    while math.isinf(thread._wakes_at):  # it has not begun to wait
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    begun.clear()
    assert thread.instead(lambda: Turn(worked=True, polls=True, serves=False, due_in_s=None))
    assert begun.wait(DEADLINE_S)
    thread.close(DEADLINE_S)
    message.close()


def test_an_error_of_a_turn_that_another_thread_made_ends_the_thread_and_reaches_the_engine() -> None:
    def broken() -> Turn:
        raise ZeroDivisionError

    message = Signal()
    thread = SessionThread(lambda: NOTHING, message.fileno())
    assert not thread.instead(broken)
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()
    with pytest.raises(ConnectorError, match="ZeroDivisionError"):
        thread.require_running()
    thread.close(DEADLINE_S)
    message.close()


def test_a_session_that_is_busy_leaves_messages_to_its_own_thread(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache],
) -> None:
    session = make_session(InprocNetwork(), "P", "prefill", caches[0])
    found = []
    with session._lock:
        other = threading.Thread(target=lambda: found.append(session._turn_unless_busy()))
        other.start()
        other.join(DEADLINE_S)
    assert found == [None]
    assert session._turn_unless_busy() is not None
    session.close()
    assert session._turn_unless_busy() is None


def test_what_the_thread_has_found_is_returned_without_more_work(
    caches: tuple[pdkv.GrowableKVCache, pdkv.GrowableKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(InprocNetwork(), "P", "prefill", caches[0])
    session.start()
    worked: list[bool] = []
    with session._lock:
        monkeypatch.setattr(session.host, "progress", lambda: worked.append(True))
        session._events.append(Loaded("r"))
        assert session.poll() == (Loaded("r"),)
        assert not worked
        assert session.poll() == ()
        assert worked
    session.close()


def test_transfers_are_looked_at_soon_again_after_news_and_then_less_and_less_often() -> None:
    pauses: list[float] = []
    enough = threading.Event()
    message = Signal()

    class Recording(SessionThread):
        def _wait(self, wait_s: float) -> None:
            pauses.append(wait_s)
            if len(pauses) >= 40:
                enough.set()
            super()._wait(wait_s)

    running = Turn(worked=False, polls=True, serves=False, due_in_s=None)
    thread = Recording(lambda: running, message.fileno())
    assert enough.wait(DEADLINE_S)
    before_news = pauses[:]
    thread.wake(Turn(worked=True, polls=True, serves=False, due_in_s=None))
    deadline = time.monotonic() + DEADLINE_S
    while min(pauses[len(before_news) :], default=math.inf) >= 30e-6:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    thread.close(DEADLINE_S)
    message.close()
    assert before_news[0] < 30e-6
    assert all(later <= 1.3 * sooner for sooner, later in pairwise(before_news))
    assert before_news[-1] == LONGEST_PAUSE_S


def test_news_counts_also_where_the_thread_is_about_to_look_by_itself() -> None:
    pauses: list[float] = []
    enough = threading.Event()
    message = Signal()
    running = Turn(worked=False, polls=True, serves=False, due_in_s=None)
    news = Turn(worked=True, polls=True, serves=False, due_in_s=None)

    class Recording(SessionThread):
        def _wait(self, wait_s: float) -> None:
            pauses.append(wait_s)
            if len(pauses) == 40:
                self._wakes_at = time.monotonic()  # its pause is over, and the system has yet to let it go on
                teller = threading.Thread(target=self.wake, args=(news,))
                teller.start()
                teller.join(DEADLINE_S)
            elif len(pauses) > 41:
                enough.set()
                super()._wait(wait_s)

    thread = Recording(lambda: running, message.fileno())
    assert enough.wait(DEADLINE_S)
    thread.close(DEADLINE_S)
    message.close()
    assert pauses[39] == LONGEST_PAUSE_S
    assert pauses[40] < 30e-6


def test_a_wake_after_the_end_leaves_the_file_alone_that_has_the_descriptor_now() -> None:
    message = Signal()
    thread = SessionThread(lambda: NOTHING, message.fileno())
    before = set(os.listdir("/proc/self/fd"))
    thread.close(DEADLINE_S)
    freed = {int(name) for name in before} - {int(name) for name in os.listdir("/proc/self/fd")}
    others = [Signal() for _ in range(8)]
    assert freed <= {other.fileno() for other in others}, "the lowest free numbers are taken"

    thread.wake(NOTHING)

    assert freed
    assert not any(other.wait(0) for other in others)
    for signal in (message, *others):
        signal.close()


def test_a_thread_that_had_not_ended_in_time_is_ended_by_a_second_close_and_leaves_no_descriptor() -> None:
    message, entered, let_go = Signal(), threading.Event(), threading.Event()

    def turn() -> Turn:
        entered.set()
        assert let_go.wait(DEADLINE_S)
        return NOTHING

    descriptors = len(os.listdir("/proc/self/fd"))
    thread = SessionThread(turn, message.fileno())
    assert entered.wait(DEADLINE_S)
    with pytest.raises(ConnectorError, match="has not ended"):
        thread.close(0.01)
    let_go.set()
    thread.close(DEADLINE_S)

    assert len(os.listdir("/proc/self/fd")) == descriptors
    message.close()


def test_descriptors_beyond_those_of_select_wake_it_too() -> None:
    """A busy server has thousands of files open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, FD_SETSIZE + 64), most))
    message, turns = Signal(), threading.Semaphore(0)
    high = fcntl.fcntl(message.fileno(), fcntl.F_DUPFD_CLOEXEC, FD_SETSIZE)

    def turn() -> Turn:
        message.clear()
        turns.release()
        return NOTHING

    thread = SessionThread(turn, high)
    try:
        assert turns.acquire(timeout=DEADLINE_S)
        message.set()
        assert turns.acquire(timeout=DEADLINE_S)
        thread.require_running()
    finally:
        thread.close(DEADLINE_S)
        os.close(high)
        message.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
