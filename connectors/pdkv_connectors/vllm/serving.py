"""The handshake that vLLM's side channel serves: replaced when an agent is, and withdrawn while an engine sleeps.

vLLM 0.32 serves what it was given first for as long as it lives; 0.33 replaces it, and tells stock peers by a counter.
A pdkv peer has a generation in pdkv's own messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.logger import init_logger

from pdkv.errors import ConnectorError
from pdkv_connectors.vllm.nixl_workers import EndsPushWorker
from pdkv_connectors.vllm.settings import sleeps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(f"vllm.{__name__}")

#: Served in place of a compatibility hash while there is nothing to connect to; a stock peer shows it in its error.
WITHDRAWN = "none: this engine is asleep and has no KV cache; wake it first"
#: Before the listener listens anew after a message that ended it.
PAUSE_S = 0.05


class ServingScheduler:
    """Mixed in before a stock NIXL scheduler."""

    engine_id: str
    side_channel_host: str
    side_channel_port: int

    #: What was published last, by rank, as the workers gave it; how often it has changed.
    _published: Mapping[tuple[int, int], bytes] = {}
    _changes = 0
    _cannot_listen: zmq.ZMQError | None = None
    #: Called in every step of the engine.
    on_step: Callable[[], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._served: dict[tuple[int, int], bytes] = {}
        super().__init__(*args, **kwargs)

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Serve these payloads from now on; where they have changed, under another engine id.

        A stock peer keeps an agent for as long as it hears of the same engine. It reads the id in the parameters of
        each request, takes another one for another engine, and meets that.

        Raises:
            ConnectorError: the first time, where the side channel cannot listen.
        """
        published = {rank: payload.agent_metadata_bytes for rank, payload in metadata.items()}
        if self._published and published != self._published:
            self._changes += 1
            self.engine_id = f"{self.engine_id.partition('#')[0]}#{self._changes}"
        self._published = published
        if self._changes:
            metadata = {rank: _renamed(payload, self.engine_id) for rank, payload in metadata.items()}
        super().set_xfer_handshake_metadata(metadata)  # type: ignore[misc]
        if self._cannot_listen is not None:
            raise ConnectorError(
                f"vLLM's side channel cannot listen on {self.side_channel_host}:{self.side_channel_port}: "
                f"{zmq.strerror(self._cannot_listen.errno)}; end what listens there, or set "
                "VLLM_NIXL_SIDE_CHANNEL_PORT (of pdkv's launcher: --side-channel-port) to a port that is free."
            ) from self._cannot_listen
        for rank, payload in metadata.items():
            self._served[rank] = msgspec.msgpack.encode(payload)

    def _nixl_handshake_listener(
        self, encoded_data: dict[tuple[int, int], bytes], ready: threading.Event, stop: threading.Event, *where: Any
    ) -> None:
        """The stock listener's thread; what it serves is kept, to be replaced in place.

        The stock one ends with the first message that it cannot read, after which nobody could meet this engine any
        more; and where it cannot listen its engine would wait for it for ever.
        """
        self._served = encoded_data
        while not stop.is_set():
            try:
                super()._nixl_handshake_listener(encoded_data, ready, stop, *where)  # type: ignore[misc]
            except zmq.ZMQError as error:
                if not ready.is_set():
                    self._cannot_listen = error
                    ready.set()
                    return
                logger.warning("pdkv: vLLM's side channel listens anew after an error of its socket: %s", error)
            except Exception as error:
                logger.warning(
                    "pdkv: vLLM's side channel got a message that is no handshake (%s: %s).",
                    type(error).__name__,
                    error,
                )
            stop.wait(PAUSE_S)

    def withdraw_handshake(self) -> None:
        """Refuse handshakes until the next :meth:`set_xfer_handshake_metadata`."""
        payload = msgspec.msgpack.encode(NixlHandshakePayload(WITHDRAWN, b""))
        for rank in list(self._served):
            self._served[rank] = payload

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        if self.on_step is not None:
            self.on_step()
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]


def _renamed(payload: NixlHandshakePayload, engine_id: str) -> NixlHandshakePayload:
    """The payload of an engine that calls itself `engine_id`."""
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes)
    metadata["engine_id"] = engine_id
    return NixlHandshakePayload(payload.compatibility_hash, msgspec.msgpack.encode(metadata))


class SleepingPushWorker(EndsPushWorker):
    """Push, which refuses stock peers where this engine may sleep.

    The stock writer registers with an agent, and writes to one, that may be gone or stand for other memory by then; and
    a stock peer says no generation by which that could be seen.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._may_sleep = sleeps(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _refuses(self, engine_id: str) -> bool:
        if self._may_sleep:
            logger.error(
                "pdkv: engine %s speaks the stock protocol; push with sleep needs pdkv on both sides. Use pull, "
                "or start this engine without sleep.", engine_id,
            )  # fmt: skip
        return self._may_sleep

    def _send_registration_to_p(self, req_id: str, reg_data: dict[str, Any]) -> None:
        """D: the request fails."""
        if self._refuses(reg_data["remote_engine_id"]):
            self._failed_recv_reqs.put(req_id)
            return
        super()._send_registration_to_p(req_id, reg_data)

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        """P: nothing is written; the blocks come free with their lease."""
        if not self._refuses(registration_data["decode_engine_id"]):
            super()._do_start_push_kv(request_id, local_block_ids, registration_data)
