"""The scheduler's half of `PdkvConnector`: a session of `pdkv.transfer`, told what becomes of each request.

All that P and D decide is decided here, in the engine core, where vLLM's scheduler is. The workers only move bytes
(`session_worker.py`): orders to them go with the next step, and what the scheduler must hear from a worker (blocks that
may be freed, KV that has arrived) goes to them and comes back.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from pdkv.errors import PdkvError, ProtocolError, StateError
from pdkv.transfer import BlockRun, Compatibility, Reference, Session
from pdkv.transfer import actions as do
from pdkv.transfer.sidechannel import SideChannel
from pdkv_connectors.vllm.refusals import MALFORMED, require_one_way
from pdkv_connectors.vllm.session_host import WorkersHost
from pdkv_connectors.vllm.session_orders import RankRegistration, StepOrders, StepReports
from pdkv_connectors.vllm.session_settings import ConnectorSettings
from pdkv_connectors.vllm.session_status import StatusWriter
from pdkv_connectors.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")

#: Key of the reference in ``kv_transfer_params``.
KEY = "pdkv"
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
#: Pauses in seconds of a step that has nothing to do: the first, and the longest while workers move bytes, and else.
FIRST_PAUSE_S = 50e-6
MOVING_PAUSE_S = 200e-6
IDLE_PAUSE_S = 3e-3


class SessionScheduler:
    """See the module's docstring. Called by vLLM's scheduler, in one thread; the session has one of its own."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        self.settings = ConnectorSettings.of(vllm_config)
        self._vllm_config = vllm_config
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._recompute = self.settings.session.decode.on_failure == "recompute"
        self._something = threading.Event()
        self._pause_s = FIRST_PAUSE_S
        name = f"{engine_id[:200]}/{uuid.uuid4().hex[:12]}"
        self.host = WorkersHost(name, self._compatible, self._something.set)
        self.session: Session | None = None
        self.channel: SideChannel | None = None
        self._serial = itertools.count(1)
        self._offered: dict[str, str] = {}  # P: name between P and D -> request id
        self._remote: dict[str, int] = {}  # D: request id -> preemptions that have been dealt with
        self._failed: dict[str, str] = {}  # D: of these, such whose KV will not come, and why
        self._awaited: set[str] = set()  # D: vLLM waits until it hears of these
        self._untouched: set[str] = set()  # of requests that came, such that the session never heard of
        self._step = StepOrders()
        self._status = StatusWriter(EngineSettings.from_environment().status_dir)
        #: Called at each step; who lets the engine sleep sets it.
        self.on_step: Callable[[], None] = lambda: None

    # Start, sleep and end.

    def set_registrations(self, ranks: Mapping[int, RankRegistration]) -> None:
        """The workers have registered their caches: at the start, and again after each sleep."""
        registration = self.host.register(ranks)
        if self.session is not None:
            self.session.publish(registration.engine.generation)
            self.session.resume_transfers()
            return
        role = _ROLES[self._vllm_config.kv_transfer_config.kv_role]
        self.channel = SideChannel(registration.engine.engine_id, self.settings.side_channel)
        self.session = Session(self.host, self.channel, role=role, settings=self.settings.session)  # type: ignore[arg-type]
        self.session.start(self._something.set)
        logger.info(
            "pdkv: %s exchanges KV as %s, side channel at %s",
            registration.engine.engine_id, role, self.channel.address,
        )  # fmt: skip

    def withdraw_handshake(self) -> None:
        """The workers are about to let go of their memory; peers are told."""
        if self.session is not None:
            self.session.refuse_transfers()
            try:
                self.session.withdraw()
            except PdkvError:
                self.session.resume_transfers()
                raise
            self.host.unregister()

    def holders(self) -> tuple[str, ...]:
        """Names of requests whose blocks a peer may still read, or which still read a peer's."""
        return () if self.session is None else self.session.holders()

    @property
    def generation(self) -> int:
        """Of the registration that peers know; 0 before there is one."""
        return 0 if self.session is None else self.session.engine.generation

    def shutdown(self) -> None:
        if self.session is not None:
            self.session.close()

    # Requests.

    def on_new_request(self, request: Any) -> None:
        """On D the lease is renewed from now on, however long the request waits here."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        request_id = request.request_id
        self._remote[request_id] = request.num_preemptions
        self._untouched.add(request_id)
        try:
            require_one_way(params, str(self._vllm_config.kv_transfer_config.kv_role))
            reference = Reference.from_params(params.get(KEY))
            # One that is refused before it was a request is made of one token only to be aborted.
            num_tokens = reference.num_tokens if request.abort_immediately else request.num_prompt_tokens
            self._require_session().arrived(request_id, reference, num_tokens)
            self._untouched.discard(request_id)
        except ProtocolError as error:
            self._give_up(request_id, MALFORMED, str(error))
        except PdkvError as error:
            self._give_up(request_id, "not_accepted", str(error))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All of the prompt that is not cached here.

        In the queue vLLM knows no failure. So a request whose KV will not come either gets nothing, and is computed
        here, or claims all of it, and fails as soon as it has blocks.
        """
        request_id, params = request.request_id, request.kv_transfer_params or {}
        if request_id not in self._remote:
            return 0, False
        if request.num_preemptions > self._remote[request_id]:
            self._remote[request_id] = request.num_preemptions
            if request_id not in self._failed and self._require_session().preempted(request_id):
                params["do_remote_prefill"] = True
        if not params.get("do_remote_prefill") or (self._recompute and request_id in self._failed):
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id, params = request.request_id, request.kv_transfer_params or {}
        if request_id not in self._remote or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once for each allocation; vLLM calls again when the KV is there
        runs: tuple[BlockRun, ...] = ()
        if num_external_tokens > 0:
            self._awaited.add(request_id)
            first = (request.num_prompt_tokens - num_external_tokens) // self._block_size
            runs = (self._run(blocks.get_block_ids()[0], first, request.num_prompt_tokens),)
        if request_id in self._untouched:
            self._tell(request_id, loaded=False)
        else:
            self._require_session().allocated(request_id, runs)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, request.kv_transfer_params or {}
        if self._remote.pop(request_id, None) is not None:
            self._failed.pop(request_id, None)
            if request_id in self._untouched:
                self._untouched.discard(request_id)
                return False, None
            self._require_session().gone(request_id, f"the request is over on decode ({request.status.name.lower()})")
            return False, None
        capped = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or request.status not in capped:
            return False, None
        return self._offer(request_id, block_ids[0], request.num_prompt_tokens)

    def _offer(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> tuple[bool, dict[str, Any] | None]:
        name = f"{request_id[:200]}#{next(self._serial)}"
        run = self._run(block_ids, 0, num_tokens)
        try:
            reference = self._require_session().offer(name, (run,), num_tokens)
        except StateError as error:
            logger.error("pdkv: the KV of request %s is not kept for decode: %s", request_id, error)
            return False, None
        self._offered[name] = request_id
        return True, {"do_remote_prefill": True, "do_remote_decode": False, KEY: reference.to_params()}

    def give_up_finished(self, request_id: str, reason: str) -> None:
        """P: nobody is to have the KV of this finished prompt any more; a D that has asked is told. Idempotent."""
        for name in [name for name, offered in self._offered.items() if offered == request_id]:
            self._require_session().prefill_aborted(name, reason)

    def _run(self, block_ids: Sequence[int], first: int, num_tokens: int) -> BlockRun:
        """The prompt's blocks from index `first` on; what an engine has beyond the prompt is its own."""
        return BlockRun(first, tuple(block_ids[first : -(-num_tokens // self._block_size)]))

    # Steps.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        self.on_step()
        if self.session is not None:
            self._status.write(self.session)
        self._something.clear()
        self._take_events()
        step, self._step = self._step, StepOrders()
        step.orders = self.host.take_orders()
        if step or scheduler_output.total_num_scheduled_tokens > 0:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._pause()
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, StepReports):
            self.host.take_reports(reports)

    def _pause(self) -> None:
        """Nothing to do in this step but to wait for a peer; vLLM would make it at once again, with a whole core."""
        self._something.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, MOVING_PAUSE_S if self.host.num_running else IDLE_PAUSE_S)

    def _take_events(self) -> None:
        if self.session is None:
            return
        for event in self.session.poll():
            match event:
                case do.Loaded():
                    self._tell(event.request_id, loaded=True)
                case do.Failed() | do.Recompute():
                    self._give_up(event.request_id, event.code, event.reason)
                case do.FreeBlocks():
                    if (offered := self._offered.pop(event.request_id, None)) is not None:
                        self._step.sent.add(offered)
                    else:
                        self._tell(event.request_id, loaded=False)

    def _tell(self, request_id: str, *, loaded: bool) -> None:
        """vLLM may use the blocks; or else free them, and, in the same breath, fail the request or compute it here."""
        if request_id in self._awaited:
            self._awaited.discard(request_id)
            self._step.received.add(request_id)
            if not loaded:
                self._step.failed.add(request_id)

    def _give_up(self, request_id: str, code: str, reason: str) -> None:
        logger.warning("pdkv: the KV of request %s will not come (%s): %s", request_id, code, reason)
        if request_id in self._remote:
            self._failed[request_id] = f"{code}: {reason}"
            self.will_not_come(request_id, code, reason)

    def will_not_come(self, request_id: str, code: str, reason: str) -> None:
        """For who publishes it: `waiting.PublishingScheduler`."""

    # What must be the same on both sides.

    def _compatible(self, rank: RankRegistration) -> Compatibility:
        config = self._vllm_config
        return Compatibility(
            model=str(config.model_config.model)[:512],
            dtype=str(config.model_config.dtype),
            cache_dtype=str(config.cache_config.cache_dtype),
            layout=rank.shape,
            block_size=self._block_size,
            connector=f"pdkv over {self.settings.transport}, vLLM {vllm.__version__}",
            shards=rank.shards,
            converts=rank.converts,
        )

    def _require_session(self) -> Session:
        if self.session is None:
            raise StateError("the workers have not registered their KV cache yet; wait until the engine is ready.")
        return self.session
