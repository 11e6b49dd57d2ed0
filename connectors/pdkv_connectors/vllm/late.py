"""What growth asks of a KV connector that vLLM creates early and pdkv builds late."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv.kvcache import GrowableKVCache
    from pdkv_connectors.vllm.status import StatusFile


class BuiltLate(ABC):
    """Mixed into connector classes; :mod:`pdkv.lifecycle` then asks what its protocols say."""

    @staticmethod
    @abstractmethod
    def warmup_metadata() -> Any:
        """What a hand-built scheduler step carries for this connector: nothing to load, nothing to send."""

    @abstractmethod
    def build(self, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
        """The cache has its final size; build what :meth:`register_kv_cache` is going to register."""

    @abstractmethod
    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        """Register the committed blocks; from here on the connector is live."""

    @abstractmethod
    def report_to(self, status: StatusFile) -> None:
        """Where to say what operators should know of this rank; called before :meth:`build`."""

    @abstractmethod
    def finish_fixed(self, status: StatusFile) -> None:
        """Build and register over a cache that cannot grow, or refuse it with the reason."""

    @property
    @abstractmethod
    def agent(self) -> Any:
        """The NIXL agent whose bandwidth is to be probed; None where there is none, or it is probed elsewhere."""
