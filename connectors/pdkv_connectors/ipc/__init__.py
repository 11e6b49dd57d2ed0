"""The ipc transport: engines of one machine copy blocks out of each other's memory, without a copy in between."""

from __future__ import annotations

from pdkv_connectors.ipc.columns import BlockColumns
from pdkv_connectors.ipc.transport import IpcTransport

__all__ = ["BlockColumns", "IpcTransport"]
