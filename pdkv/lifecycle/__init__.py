"""The order in which a cache and its connector act. Engine-agnostic: an engine supplies the steps that are its own.

A connector may be registered only with memory that stays where it is, and a cache may replace memory only while no
connector has it registered. So every transition of the cache's memory goes through this package:

- :func:`extend`, once, at the end of a start-up: from the blocks that warmup needed to all that there is room for;
- :func:`grow_live`, while an engine serves: more blocks, with everything that the cache holds kept;
- :func:`sleep` and :func:`wake`: give all memory back, and take it again;
- :func:`kv_cache_lent_for_weight_update`: the same around the loading of weights, where room is short.

Which of them is allowed when is one table, in :mod:`pdkv.lifecycle.states`. The KV transfer connector is created by
:func:`extend` and not before. Connectors copy the number of blocks in their constructors and register memory once.
"""

from __future__ import annotations

from pdkv.lifecycle.contracts import (
    AgreeMinimum,
    ConnectorFactory,
    Rebind,
    RegistersKVCache,
    ServesPeers,
    SleepsWithPeers,
    SystemClock,
    WaitingClock,
)
from pdkv.lifecycle.extending import ExtendReport, extend
from pdkv.lifecycle.growing import GrowReport, grow_live
from pdkv.lifecycle.lending import (
    WEIGHT_UPDATE_FACTOR,
    LendReport,
    kv_cache_lent_for_weight_update,
    largest_layer_nbytes,
)
from pdkv.lifecycle.sleeping import SleepMode, SleepReport, WakeReport, sleep, wake
from pdkv.lifecycle.states import State, StateMachine, machine_of, state

__all__ = [
    "WEIGHT_UPDATE_FACTOR",
    "AgreeMinimum",
    "ConnectorFactory",
    "ExtendReport",
    "GrowReport",
    "LendReport",
    "Rebind",
    "RegistersKVCache",
    "ServesPeers",
    "SleepMode",
    "SleepReport",
    "SleepsWithPeers",
    "State",
    "StateMachine",
    "SystemClock",
    "WaitingClock",
    "WakeReport",
    "extend",
    "grow_live",
    "kv_cache_lent_for_weight_update",
    "largest_layer_nbytes",
    "machine_of",
    "sleep",
    "state",
    "wake",
]
