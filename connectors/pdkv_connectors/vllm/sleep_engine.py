"""The engine core's half of sleep, wake and weight updates: the gate in front of vLLM's own calls.

Stock `EngineCore.sleep` pauses the scheduler first and asks nobody. While prefill holds blocks for decode it does not
fail either: it waits in `_idle_state_callbacks`, fires when the lease has ended, possibly after the client has given up
and woken the engine, and the next request then kills the worker. So here:

- sleep is refused, at once, while requests hold blocks or an earlier sleep still waits;
- a sleep that waits (``mode=wait``) waits for leases and transfers too; it has a deadline, and is given up when
  somebody wakes the engine;
- on request leases and transfers are ended first: peers are told, and the sleep waits for their word, or for the end of
  what may still be written or read;
- the handshake is withdrawn before the workers let go of memory, and published again when they have it back.

All of it runs in the thread of the engine core, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from pdkv.errors import LeasesHeldError, StateError
from pdkv_connectors.vllm.held import ABORT_TRANSFERS, with_holders
from pdkv_connectors.vllm.settings import EngineSettings, sleeps
from pdkv_connectors.vllm.status import write_status

logger = init_logger(f"vllm.{__name__}")

_GATE = "_pdkv_sleep_gate"
_STEP_PAUSE_S = 0.001
_LOADS_WEIGHTS = ("reload_weights", "start_weight_update", "start_draft_weight_update")
_ENDS_WEIGHTS = ("reload_weights", "update_weights", "finish_weight_update")


def gate_of(core: Any) -> SleepGate:
    """The one gate of an engine core."""
    gate = getattr(core, _GATE, None)
    if gate is None:
        gate = SleepGate(core)
        setattr(core, _GATE, gate)
    return gate


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sleep that waits for the scheduler to drain: vLLM's future and callback, and until when it may wait."""

    future: Future[Any]
    callback: Callable[..., Any]
    deadline: float


