"""Steps that several transitions share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdkv.lifecycle.contracts import RegistersKVCache, ServesPeers, SleepsWithPeers

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)


def serve_again(cache: GrowableKVCache, connector: ServesPeers | SleepsWithPeers, times_s: dict[str, float]) -> None:
    """Whatever the cache is like now: register it, and only then let peers come back."""
    with timed(times_s, "register"):
        register(connector, cache)
    with timed(times_s, "publish"):
        connector.publish(cache.generation)
    connector.resume_transfers()


def register(connector: RegistersKVCache, cache: GrowableKVCache) -> None:
    """Register all, or nothing."""
    try:
        connector.register_kv_cache(cache)
    except BaseException as error:
        try:
            connector.unregister_kv_cache()
        except Exception as second:
            error.add_note(f"Dropping what had been registered failed too: {second!r}")
            logger.exception("Dropping a connector's half-made registration failed.")
        raise


@contextmanager
def timed(times_s: dict[str, float], step: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        times_s[step] = time.perf_counter() - begin
