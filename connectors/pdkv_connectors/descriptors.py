"""Room for what UCX opens, made sure of before it is called.

Where no file descriptor is left UCX does not report an error in all places: in some it ends the process (SIGABRT in
`thread.c` and `ucp_worker.c`, of NIXL's UCX and of ucxx's), and an engine with all its requests goes with it.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

from pdkv.errors import TransportError

logger = logging.getLogger(__name__)

#: What a NIXL agent, or ucxx, opens as it starts, with a margin: 16 and 21 were counted on a machine without an RDMA
#: device, each of which adds event channels and queues of its own.
STARTING = 64
PER_RDMA_DEVICE = 16
#: What one more peer takes, with a margin: 3 (NIXL) and 5 (ucxx) were counted.
CONNECTING = 16
#: Up to which the soft limit is raised, where the hard one allows it: hundreds of engines' peers.
ENOUGH = 65_536
_OPEN = "/proc/self/fd"
_RDMA_DEVICES = Path("/sys/class/infiniband")


def require_to_start(what: str) -> None:
    """Raise the soft limit, since peers will connect as well, and refuse to start where even then too few are left.

    Raises:
        TransportError: see above; names what is left.
    """
    _raise_limit()
    devices = len(list(_RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else 0
    _require(STARTING + PER_RDMA_DEVICE * devices, what)


def require_to_connect(what: str) -> None:
    """Refuse to meet one more peer where too few are left.

    Raises:
        TransportError: see above; names what is left.
    """
    _require(CONNECTING, what)


def spare() -> int:
    """How many more descriptors this process may open."""
    limit = _soft_limit()
    try:
        numbers = [int(name) for name in os.listdir(_OPEN)]
    except OSError:  # none is left even for looking
        return 0
    return limit - sum(number < limit for number in numbers) + 1  # one of them was for looking


def _require(wanted: int, what: str) -> None:
    if (left := spare()) < wanted:
        raise TransportError(
            f"{what} may take {wanted} file descriptors and {left} of {_soft_limit()} are left; raise the limit "
            "(`ulimit -n`, or LimitNOFILE= of the service) and start again."
        )


def _soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:  # a sandbox may forbid it; whether it matters shows in what is left
        logger.warning("The limit of open files stays at %d: it cannot be raised to %d (%s).", soft, wanted, error)
    else:
        logger.info("The limit of open files of this process was raised from %d to %d.", soft, wanted)
