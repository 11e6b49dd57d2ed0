"""Every function of vLLM that pdkv replaces, all in this one file.

=========================================  =========  ===============================================================
what                                       for        why there is no other way
=========================================  =========  ===============================================================
`EngineCore._initialize_kv_caches` (wrap)  0.32, 0.33  it alone turns a block count into the scheduler's pool, and it
                                                      runs warmup before it returns: growth must come after it
`EngineCore.sleep` (wrap)                  0.32, 0.33  it pauses the scheduler before any worker is asked, and fires
                                                      late, on a woken engine, where blocks are held
`EngineCore.wake_up` (wrap)                0.32, 0.33  a sleep that still waits is given up; on 0.32 nothing publishes
                                                      the handshake again
`EngineCore.release_kv_cache_memory`       0.32, 0.33  as `sleep`, for the cache alone
`EngineCore.collective_rpc` (wrap)         0.32, 0.33  only the engine core knows whether the cache may be lent to a
                                                      weight update; nothing publishes the handshake after one
`EngineCore.abort_requests` (wrap)         0.32, 0.33  stock ignores that a client left whose prompt was finished
                                                      just then: its blocks would be held until the lease runs out
`Scheduler._handle_failed_recving` (wrap)  0.32, 0.33  stock fails a request whose KV will not come once it has
                                                      blocks for it; one in the queue would wait for its turn first
`base_worker.nixl_agent_config` (swap)     0.32, 0.33  the agent's progress thread burns 60-70 % of a core when idle,
                                                      and its switch is not among the connector's settings
CPU affinity around the agent (restore)    0.32, 0.33  the stock constructor pins the main thread to the last core
=========================================  =========  ===============================================================

Without one of pdkv's worker classes each of them is inert.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig

DEFAULT_WORKER_CLS = "pdkv_connectors.vllm.worker.GrowableCPUWorker"
#: For ``--sleep-mode-backend``.
SLEEP_BACKEND = "pdkv"
_WRAPPED = "__pdkv_wrapped__"
_WRAPS = ("_initialize_kv_caches", "sleep", "wake_up", "release_kv_cache_memory", "collective_rpc", "abort_requests")

#: Worker calls that load weights.
WEIGHT_CALLS = frozenset(
    ("reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
)


def is_growable(vllm_config: VllmConfig) -> bool:
    """Whether the engine was started with one of pdkv's worker classes, or a subclass of one."""
    worker_cls = vllm_config.parallel_config.worker_cls
    if not isinstance(worker_cls, str) or worker_cls == "auto" or worker_cls.startswith("vllm."):
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from pdkv_connectors.vllm.growth import GrowableWorker

    return issubclass(resolve_obj_by_qualname(worker_cls), GrowableWorker)


def install() -> None:
    """Wrap `EngineCore`'s methods, once per process. Inert for engines without a growable worker."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    _wrap(EngineCore, "_initialize_kv_caches", _grow_after)
    _wrap(EngineCore, "sleep", _gated_sleep)
    _wrap(EngineCore, "wake_up", _gated_wake)
    _wrap(EngineCore, "release_kv_cache_memory", _gated_release)
    _wrap(EngineCore, "collective_rpc", _lending_rpc)
    _wrap(EngineCore, "abort_requests", _free_finished)
    _wrap(Scheduler, "_handle_failed_recving", _fail_queued)


def announce_sleep_backend() -> None:
    """Tell vLLM of the sleep backend ``pdkv``, where the version has a registry for such. That is no patch."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ImportError:
        return
    if SLEEP_BACKEND not in SleepModeBackendFactory._registry:
        module = "pdkv_connectors.vllm.sleep_backend"
        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, module, "PdkvSleepBackend")


