"""Which requests wait on decode for KV from elsewhere, and which were refused: from the scheduler to the API server.

The two run in different processes. The scheduler replaces ``waiting.json`` in the status folder whenever a request
begins or ceases to wait; within one scheduler step it does so once. So the file is as old as the step that runs now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdkv_connectors.vllm.refusals import Refusal, refusal_of
from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.status import replace_file

logger = logging.getLogger(f"vllm.{__name__}")

NAME = "waiting"
#: So many requests are known by their keys, so that their failures can be told to who sent them, and so many refusals
#: are in the file.
MAX_KEYS = 4096
MAX_REFUSED = 128
#: So many requests that ceased to wait are remembered in the file. If more do so between two looks of a reader, it
#: takes the others for waiting until their answers begin.
MAX_SETTLED = 128


def key_of(params: Mapping[str, Any]) -> str:
    """One short key for a prefilled request, the same in both processes: what prefill calls it, hashed."""
    reference = _reference(params)
    if params.get("remote_request_id") is not None:
        name = f"{params.get('remote_engine_id')}/{params['remote_request_id']}"
    elif reference:
        name = f"{reference.get('engine')}/{reference.get('request_id')}/{reference.get('serial')}"
    else:  # of a connector that is not known here
        name = json.dumps(params, sort_keys=True, default=str)
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _reference(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """pdkv's own reference to the KV; empty where there is none."""
    found = params.get("pdkv")
    return found if isinstance(found, Mapping) else {}


def blocks_of(params: Mapping[str, Any], block_size: int) -> int:
    """Blocks that decode needs for the prompt, by what prefill says of it; 0 where it says nothing usable.

    Prefill's block size may differ, so that its tokens count where they are given, and its block ids only where not.
    """
    tokens = params.get("remote_num_tokens", _reference(params).get("num_tokens"))
    if isinstance(tokens, int) and tokens > 0:
        return -(-tokens // block_size)
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list | tuple):
        return 0
    return max((len(group) for group in groups if isinstance(group, list | tuple)), default=len(groups))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the file says.

    Attributes:
        waiting: blocks of each request that waits, by :func:`key_of`.
        settled: keys of the last requests that ceased to.
        refused: the last requests that failed by what they said of their KV, by their keys.
        num_blocks, block_size, max_num_seqs: of the engine.
    """

    waiting: Mapping[str, int]
    settled: frozenset[str]
    refused: Mapping[str, Refusal]
    num_blocks: int
    block_size: int
    max_num_seqs: int


class WaitingBook:
    """The scheduler's side of the file. Bookkeeping alone; no I/O."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, int]] = {}
        self._settled: deque[str] = deque(maxlen=MAX_SETTLED)
        self._keys: dict[str, str] = {}  # also of such that are over: vLLM ends a request before it is told why
        self._refused: dict[str, Refusal] = {}
        self.changed = True

    def arrived(self, req_id: str, params: Mapping[str, Any], block_size: int) -> None:
        """The engine has a request whose KV is to come from elsewhere."""
        key = self._keys[req_id] = key_of(params)
        _trim(self._keys, MAX_KEYS)
        self._waiting[req_id] = (key, blocks_of(params, block_size))
        self.changed = True

    def settled(self, req_id: str) -> None:
        """It waits no longer: its KV is there, or failed, or nothing of it is missing, or it has ended. Idempotent."""
        if (entry := self._waiting.pop(req_id, None)) is not None:
            self._settled.append(entry[0])
            self.changed = True

    def failed(self, req_id: str, code: str, reason: str) -> None:
        """Its KV will not come. The last failure of a key counts, whichever request of that key it was."""
        if (key := self._keys.get(req_id)) is None:
            return
        known, refusal = self._refused.pop(key, None), refusal_of(code, reason)
        if refusal is not None:
            self._refused[key] = refusal
            _trim(self._refused, MAX_REFUSED)
        self.changed = self.changed or known != refusal

    def as_dict(self) -> dict[str, Any]:
        return {
            "waiting": dict(self._waiting.values()),
            "settled": list(self._settled),
            "refused": {key: [refusal.code, refusal.reason] for key, refusal in self._refused.items()},
        }


def _trim(oldest_first: dict[str, Any], most: int) -> None:
    while len(oldest_first) > most:
        del oldest_first[next(iter(oldest_first))]


class PublishingScheduler:
    """Mixed in before a stock NIXL connector scheduler: tells who waits, and leaves all decisions to it."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)  # type: ignore[call-arg]
        self.book = WaitingBook()
        self._waiting_dir = EngineSettings.from_environment().status_dir
        self._engine_facts = {
            "num_blocks": kv_cache_config.num_blocks,
            "block_size": vllm_config.cache_config.block_size,
            "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        }
        if self._waiting_dir is not None:
            self._waiting_dir.mkdir(parents=True, exist_ok=True)
        self._publish_waiting()

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self.book.arrived(request.request_id, params, self._engine_facts["block_size"])
        super().on_new_request(request)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:  # all of it was in the prefix cache
            self.book.settled(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._publish_waiting()
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        self._publish_waiting()  # what has failed meanwhile
        return metadata

    def will_not_come(self, request_id: str, code: str, reason: str) -> None:
        """Called by the scheduler behind this one, as soon as it knows; before the client is answered."""
        self.book.failed(request_id, code, reason)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        for req_id in (*(connector_output.finished_recving or ()), *(connector_output.failed_recving or ())):
            self.book.settled(req_id)
        self._publish_waiting()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.book.settled(request.request_id)
        self._publish_waiting()  # no step need follow
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def _publish_waiting(self) -> None:
        if not self.book.changed or self._waiting_dir is None:
            return
        try:
            content = msgspec.json.encode({"pid": os.getpid(), **self._engine_facts, **self.book.as_dict()})
            replace_file(f"{self._waiting_dir}/{NAME}.json", content)
            self.book.changed = False
        except OSError as error:
            # Tried again in the next step. Meanwhile decode counts a request as waiting until its answer begins.
            logger.error("cannot write the status file %s.json to %s: %s", NAME, self._waiting_dir, error)


class WaitingFile:
    """The API server's side: what the file says now, parsed again only where it was replaced."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"{NAME}.json"
        self._seen: tuple[int, int] | None = None
        self._snapshot: Snapshot | None = None
        self.unreadable = 0

    def read(self) -> Snapshot | None:
        """The snapshot; None where there is no file (yet). One that cannot be read is counted in `unreadable`."""
        if self._path is None:
            return None
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                self._snapshot = _parse(json.loads(self._path.read_text(encoding="utf-8")))
                self._seen = seen
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.unreadable += 1
            if self.unreadable == 1:
                logger.error("cannot read the scheduler's %s: %r", self._path, error)
        return self._snapshot


def _parse(content: Any) -> Snapshot:
    return Snapshot(
        waiting={str(key): int(blocks) for key, blocks in content["waiting"].items()},
        settled=frozenset(content["settled"]),
        refused={str(key): Refusal(str(code), str(reason)) for key, (code, reason) in content["refused"].items()},
        num_blocks=int(content["num_blocks"]),
        block_size=int(content["block_size"]),
        max_num_seqs=int(content["max_num_seqs"]),
    )
