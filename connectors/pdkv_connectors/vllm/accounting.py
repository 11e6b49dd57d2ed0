"""What the scheduler's side of a connector saw: remote hits, and prompt tokens that decode should not have computed.

A decode engine that silently recomputes a prompt gives the right answer slowly, and nothing in stock vLLM's response
says so (`num_cached_tokens` is 0 in both cases). So each scheduler step is counted here (I13).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.status import write_status

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class TransferCounts:
    """Totals since start-up, as in the status file ``scheduler.json``.

    Attributes:
        requests: requests that ended.
        remote_prefill_hits: of these, such whose prompt KV came from a prefill engine and arrived.
        remote_tokens: prompt tokens whose KV was asked for from prefill engines.
        recomputed_tokens: prompt tokens that this engine computed although their KV was to come from a prefill engine;
            the last token of a prompt is not counted, since its logits are needed here.
        failed_loads: transfers that ended with an error.
    """

    requests: int = 0
    remote_prefill_hits: int = 0
    remote_tokens: int = 0
    recomputed_tokens: int = 0
    failed_loads: int = 0


@dataclass(slots=True)
class _Tracked:
    """A request on decode whose prompt was computed by a prefill engine."""

    prompt_tokens: int
    remote_tokens: int = 0
    computed_here: int = 0
    arrived: bool = False
    failed: bool = False


class TransferAccounts:
    """Counts one engine's requests from the events of its scheduler. Pure bookkeeping; no clock, no I/O."""

    def __init__(self) -> None:
        self.counts = TransferCounts()
        self._tracked: dict[str, _Tracked] = {}

    def remote_prefill(self, req_id: str, prompt_tokens: int) -> None:
        """A request arrived whose KV is to be loaded. May be called again for the same request (preemption)."""
        self._tracked.setdefault(req_id, _Tracked(prompt_tokens))

    def loading(self, req_id: str, remote_tokens: int) -> None:
        """The KV of `remote_tokens` prompt tokens has been asked for; the rest was in the local prefix cache."""
        if (request := self._tracked.get(req_id)) is not None:
            request.remote_tokens += remote_tokens
            self.counts.remote_tokens += remote_tokens

    def arrived(self, req_id: str) -> None:
        """The transfer of a request has ended."""
        if (request := self._tracked.get(req_id)) is not None:
            request.arrived = True

    def failed(self, req_id: str) -> None:
        """The transfer of a request has ended with an error."""
        self.counts.failed_loads += 1
        if (request := self._tracked.get(req_id)) is not None:
            request.failed = True

    def computed(self, req_id: str, start: int, num_tokens: int) -> None:
        """A step computes tokens `start .. start + num_tokens - 1` of a request here."""
        if (request := self._tracked.get(req_id)) is not None:
            request.computed_here += max(0, min(start + num_tokens, request.prompt_tokens) - start)

    def ended(self, req_id: str) -> None:
        """A request has ended, one way or another."""
        self.counts.requests += 1
        request = self._tracked.pop(req_id, None)
        if request is None:
            return
        self.counts.recomputed_tokens += max(0, request.computed_here - 1)
        if request.remote_tokens > 0 and request.arrived and not request.failed:
            self.counts.remote_prefill_hits += 1


class CountingScheduler:
    """Mixed in before a stock NIXL connector scheduler: counts, and leaves all decisions to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accounts = TransferAccounts()
        self._status_dir = EngineSettings.from_environment().status_dir
        self._write_counts()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"):
            self.accounts.remote_prefill(request.request_id, request.num_prompt_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.accounts.loading(request.request_id, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update({new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs})
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self.accounts.computed(req_id, starts[req_id], num_tokens)
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]

    def update_connector_output(self, connector_output: Any) -> None:
        for req_id in connector_output.finished_recving or ():
            self.accounts.arrived(req_id)
        for req_id in getattr(connector_output, "failed_recving", None) or ():
            self.accounts.failed(req_id)
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.accounts.ended(request.request_id)
        self._write_counts()
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def _write_counts(self) -> None:
        try:
            write_status(self._status_dir, "scheduler", asdict(self.accounts.counts))
        except OSError as error:
            # A full disk must not end an engine that serves; the launcher sees that the file is old.
            logger.error("cannot write the status file scheduler.json to %s: %s", self._status_dir, error)