def installed() -> bool:
    """Whether :func:`install` has taken effect in this process."""
    from vllm.v1.engine.core import EngineCore

    return all(hasattr(getattr(EngineCore, name, None), _WRAPPED) for name in _WRAPS)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `owner.name(self, ...)` call ``wrapper(stock, self, ...)``; does nothing where it does so already.

    Nor where there is no such method: a version without it is refused by `compat.check()` when a growable worker
    starts, not here, since other people's engines load this plug-in too.
    """
    stock: Callable[..., Any] | None = getattr(owner, name, None)
    if stock is None or hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, self, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def _grow_after(stock: Callable[..., Any], core: Any, vllm_config: VllmConfig) -> Any:
    config = stock(core, vllm_config)
    if not is_growable(vllm_config):
        return config
    from pdkv_connectors.vllm.agree import grow_engine

    return grow_engine(core, vllm_config, config)


def _free_finished(stock: Callable[..., Any], core: Any, request_ids: list[str]) -> Any:
    """Have the connector free what it holds for requests that had finished before they were aborted."""
    if is_growable(core.vllm_config) and (connector := core.scheduler.get_kv_connector()) is not None:
        give_up = getattr(getattr(connector, "connector_scheduler", None), "give_up_finished", None)
        for request_id in request_ids if give_up is not None else ():
            request = core.scheduler.requests.get(request_id)
            if request is not None and request.is_finished():
                give_up(request_id, "the client had left when the prompt was finished")
    return stock(core, request_ids)


def _gated_sleep(stock: Callable[..., Any], core: Any, level: int = 1, mode: str = "abort") -> Any:
    if level < 1 or not is_growable(core.vllm_config):
        return stock(core, level, mode)
    from pdkv_connectors.vllm.sleep_engine import gate_of

    return gate_of(core).sleep(stock, level, mode)


def _gated_wake(stock: Callable[..., Any], core: Any, tags: list[str] | None = None) -> Any:
    if not is_growable(core.vllm_config):
        return stock(core, tags)
    from pdkv_connectors.vllm.sleep_engine import gate_of

    return gate_of(core).wake(stock, tags)


def _gated_release(stock: Callable[..., Any], core: Any) -> Any:
    if not is_growable(core.vllm_config):
        return stock(core)
    from pdkv_connectors.vllm.sleep_engine import gate_of

    return gate_of(core).release_kv_cache(stock)


def _lending_rpc(stock: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(method, str) or method not in WEIGHT_CALLS or not is_growable(core.vllm_config):
        return stock(core, method, *args, **kwargs)
    from pdkv_connectors.vllm.sleep_engine import gate_of

    return gate_of(core).load_weights(stock, method, *args, **kwargs)


def _fail_queued(stock: Callable[..., Any], scheduler: Any, failed_req_ids: set[str]) -> Any:
    """The requests to fail: stock's, and such that have no blocks yet."""
    affected = stock(scheduler, failed_req_ids)
    if scheduler.recompute_kv_load_failures or getattr(scheduler.connector, "fails_queued", False) is not True:
        return affected
    from vllm.v1.request import RequestStatus

    found = [scheduler.requests.get(req_id) for req_id in failed_req_ids]
    return affected | {r.request_id for r in found if r is not None and r.status == RequestStatus.WAITING}


@contextlib.contextmanager
def quiet_nixl_agent() -> Iterator[None]:
    """While open, a stock NIXL worker gets an agent without a progress thread, and leaves the CPU affinity alone.

    vLLM steps its engine while leases or loads are pending and polls NIXL in each step, which is all the progress that
    is needed. The affinity is per thread; the constructor runs in the calling one.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    stock = base_worker.nixl_agent_config
    affinity = os.sched_getaffinity(0)
    # Handshakes, and push's writer, call the agent from threads of their own. With a progress thread NIXL locks by
    # itself; without one it does not unless told so, and concurrent push requests then wait for ever.
    strict = sys.modules[stock.__module__].nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    base_worker.nixl_agent_config = functools.partial(stock, enable_prog_thread=False, sync_mode=strict)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = stock
        os.sched_setaffinity(0, affinity)