class SleepGate:
    """What stands in front of the sleep calls of one engine core. Made at the first of them."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._settings = EngineSettings.from_environment()
        self._pending: _Pending | None = None
        self._counts = {"sleeps": 0, "wakes": 0, "refused": 0, "weight_updates": 0, "lent": 0}
        self._stock_sleep = core.model_executor.sleep
        core.model_executor.sleep = self._let_go
        if self._scheduler is not None:
            self._scheduler.on_step = self._check_deadline

    @property
    def _scheduler(self) -> Any:
        """The scheduler's half of the connector; None without KV transfer."""
        connector = self._core.scheduler.get_kv_connector()
        return None if connector is None else connector.connector_scheduler

    def holders(self) -> tuple[str, ...]:
        """Requests whose blocks a peer may still read or write, as vLLM counts them, and as the connector does."""
        held = {
            request.request_id
            for request in self._core.scheduler.requests.values()
            if request.is_finished() or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        if not held and (more := getattr(self._scheduler, "holders", None)) is not None:
            held.update(more())
        return tuple(sorted(held))

    def require_able(self) -> None:
        """Raise StateError where it was not started to sleep, its cache is fixed, or an earlier sleep still waits."""
        if not sleeps(self._core.vllm_config):
            raise StateError(
                "this engine was not started to sleep: set PDKV_SLEEP=1 (--enable-sleep of pdkv.launch) on a CPU, or "
                "--enable-sleep-mode --sleep-mode-backend pdkv on CUDA."
            )
        if not all(self._core.collective_rpc("pdkv_can_grow")):
            raise StateError("the KV cache of this engine is a fixed one, which cannot be released; end the engine.")
        if self._pending is not None or getattr(self._core, "_idle_state_callbacks", []):
            self._counts["refused"] += 1
            raise StateError("the engine waits already to sleep or to pause; wait for that, or wake it to give it up.")

    def _require_no_holders(self) -> None:
        if held := self.holders():
            self._counts["refused"] += 1
            raise LeasesHeldError(
                with_holders(
                    f"{len(held)} request(s) hold blocks of the KV cache, which other engines may still read or write; "
                    "wait until they have ended.",
                    held,
                ),
                holders=held,
            )

    def sleep(self, stock: Callable[..., Any], level: int, mode: str) -> Any:
        """Stock sleep, with the gate before it and the engine running on where it fails.

        Args:
            mode: what becomes of requests. "abort" and "keep", vLLM's: those that run are aborted or kept, and while a
                peer may read or write blocks sleep is refused. "wait", vLLM's: both are waited for. "abort_transfers":
                both are ended; what a peer may still touch is waited for.

        Raises:
            LeasesHeldError: requests hold blocks, or still do when "wait" or "abort_transfers" has waited its time.
            StateError: as :meth:`require_able`.
        """
        self.require_able()
        if mode == ABORT_TRANSFERS:
            mode = "abort"
            self._end_leases()
            if not isinstance(self._core, EngineCoreProc):
                self._step_until_free()
        elif mode != "wait":
            self._require_no_holders()
        try:
            result = stock(self._core, level, mode)
        except BaseException:
            self._run_on()
            raise
        if isinstance(result, Future):
            callback = self._core._idle_state_callbacks[-1]
            self._pending = _Pending(result, callback, time.monotonic() + self._settings.sleep_timeout_s)
            result.add_done_callback(self._ended)
        return result

    def _end_leases(self) -> None:
        """Finished prompts are given to nobody any more. Aborting the others ends theirs."""
        give_up = getattr(self._scheduler, "give_up_finished", None)
        for request in list(self._core.scheduler.requests.values()) if give_up is not None else ():
            if request.is_finished():
                give_up(request.request_id, "the engine goes to sleep")

    def _step_until_free(self) -> None:
        """An engine without a loop of its own (`LLM` in one process) has to be stepped until peers have answered."""
        self._core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        deadline = time.monotonic() + self._settings.sleep_timeout_s
        while self._core.scheduler.has_requests() or self.holders():
            if time.monotonic() > deadline:
                raise self._held_too_long()
            _, executed = self._core.step_fn()
            self._core.post_step(executed)
            if not executed:
                time.sleep(_STEP_PAUSE_S)

    def _ended(self, future: Future[Any]) -> None:
        self._pending = None
        if future.exception() is not None:
            self._run_on()

    def _run_on(self) -> None:
        if not self._core.model_executor.is_sleeping:
            self._core.resume_scheduler()

    def _check_deadline(self) -> None:
        """Called in every step; an engine that is waiting to sleep steps until nobody holds blocks."""
        if self._pending is not None and time.monotonic() > self._pending.deadline:
            self.give_up(self._held_too_long())

    def _held_too_long(self) -> LeasesHeldError:
        held = self.holders()
        self._counts["refused"] += 1
        return LeasesHeldError(
            with_holders(
                f"the engine could not sleep within {self._settings.sleep_timeout_s:g} s: requests are running or hold "
                "blocks of the KV cache.",
                held,
            ),
            holders=held,
        )

    def give_up(self, error: Exception) -> None:
        """End a sleep that still waits, with an error for who asked for it, and run on."""
        if self._pending is None:
            return
        pending, callbacks = self._pending, self._core._idle_state_callbacks
        callbacks[:] = [callback for callback in callbacks if callback is not pending.callback]
        pending.future.set_exception(error)  # calls _ended

    def _let_go(self, level: int = 1) -> None:
        """In place of `Executor.sleep`, at once or when the scheduler has drained; blocks may be held again by then."""
        self._require_no_holders()
        with _Withdrawn(self):
            self._stock_sleep(level)
        self._count("sleeps")

    def release_kv_cache(self, stock: Callable[..., Any]) -> None:
        """Stock `release_kv_cache_memory`, of the cache alone."""
        self.require_able()
        self._require_no_holders()
        with _Withdrawn(self):
            stock(self._core)
        self._count("sleeps")

    def wake(self, stock: Callable[..., Any], tags: list[str] | None) -> bool:
        """Stock wake, which gives up a sleep that still waits, and publishes the handshake where the cache is back."""
        self.give_up(StateError("the sleep was given up, because somebody woke the engine before it slept."))
        before = set(self._core.model_executor.sleeping_tags)
        awake = bool(stock(self._core, tags))
        if "kv_cache" in before - set(self._core.model_executor.sleeping_tags):
            self.publish()
            self._count("wakes")
        return awake

    def load_weights(self, stock: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """A call that loads weights: say whether the cache may be lent for it, and publish where it was."""
        if method in _LOADS_WEIGHTS:
            stock(self._core, "pdkv_allow_lending", args=(self._cache_holds_nothing(),))
        try:
            return stock(self._core, method, *args, **kwargs)
        finally:
            if method in _ENDS_WEIGHTS:
                lent = any(stock(self._core, "pdkv_was_lent"))
                if lent:
                    self.publish()
                self._counts["lent"] += lent
            if method in _LOADS_WEIGHTS:
                self._count("weight_updates")

    def _cache_holds_nothing(self) -> bool:
        """Whether no request has blocks. What the prefix cache holds is of the old weights, and is dropped."""
        if self._core.scheduler.requests or self._core.model_executor.is_sleeping:
            return False
        return bool(self._core.reset_prefix_cache())

    def publish(self) -> None:
        """Serve the handshake that the workers have now."""
        scheduler = self._core.scheduler.get_kv_connector()
        if scheduler is None:
            return
        payloads: dict[Any, Any] = {}
        for of_rank in self._core.model_executor.get_kv_connector_handshake_metadata():
            payloads.update(of_rank or {})
        scheduler.set_xfer_handshake_metadata_pp_aware(payloads)

    def withdraw(self) -> None:
        """Serve no handshake."""
        if self._scheduler is not None:
            self._scheduler.withdraw_handshake()

    def _count(self, what: str) -> None:
        self._counts[what] += 1
        facts = {**self._counts, "asleep": sorted(self._core.model_executor.sleeping_tags)}
        try:
            write_status(self._settings.status_dir, "sleep", facts)
        except OSError as error:
            logger.error("cannot write the status file sleep.json: %s", error)


class _Withdrawn:
    """The handshake is withdrawn inside, and stays so, unless what is inside fails."""

    def __init__(self, gate: SleepGate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.withdraw()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and not self._gate._core.model_executor.is_sleeping:
            self._gate.publish()
