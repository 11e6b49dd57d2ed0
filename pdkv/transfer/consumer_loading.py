"""How a request on D gets on: what each phase does as soon as it can, and when what arrived may be believed."""

from __future__ import annotations

from pdkv.errors import ProtocolError
from pdkv.transfer.actions import Loaded, PostRead
from pdkv.transfer.blocks import block_ids, pair_by_index, require_committed, units_of
from pdkv.transfer.consumer_books import ConsumerBooks
from pdkv.transfer.consumer_state import Phase, Request
from pdkv.transfer.messages import FailCode, Register
from pdkv.transfer.peers import Peer


class ConsumerLoading(ConsumerBooks):
    """From STARTING to LOADED; see :mod:`pdkv.transfer.consumer`."""

    def _advance(self, request: Request) -> None:
        """Do what the phase allows now."""
        if request.phase is Phase.STARTING:
            peer = self._peers.get(request.reference.engine)
            if not block_ids(request.runs):
                self._arrived_whole(request)
            elif peer is None:
                self._need_peer(request.reference.engine)
            elif self._settings.mode == "push":
                request.phase = Phase.RUNNING
                remaining_s = max(0.0, request.deadline - self._clock.monotonic())
                fields = {"num_tokens": request.reference.num_tokens, "runs": request.runs, "remaining_s": remaining_s}
                self._send(self._to_prefill(Register, request, **fields))
            elif self._kept_until(request, self._clock.monotonic()):
                self._read(request, peer)
            elif peer.fences_reads and not self._is_answered(request):
                request.is_early = True
                self.counters.count("early_reads")
                self._read(request, peer)
        elif request.phase is Phase.CONFIRMING:
            self._confirm(request)

    def _confirm(self, request: Request) -> None:
        """The READ has ended. Where P is known to have kept the blocks until then, so has the load."""
        if self._kept_until(request, request.read_ended_at):
            if request.read_failure is None:
                self._arrived_whole(request)
            else:
                self._fail(request, *request.read_failure)
        elif self._is_answered(request):  # else the answer to the first question, asked on arrival, is on its way
            self.counters.count("confirmations")
            self._renewer.ask_now(request.key)

    def _is_answered(self, request: Request) -> bool:
        """Whether P has ever said that the request's lease lives."""
        return self._renewer.guaranteed_until(request.key) is not None

    def _kept_until(self, request: Request, at: float) -> bool:
        """Whether P is known to keep the blocks until `at`, on this clock."""
        until = self._renewer.guaranteed_until(request.key)
        return until is not None and until >= at

    def _read(self, request: Request, peer: Peer) -> None:
        try:
            reference, theirs = request.reference, peer.descriptor
            require_committed(reference.blocks, theirs.num_blocks)
            sizes = theirs.compatibility.block_size, self.descriptor.compatibility.block_size
            pairs = pair_by_index(*units_of(reference.blocks, request.runs, sizes, reference.num_tokens))
        except ProtocolError as error:
            self._fail(request, FailCode.BAD_BLOCKS, str(error))
            return
        request.phase = Phase.RUNNING
        self._reads.add(request.key)
        self._actions.append(PostRead(request.key, peer.ref, pairs))

    def _arrived_whole(self, request: Request) -> None:
        self.counters.count("loaded")
        held = self._settings.hold_s > 0 and bool(block_ids(request.runs))
        request.phase, request.runs = Phase.LOADED, ()
        request.deadline = self._clock.monotonic() + self._settings.hold_s
        self._actions.append(Loaded(request.request_id))
        if not held:
            self._let_go(request)

    @property
    def _is_pull(self) -> bool:
        return self._settings.mode == "pull"
