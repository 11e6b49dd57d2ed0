"""A NIXL agent that refuses what is not committed.

NIXL validates nothing at registration: a range without memory, or one over several chunks, is accepted, and then kills
the engine or moves wrong data. So the check is made before NIXL sees the range (I5, I6). Nor does it report it in all
places when no file descriptor is left, so that a peer is refused before it would take the last ones.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pdkv.kvcache import find_extent
from pdkv_connectors.descriptors import require_to_connect

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache


class GuardedAgent:
    """Stands in front of a `nixl_agent`; all but registration and new peers passes through.

    Args:
        agent: the real NIXL agent.
        cache: the cache whose committed prefix is all that may be registered.
    """

    def __init__(self, agent: Any, cache: GrowableKVCache) -> None:
        self._agent = agent
        self.cache = cache
        self._lock = threading.Lock()
        self.registered: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    @property
    def unguarded(self) -> Any:
        """The real NIXL agent."""
        return self._agent

    def add_remote_agent(self, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Meet a peer.

        Raises:
            TransportError: too few file descriptors are left for that; NIXL has not been called.
        """
        require_to_connect("one more peer of the NIXL agent")
        return self._agent.add_remote_agent(metadata, *args, **kwargs)

    def register_memory(self, reg_list: Any, *args: Any, **kwargs: Any) -> Any:
        """Register ranges, each of which must lie in one extent of the committed prefix.

        Raises:
            ExtentError: a range is outside the committed prefix or crosses a chunk; NIXL has not been called.
        """
        ranges = [(int(entry[0]), int(entry[1])) for entry in _entries(reg_list)]
        extents = self.cache.extents()
        for address, nbytes in ranges:
            find_extent(extents, address, nbytes)
        result = self._agent.register_memory(reg_list, *args, **kwargs)
        with self._lock:
            self.registered.extend(ranges)
        return result

    def deregister_memory(self, dereg_list: Any, *args: Any, **kwargs: Any) -> Any:
        """Forget ranges that :meth:`register_memory` has registered."""
        ranges = [(int(entry[0]), int(entry[1])) for entry in _entries(dereg_list)]
        result = self._agent.deregister_memory(dereg_list, *args, **kwargs)
        with self._lock:
            for entry in ranges:
                if entry in self.registered:
                    self.registered.remove(entry)
        return result


def _entries(descriptors: Any) -> list[Any]:
    """The entries of a Python list or of NIXL's own descriptor list, which has no iterator but a count and an index."""
    if isinstance(descriptors, (list, tuple)):
        return list(descriptors)
    return [descriptors[index] for index in range(descriptors.descCount())]
