"""The transport conformance suite: right transports pass it, and each wrong one is caught by the rule it breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import wrong_fences  # noqa: F401 - it registers more of them, as the next does
import wrong_registrations  # noqa: F401
from wrong_transport import WRONG, Wrong, caught_by

from pdkv.errors import GeometryError, PdkvError, ProtocolError, StaleGenerationError, StateError, TransportError
from pdkv.kvcache import GrowableKVCache
from pdkv.memory import HostDriver
from pdkv.testing import TRANSPORT_CHECKS, BrokenRuleError, TransportBench, check_transport, run_transport_check
from pdkv.testing.transports import fencing
from pdkv.testing.transports.bench import SCATTERED
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transfer, TransferState

pytestmark = pytest.mark.cpu

RIGHT: dict[str, Callable[[], InprocTransport]] = {
    "at once": InprocTransport,
    "copy by copy": lambda: InprocTransport(copies_per_poll=1),
}


@pytest.fixture(scope="module", params=RIGHT.values(), ids=RIGHT)
def right(request: pytest.FixtureRequest) -> Iterator[TransportBench]:
    with TransportBench(request.param) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_inproc_keeps_to_the_rule(right: TransportBench, rule: str) -> None:
    run_transport_check(rule, right)


@caught_by("tells_what_it_is")
class HasNoName(Wrong):
    name = ""


@caught_by("tells_what_it_is")
class MovesInNoDirection(Wrong):
    can_read = can_write = False


@caught_by("tells_what_it_is")
class ForgetsItsPeersInItsState(Wrong):
    def describe_state(self) -> dict[str, Any]:
        return {**super().describe_state(), "peers": []}


class ChangesPairs(Wrong):
    """Moves something other than it was asked to."""

    def changed(self, pairs: Sequence[BlockPair]) -> Sequence[BlockPair]:
        return pairs

    def _do_post(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        return super()._do_post(connection, self.changed(pairs), reads=reads)


@caught_by("moves_exactly_the_named_blocks")
class LeavesTheLastPairOut(ChangesPairs):
    def changed(self, pairs: Sequence[BlockPair]) -> Sequence[BlockPair]:
        return pairs[:-1] or pairs


@caught_by("moves_exactly_the_named_blocks")
class MovesABlockTooMany(ChangesPairs):
    def changed(self, pairs: Sequence[BlockPair]) -> Sequence[BlockPair]:
        return [*pairs, BlockPair(0, 1, 38)]


@caught_by("moves_exactly_the_named_blocks")
class WritesWhereItShouldRead(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return super().write(peer, pairs)


@caught_by("moves_exactly_the_named_blocks")
class IsDoneBeforeItIs(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        transfer = super().read(peer, pairs)
        transfer.end(TransferState.DONE)  # type: ignore[attr-defined]
        return transfer


@caught_by("moves_layers_of_the_named_group_only")
class KnowsOneGroupOnly(Wrong):
    def register(self, cache: GrowableKVCache, engine: EngineRef, *, groups: Any = None) -> None:
        super().register(cache, engine)

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return super().read(peer, [BlockPair(0, source, destination) for _, source, destination in pairs])


@caught_by("moves_between_layouts_of_the_same_pages")
class WantsTheSameLayout(Wrong):
    def _require_fit(self, ours: CacheGeometry, theirs: CacheGeometry) -> None:
        super()._require_fit(ours, theirs)
        if ours.layout != theirs.layout:
            raise GeometryError("another layout")


@caught_by("runs_several_transfers_at_once")
class RunsOneAtATime(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        if self._running:
            raise TransportError("busy")
        return super().read(peer, pairs)


@caught_by("refuses_caches_that_do_not_fit")
class TakesAnyCache(Wrong):
    def _require_fit(self, ours: CacheGeometry, theirs: CacheGeometry) -> None:
        return


@caught_by("refuses_caches_that_do_not_fit")
class MovesAllHeadsWhicheverAreWanted(Wrong):
    def connect(self, peer: EngineRef, metadata: bytes, *, heads: Any = None, **options: Any) -> None:
        super().connect(peer, metadata, **options)


@caught_by("refuses_metadata_that_is_not_its_own")
class LetsTheDecodersErrorOut(Wrong):
    def connect(self, peer: EngineRef, metadata: bytes, **options: Any) -> None:
        try:
            super().connect(peer, metadata, **options)
        except ProtocolError as error:
            raise ValueError(str(error)) from error


@caught_by("refuses_metadata_that_is_not_its_own")
class BelievesWhoeverSaysWhoItIs(Wrong):
    def _read_metadata(self, peer: EngineRef, metadata: bytes) -> tuple[CacheGeometry, bytes]:
        for engine in (peer, EngineRef("P", 1), EngineRef("D", 1)):
            with suppress(StaleGenerationError):
                return super()._read_metadata(engine, metadata)
        raise ProtocolError("nobody's")


@caught_by("refuses_another_generation_before_posting")
class DoesNotLookAtGenerations(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        known = self._connections.find(peer.engine_id)
        return super().read(peer if known is None else known.peer, pairs)


@caught_by("refuses_blocks_that_are_not_there_before_posting")
class SkipsBlocksThatAreNotThere(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return super().read(peer, [pair for pair in pairs if max(pair[1:]) < 40] or [BlockPair(0, 1, 1)])


@caught_by("refuses_blocks_that_are_not_there_before_posting")
class TakesADestinationTwice(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return super().read(peer, list({pair[2]: pair for pair in pairs}.values()))


@caught_by("unregisters_only_when_its_transfers_have_ended")
class UnregistersUnderItsTransfers(Wrong):
    def unregister(self) -> None:
        for transfer in self._running:
            transfer._look = lambda: TransferState.RUNNING  # type: ignore[method-assign]
        if self.engine is not None:
            self._drop_everything(FirstError())


class PollsForWaits(Wrong):
    def wrap(self, transfer: Transfer) -> Transfer:
        return transfer

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self.wrap(super().read(peer, pairs))


@caught_by("waits_no_longer_than_told")
class ReturnsWhileItRuns(PollsForWaits):
    def wrap(self, transfer: Transfer) -> Transfer:
        transfer.wait = lambda timeout_s: transfer.poll()  # type: ignore[method-assign]
        return transfer


@caught_by("waits_no_longer_than_told")
class CallsADeadlineAFailure(PollsForWaits):
    def wrap(self, transfer: Transfer) -> Transfer:
        def wait(timeout_s: float) -> TransferState:
            raise TransportError("timed out")

        transfer.wait = wait  # type: ignore[method-assign]
        return transfer


@caught_by("an_abandoned_transfer_that_has_ended_writes_no_more")
class SaysThatItHasEndedAndGoesOn(PollsForWaits):
    def wrap(self, transfer: Transfer) -> Transfer:
        go_on = transfer.poll
        stopped: list[bool] = []

        def poll() -> TransferState:
            state = go_on()
            return TransferState.FAILED if stopped else state

        def abandon() -> bool:
            stopped.append(True)
            return True

        transfer.poll, transfer.abandon = poll, abandon  # type: ignore[method-assign]
        return transfer


@caught_by("says_why_a_transfer_failed")
class GivesNoReason(Wrong):
    def transfer_ended(self, transfer: PostedTransfer) -> None:
        transfer.reason = ""
        super().transfer_ended(transfer)


@caught_by("close_ends_everything")
class ClosesOnce(Wrong):
    def close(self, *, timeout_s: float = 5.0) -> None:
        if self._closed:
            raise StateError("closed already")
        super().close(timeout_s=timeout_s)


@caught_by("close_ends_everything")
class OpensAgain(Wrong):
    def close(self, *, timeout_s: float = 5.0) -> None:
        super().close(timeout_s=timeout_s)
        self._closed = False


@caught_by("fails_what_differs_from_its_sums_and_counts_it")
class OnlyClaimsToVerify(Wrong):
    verifies = True


@caught_by("does_not_take_new_contents_for_damage")
class KeepsSumsOfBlocksThatWereWithdrawn(Wrong):
    verifies = True
    has_withdrawn = False

    def withdraw(self, block_ids: Sequence[int]) -> None:
        self.has_withdrawn = True

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        transfer = super().read(peer, pairs)
        known = self._connections.find(peer.engine_id)
        owner = self.find("" if known is None else known.link)
        if isinstance(owner, KeepsSumsOfBlocksThatWereWithdrawn) and owner.has_withdrawn:
            transfer.end(TransferState.FAILED, "the bytes are not those that were summed")  # type: ignore[attr-defined]
        return transfer


class Begun(Connecting):
    """Says that it has ended at once, and does nothing."""

    def poll(self) -> bool:
        return True

    def abandon(self) -> None:
        return


@caught_by("connects_by_polling")
class SaysThatItIsConnectedAtOnce(Wrong):
    def begin_connect(self, peer: EngineRef, metadata: bytes, **options: Any) -> Connecting:
        return Begun()


@caught_by("connects_to_nobody_who_was_given_up")
class ConnectsBehindWhoGaveUp(Wrong):
    def begin_connect(self, peer: EngineRef, metadata: bytes, **options: Any) -> Connecting:
        self.connect(peer, metadata, **options)
        return Begun()


@caught_by("leaves_no_descriptor_open")
class LeavesAFileOpen(Wrong):
    files: list[Any] = []  # noqa: RUF012

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        super()._do_register(cache, geometry, engine)
        self.files.append(open("/dev/null"))  # noqa: SIM115


@pytest.mark.parametrize(("rule", "transport"), WRONG, ids=[transport.__name__ for _, transport in WRONG])
def test_wrong_transport_is_caught_by_the_rule_it_breaks(
    rule: str, transport: type[Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "ENDS_WITHIN_S", 0.1)  # some never end, and are waited for
    with pytest.raises(BrokenRuleError, match=f"^{rule}: "), TransportBench(transport) as bench:
        run_transport_check(rule, bench)


def test_every_rule_has_a_wrong_transport_that_breaks_it() -> None:
    assert {rule for rule, _ in WRONG} == set(TRANSPORT_CHECKS)


def test_inproc_takes_memory_back_when_a_peer_of_another_thread_has_made_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, go_on = threading.Event(), threading.Event()

    def wait(driver: HostDriver) -> None:
        copied.set()
        assert go_on.wait(20)

    with TransportBench(InprocTransport) as bench:
        bench.open()
        bench.meet()
        number = bench.post(SCATTERED)
        monkeypatch.setattr(HostDriver, "synchronize", wait)  # a poll's last act
        with bench.meanwhile(bench.d, "poll", number=number) as polled:
            assert copied.wait(20)
            with bench.meanwhile(bench.p, "unregister") as unregistered:
                with pytest.raises(TimeoutError):
                    unregistered.result(0.2)
                go_on.set()
            assert unregistered.result() is None
            assert polled.result() == "done"
        bench.finish()


def test_check_transport_runs_every_rule_and_names_the_one_that_broke() -> None:
    check_transport(InprocTransport)
    with pytest.raises(BrokenRuleError, match=r"^\w+: the named blocks hold the peer's bytes"):
        check_transport(LeavesTheLastPairOut)


def test_two_processes_take_the_factory_by_name_and_errors_come_back_as_they_were() -> None:
    """In two processes inproc finds no peer, which is what its suite must say."""
    with TransportBench("pdkv.transfer.inproc:InprocTransport", processes=2) as bench:
        bench.open()
        with pytest.raises(TransportError, match="not registered in this process") as refusal:
            bench.meet()
        assert isinstance(refusal.value, PdkvError)
        bench.finish()
