"""A NIXL agent as pdkv wants it: no thread that spins, locks instead, gone when it is told to go."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pdkv.errors import PdkvError, TransportError
from pdkv_connectors.descriptors import require_to_start
from pdkv_connectors.environment import environment

#: NIXL's kind of memory by the name of pdkv's driver.
MEMORY = {"host": "DRAM", "cuda": "VRAM", "hip": "VRAM"}


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no base class of their own, into a TransportError."""
    try:
        yield
    except PdkvError:
        raise
    except Exception as error:
        raise TransportError(f"NIXL could not {what}: {type(error).__name__}: {error}.") from error


def make_agent(engine_id: str, variables: Mapping[str, str]) -> Any:
    """An agent under a name that no other one has: peers keep what they know of its predecessor apart.

    Without a progress thread, which takes 60-70 % of a core while nothing happens; so transfers and peers go on only
    when the agent is called. With locks, since it may be polled from another thread than the engine's.

    Args:
        variables: UCX's settings by their names; UCX reads its environment when the agent is made.

    Raises:
        TransportError: NIXL is not installed, cannot start, or has too few file descriptors left to.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise TransportError(f"the nixl transport needs the package nixl, which cannot be imported: {error}") from error
    config = nixl_agent_config(
        enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT, backends=["UCX"]
    )
    require_to_start("a NIXL agent")
    with translated("make an agent"), environment(variables):
        return nixl_agent(f"{engine_id[:64]}-{secrets.token_hex(8)}", config)


def destroy_agent(holder: list[Any]) -> None:
    """Destroy the agent that is the one entry of `holder`; the caller holds no other reference to it.

    Only this stops what the agent is doing and what peers do with its memory.
    """
    holder.clear()
    gc.collect()
