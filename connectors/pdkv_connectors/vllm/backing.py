"""The seam "back the tensors": vLLM allocates its whole KV cache by one `torch.zeros(n, dtype=int8)`.

vLLM enters a context of the worker's choice around that call (`Worker._maybe_get_memory_pool_context("kv_cache")`).
The context given here answers exactly that one call with a tensor over the reservation, which takes no memory beyond
what has been committed. vLLM then builds its views over it as it always does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pdkv.errors import SeamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdkv.kvcache import GrowableKVCache


class ServeFromReservation(TorchFunctionMode):
    """Answers the one allocation of the KV cache from `cache`; all else passes through."""

    def __init__(self, cache: GrowableKVCache) -> None:
        super().__init__()
        self._cache = cache
        self.served = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._is_the_allocation(args, kwargs):
            self.served += 1
            return self._cache.raw_tensor()
        return func(*args, **kwargs)

    def _is_the_allocation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return len(args) == 1 and args[0] == self._cache.bytes_reserved and kwargs.get("dtype") is torch.int8

    def require_served_once(self) -> None:
        """Raise unless vLLM allocated exactly one KV cache, of exactly the reserved size, inside the context.

        Raises:
            SeamError: the engine allocated its KV cache in another way; it would run on memory pdkv does not know.
        """
        if self.served != 1:
            raise SeamError(
                f"vLLM should have allocated its KV cache by one torch.zeros({self._cache.bytes_reserved}, dtype=int8) "
                f"but did so {self.served} times; this version needs a change in pdkv_connectors/vllm/backing.py."
            )
