"""The toy model of the processes: what the KV of a prompt is, byte for byte, and the token that follows from it."""

from __future__ import annotations

from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import open_driver
from pdkv.testing.faults.memory import next_token, true_kv

LAYERS = 3
NUM_BLOCKS = 40
BLOCK_TOKENS = 16
#: 4 heads of 32 float32 of K and of V: pages of 16 KiB.
SPEC = AttentionSpec(num_kv_heads=4, block_size=BLOCK_TOKENS, head_size=32, dtype="float32")
POISON = -77.0


def num_blocks_of(num_tokens: int) -> int:
    """Blocks of a prompt."""
    return -(-num_tokens // BLOCK_TOKENS)


def page(prompt: str, index: int, layer: int) -> bytes:
    """The KV of one block of a prompt in one layer: finite float32, of which no two are alike by design."""
    import numpy as np

    seed = int.from_bytes(true_kv(f"{prompt}/{layer}", index), "little")
    numbers = np.random.default_rng(seed).random(SPEC.page_bytes // 4, dtype=np.float32)
    return numbers.tobytes()


def true_token(prompt: str, num_tokens: int, step: int) -> int:
    """What the model says after the prompt, if all of its KV is right."""
    blocks = range(num_blocks_of(num_tokens))
    return next_token((page(prompt, index, layer) for index in blocks for layer in range(LAYERS)), step)


class ToyCache:
    """A real cache on the host with the toy model's KV."""

    def __init__(self) -> None:
        config = KVCacheConfig.uniform([f"layer.{index}" for index in range(LAYERS)], SPEC, NUM_BLOCKS)
        self.cache = GrowableKVCache(config, open_driver("host", granule=1 << 16))
        self.cache.commit(NUM_BLOCKS, defragment=True)
        self._views = list(self.cache.views().values())

    def write(self, prompt: str, index: int, block: int) -> None:
        """Compute one block of the prompt."""
        import torch

        for layer, view in enumerate(self._views):
            numbers = torch.frombuffer(bytearray(page(prompt, index, layer)), dtype=torch.float32)
            view[block].copy_(numbers.view(view[block].shape))

    def token(self, blocks: list[int], step: int) -> int:
        """What the model says of what these blocks hold now."""
        pages = (view[block].contiguous().numpy().tobytes() for block in blocks for view in self._views)
        return next_token(pages, step)

    def poison(self, blocks: tuple[int, ...]) -> None:
        """They belong to nobody any more, and hold what nobody's prompt holds."""
        for view in self._views:
            for block in blocks:
                view[block].fill_(POISON)
