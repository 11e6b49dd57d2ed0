"""Peers that a session is connecting to, and the transfers with them that wait for that."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.errors import PdkvError
from pdkv.transfer.actions import PostRead, PostWrite
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.messages import EngineRef, TransferKey

Post = PostRead | PostWrite


@dataclass(slots=True)
class _Meeting:
    peer: EngineRef
    connecting: Connecting
    posts: list[Post] = field(default_factory=list)


class Meetings:
    """One for each engine."""

    def __init__(self) -> None:
        self._by_engine: dict[str, _Meeting] = {}

    def __bool__(self) -> bool:
        """Whether any peer is being connected to."""
        return bool(self._by_engine)

    def begun(self, peer: EngineRef, connecting: Connecting) -> None:
        """Poll this one from now on."""
        self._by_engine[peer.engine_id] = _Meeting(peer, connecting)

    def poll(self) -> list[tuple[EngineRef, PdkvError | None, list[Post]]]:
        """Who is connected now, or why not, and what waited for it."""
        ended: list[tuple[EngineRef, PdkvError | None, list[Post]]] = []
        for engine_id, meeting in list(self._by_engine.items()):
            error = None
            try:
                if not meeting.connecting.poll():
                    continue
            except PdkvError as found:
                error = found
            del self._by_engine[engine_id]
            ended.append((meeting.peer, error, meeting.posts))
        return ended

    def awaits(self, peer: EngineRef) -> bool:
        """Whether this peer, in just this generation, is being connected to."""
        meeting = self._by_engine.get(peer.engine_id)
        return meeting is not None and meeting.peer == peer

    def put_off(self, action: Post) -> bool:
        """Have a transfer wait for its peer; False where that is not being connected to."""
        if not self.awaits(action.peer):
            return False
        self._by_engine[action.peer.engine_id].posts.append(action)
        return True

    def forget(self, key: TransferKey) -> bool:
        """Whether the transfer waited, and does no longer."""
        for meeting in self._by_engine.values():
            for action in meeting.posts:
                if action.key == key:
                    meeting.posts.remove(action)
                    return True
        return False

    def leave(self, engine_id: str) -> list[Post]:
        """Give an engine up; what waited for it."""
        meeting = self._by_engine.pop(engine_id, None)
        if meeting is None:
            return []
        meeting.connecting.abandon()
        return meeting.posts

    def clear(self) -> None:
        """The transport is gone, and has abandoned all."""
        self._by_engine.clear()
