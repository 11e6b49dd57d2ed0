"""Which vLLM versions pdkv knows, and a check at start-up that each seam is where it is expected.

A private API moves without notice. A seam that has moved must end the start with a sentence that names version and
seam, not with an engine that runs on memory pdkv does not know. What can only be seen while it happens (an allocation
that is answered once, a count that reaches the engine) is checked where it happens.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pdkv.errors import SeamError
from pdkv_connectors.vllm import patches

#: vLLM's minor version -> platforms on which the seams have been run.
SUPPORTED = {"0.32": ("cpu",), "0.33": ("cuda",)}


@dataclass(frozen=True, slots=True)
class Seam:
    """One function or class of vLLM's private API that pdkv stands on.

    Attributes:
        purpose: the seam's name in the documentation.
        module: where it is imported from.
        path: attribute path in the module.
        parameters: names that must be among its parameters; None for things that are not called by pdkv.
    """

    purpose: str
    module: str
    path: str
    parameters: tuple[str, ...] | None = None


_WORKER = "vllm.v1.worker.gpu_worker"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
_NIXL = f"{_BASE}.nixl"

ENGINE_SEAMS = (
    Seam("block count", "vllm.v1.engine.core", "EngineCore._initialize_kv_caches", ("vllm_config",)),
    Seam("sleep", "vllm.v1.engine.core", "EngineCore.sleep", ("level", "mode")),
    Seam("sleep", "vllm.v1.engine.core", "EngineCore.post_step", ("model_executed",)),
    Seam("sleep", "vllm.v1.engine.core", "EngineCoreProc"),
    Seam("sleep", "vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("request_ids", "finished_status")),
    Seam("sleep", "vllm.engine.protocol", "EngineClient.sleep", ("level", "mode")),
    Seam("sleep", "vllm.v1.engine.core", "EngineCore.wake_up", ("tags",)),
    Seam("sleep", "vllm.v1.engine.core", "EngineCore.release_kv_cache_memory", ()),
    Seam("sleep", "vllm.v1.engine.core", "EngineCore.resume_scheduler", ()),
    Seam("sleep", "vllm.v1.executor.abstract", "Executor.sleep", ("level",)),
    Seam("sleep", "vllm.v1.executor.abstract", "Executor.is_sleeping"),
    Seam("weight update", "vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "args")),
    Seam("weight update", _WORKER, "Worker.reload_weights", ()),
    Seam("weight update", _WORKER, "Worker.start_weight_update", ()),
    Seam("weight update", _WORKER, "Worker.update_weights", ("update_info",)),
    Seam("weight update", _WORKER, "Worker.finish_weight_update", ()),
    Seam("ends of requests", "vllm.v1.engine.core", "EngineCore.abort_requests", ("request_ids",)),
    Seam("block count", "vllm.v1.core.kv_cache_utils", "update_kv_cache_capacity", ("vllm_config", "kv_cache_config")),
    Seam("back the tensors", _WORKER, "Worker._maybe_get_memory_pool_context", ("tag",)),
    Seam("back the tensors", _WORKER, "Worker.initialize_from_config", ("kv_cache_config",)),
    Seam("back the tensors", "vllm.v1.kv_cache_interface", "KVCacheTensor",
         ("size", "layers", "layer_stride", "block_stride", "offset")),
    Seam("capacity", _WORKER, "Worker.determine_available_memory", ()),
    Seam("capacity", "vllm.v1.worker.utils", "request_memory", ("init_snapshot", "cache_config")),
    Seam("agreement of ranks", "vllm.distributed.parallel_state", "get_world_group", ()),
    Seam("warm up", _WORKER, "Worker.compile_or_warm_up_model", ()),
    Seam("warm up", _WORKER, "Worker.execute_model", ("scheduler_output",)),
    Seam("warm up", _WORKER, "Worker.sample_tokens", ("grammar_output",)),
    Seam("warm up", "vllm.v1.core.sched.output", "NewRequestData", ("req_id", "prompt_token_ids", "block_ids")),
    Seam("rebind", "vllm.v1.kv_cache_interface", "create_kv_cache_views",
         ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size")),
    Seam("rebind", "vllm.v1.worker.utils", "bind_kv_cache",
         ("kv_caches", "forward_context", "runner_kv_caches", "num_attn_module", "kv_cache_groups", "layer_kv_caches")),
    Seam("rebind", "vllm.v1.worker.utils", "map_kv_caches_to_kernel_blocks", ("kv_caches", "attn_groups")),
)  # fmt: skip

CPU_SEAMS = (
    Seam("interior of pages", "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa",
         ("dtype", "block_size", "head_size")),
)  # fmt: skip

CONNECTOR_SEAMS = (
    Seam("session", f"{_BASE}.base", "KVConnectorBase_V1", ("vllm_config", "role", "kv_cache_config")),
    Seam("session", f"{_BASE}.base", "KVConnectorBase_V1.get_transfer_results", ("finished_req_ids",)),
    Seam("session", f"{_BASE}.base", "KVConnectorBase_V1.build_connector_worker_meta", ()),
    Seam("session", f"{_BASE}.base", "KVConnectorBase_V1.on_new_request", ("request",)),
    Seam("session", f"{_BASE}.base", "KVConnectorBase_V1.set_xfer_handshake_metadata", ("metadata",)),
    Seam("session", f"{_BASE}.base", "KVConnectorWorkerMetadata.aggregate", ("other",)),
    Seam("session", f"{_BASE}.base", "KVConnectorTransferResults",
         ("finished_sending", "finished_recving", "failed_recving")),
    Seam("session", "vllm.v1.core.sched.scheduler", "Scheduler._handle_failed_recving", ("failed_req_ids",)),
    Seam("late connector", f"{_NIXL}.connector", "NixlBaseConnector", ("vllm_config", "role", "kv_cache_config")),
    Seam("late connector", f"{_NIXL}.pull_worker", "NixlPullConnectorWorker",
         ("vllm_config", "engine_id", "kv_cache_config")),
    Seam("late connector", f"{_NIXL}.pull_worker", "NixlPullConnectorWorker.register_kv_caches", ("kv_caches",)),
    Seam("late connector", f"{_NIXL}.push_worker", "NixlPushConnectorWorker",
         ("vllm_config", "engine_id", "kv_cache_config")),
    Seam("late connector", f"{_NIXL}.push_worker", "NixlPushConnectorWorker.register_kv_caches", ("kv_caches",)),
    Seam("ends of requests", f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks_for_req",
         ("req_id", "meta")),
    Seam("sleep", f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler._nixl_handshake_listener",
         ("encoded_data",)),
    Seam("stock peers of push", f"{_NIXL}.push_worker", "NixlPushConnectorWorker._do_start_push_kv",
         ("request_id", "local_block_ids", "registration_data")),
    Seam("stock peers of push", f"{_NIXL}.push_worker", "NixlPushConnectorWorker._send_registration_to_p",
         ("req_id", "reg_data")),
    Seam("agent without a spinning thread", f"{_NIXL}.base_worker", "nixl_agent_config",
         ("enable_prog_thread", "sync_mode")),
    Seam("admission", "vllm.engine.protocol", "EngineClient.notify_kv_transfer_request_rejected",
         ("request_id", "kv_transfer_params")),
    *(
        Seam("ends of requests", f"{_NIXL}.base_worker", f"NixlBaseConnectorWorker.{method}", parameters)
        for method, parameters in (
            ("add_remote_agent", ("nixl_agent_meta", "remote_tp_rank", "remote_tp_size", "remote_dcp_size")),
            ("_compute_desc_ids", ("block_ids", "dst_num_blocks", "block_size_ratio", "physical_blocks_per_logical",
                                   "region_num_blocks", "region_group_ids", "uses_region_group_mapping")),
            ("_cleanup_remote_engine", ("engine_id", "log_eviction")),
            ("_logical_to_kernel_block_ids", ("block_ids", "ratio")),
            ("_get_new_notifs", ()),
            ("_handle_heartbeat", ("payload",)),
        )
    ),
    *(
        Seam("ends of requests", f"{_NIXL}.base_scheduler", f"NixlBaseConnectorScheduler.{method}", parameters)
        for method, parameters in (
            ("on_new_request", ("request",)),
            ("get_exchange_clipped_blocks", ("block_ids",)),
            ("set_xfer_handshake_metadata", ("metadata",)),
        )
    ),
    Seam("ends of requests", "vllm.v1.core.sched.scheduler", "Scheduler._handle_failed_recving", ("failed_req_ids",)),
    *(
        Seam("accounting", f"{_NIXL}.{module}", f"{name}.{method}", parameters)
        for module, name in (("pull_scheduler", "NixlPullConnectorScheduler"),
                             ("push_scheduler", "NixlPushConnectorScheduler"))
        for method, parameters in (
            ("on_new_request", ("request",)),
            ("get_num_new_matched_tokens", ("request", "num_computed_tokens")),
            ("update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
            ("build_connector_meta", ("scheduler_output",)),
            ("update_connector_output", ("connector_output",)),
            ("request_finished", ("request", "block_ids")),
        )
    ),
)  # fmt: skip


def check(platform: str, *, with_connector: bool) -> None:
    """Refuse to start where pdkv would not know what it does. Called by each growable worker before it does anything.

    Args:
        platform: "cpu" or "cuda".
        with_connector: whether the engine has a KV connector, whose seams are checked too.

    Raises:
        SeamError: an unknown version, a version with a growable cache of its own, or a seam that is not where it was.
    """
    import vllm

    check_version(vllm.__version__, platform)
    check_no_growth_of_its_own()
    of_platform = CPU_SEAMS if platform == "cpu" else ()
    for seam in ENGINE_SEAMS + of_platform + (CONNECTOR_SEAMS if with_connector else ()):
        check_seam(seam, vllm.__version__)
    if not patches.installed():
        raise SeamError(
            "the pdkv plug-in is not loaded in this vLLM process, so the engine would not learn the final block count; "
            "unset VLLM_PLUGINS or add pdkv to it."
        )


def check_version(version: str, platform: str) -> None:
    """Raise SeamError unless the seams have been run on this version and platform."""
    minor = ".".join(version.split(".")[:2])
    if platform in SUPPORTED.get(minor, ()):
        return
    known = ", ".join(f"{known} on {' and '.join(platforms)}" for known, platforms in SUPPORTED.items())
    raise SeamError(
        f"pdkv has not been run on vLLM {version} on {platform}; known are {known}. Install one of these, or add the "
        "version to pdkv_connectors/vllm/compat.py after its tests pass."
    )


def check_no_growth_of_its_own() -> None:
    """Raise SeamError where vLLM brings a growable KV cache: two of them would each commit memory for the other.

    Names to look for: upstream's development calls it extensible, its worker method `extend_kv_cache`.
    """
    from vllm.config import CacheConfig
    from vllm.v1.worker.gpu_worker import Worker

    names = [field.name for field in fields(CacheConfig)] if is_dataclass(CacheConfig) else dir(CacheConfig)
    own = [name for name in names if "extensible" in name or "growable" in name]
    if hasattr(Worker, "extend_kv_cache") or own:
        raise SeamError(
            f"this vLLM has a growable KV cache of its own ({', '.join(own) or 'Worker.extend_kv_cache'}); leave the "
            "memory to it: start it with its own worker class (without --worker-cls) and a stock connector."
        )


def check_seam(seam: Seam, version: str) -> None:
    """Raise SeamError unless the seam exists and takes the parameters that pdkv passes."""
    where = f"vLLM {version}, seam '{seam.purpose}': {seam.module}.{seam.path}"
    try:
        found: Any = importlib.import_module(seam.module)
        for name in seam.path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{where} is gone ({error}); this version needs a change in pdkv_connectors/vllm.") from error
    if seam.parameters is None:
        return
    missing = [name for name in seam.parameters if name not in inspect.signature(found).parameters]
    if missing:
        raise SeamError(
            f"{where} no longer takes {', '.join(missing)} but {inspect.signature(found)}; this version needs a change "
            "in pdkv_connectors/vllm."
        )
