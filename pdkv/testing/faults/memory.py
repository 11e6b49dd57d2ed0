"""A simulated KV pool: bytes in blocks, owners, chunks registered one by one, and an agent that can be rebuilt.

Blocks that are freed are given out again first, and hold other bytes from then on: whoever still reads or writes them
is found out.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

BLOCK_NBYTES = 16
BLOCKS_PER_CHUNK = 8


class PoolError(Exception):
    """A block was freed twice, or by someone who does not own it."""


class SimMemory:
    """The pool of one engine. Block 0 is the null block and never given out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.agent = 0  # another number for each agent there ever was: keys of an old one are worth nothing
        self.bad_chunks: set[int] = set()  # registered without an error, but transfers fail
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owner: dict[int, str] = {}
        self._data = [b"\0" * BLOCK_NBYTES] * num_blocks
        self._poison = 0

    @property
    def num_leaked(self) -> int:
        """Blocks that are not in the pool."""
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int, owner: str) -> list[int] | None:
        """`count` blocks, or None where there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owner[block] = owner
        return blocks

    def free(self, blocks: Iterable[int], owner: str) -> None:
        """Back to the pool.

        Raises:
            PoolError: not the owner's.
        """
        for block in blocks:
            if self._owner.pop(block, None) != owner:
                raise PoolError(f"block {block} was freed by {owner!r}, who does not own it")
            self._poison += 1
            self._data[block] = self._poison.to_bytes(BLOCK_NBYTES, "little")
            self._free.append(block)

    def owner(self, block: int) -> str | None:
        return self._owner.get(block)

    def read(self, block: int) -> bytes:
        return self._data[block]

    def write(self, block: int, data: bytes) -> None:
        self._data[block] = data

    def is_bad(self, block: int) -> bool:
        """Whether transfers of this block fail although its chunk was registered without an error."""
        return block // BLOCKS_PER_CHUNK in self.bad_chunks


def true_kv(prompt: str, index: int) -> bytes:
    """What the KV of one block of a prompt is."""
    return blake2b(f"{prompt}/{index}".encode(), digest_size=BLOCK_NBYTES).digest()


def next_token(kv: Iterable[bytes], step: int) -> int:
    """The toy model: a hash of all KV bytes that it sees, so that any wrong byte changes the output."""
    digest = blake2b(step.to_bytes(4, "little"), digest_size=8)
    for block in kv:
        digest.update(block)
    return int.from_bytes(digest.digest(), "little")
