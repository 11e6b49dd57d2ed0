"""What one block of one layer holds.

A page is a block ``[H, N, C]``: heads, states (tokens, unless they are compressed), and content in bytes. Specs know
pages only. Where pages lie is the business of :mod:`pdkv.kvcache.config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index as as_integer
from typing import TYPE_CHECKING, Literal

from pdkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: How the bytes of one head lie in a page. "tokens": C bytes for each of the N tokens. "columns": K as a matrix
#: [head size, N], then V as [N, head size]. "heads": nothing is known but that each head's bytes lie together.
#: "opaque": nothing at all.
Interior = Literal["tokens", "columns", "heads", "opaque"]

#: Bytes per element, by torch's names. A table of our own, so that planning a cache needs no torch.
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}

#: Numbers that a spec may leave out.
_OPTIONAL = frozenset({"head_size_v", "page_bytes_padded"})


def dtype_name(dtype: str | torch.dtype) -> str:
    """``"bfloat16"`` for ``"bfloat16"``, ``"torch.bfloat16"`` or ``torch.bfloat16``.

    Raises:
        ConfigError: no KV cache can hold such elements.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEM_BYTES:
        raise ConfigError(f"a KV cache cannot hold elements of type {name!r}; use one of {', '.join(_ITEM_BYTES)}.")
    return name


def item_bytes(dtype: str | torch.dtype) -> int:
    """Bytes of one element of `dtype`."""
    return _ITEM_BYTES[dtype_name(dtype)]


def require_block_multiple(block_size: int, multiple_of: int) -> int:
    """`block_size` (tokens), if it is a positive multiple of `multiple_of`.

    Raises:
        ConfigError: it is not; the message names the nearest sizes that are.
    """
    if block_size > 0 and multiple_of > 0 and block_size % multiple_of == 0:
        return block_size
    below = block_size // multiple_of * multiple_of if multiple_of > 0 else 0
    nearest = " or ".join(str(size) for size in (below, below + multiple_of) if size > 0)
    raise ConfigError(
        f"a block of {block_size} tokens is not a positive multiple of {multiple_of}; use {nearest} tokens."
    )


class Spec:
    """What all specs have: the page's shape ``[H, N, C]``, its element type, and room that may be added at its end."""

    #: Tokens in a block.
    block_size: int
    #: torch's name of the element type after construction; None for pages of bytes.
    dtype: str | torch.dtype | None
    #: Room for one page in bytes, where the engine asks for more than the page's dense size.
    page_bytes_padded: int | None

    if TYPE_CHECKING:  # real ones would be taken for the defaults of a dataclass's fields

        @property
        def num_heads(self) -> int:
            """H: heads per page."""

        @property
        def num_states(self) -> int:
            """N: states per page, one per token unless tokens are compressed."""

        @property
        def content_bytes(self) -> int:
            """C in bytes: what one head keeps of one state."""

    @property
    def interior(self) -> Interior:
        """How the bytes of a head lie in a page."""
        return "tokens"

    @property
    def dense_page_bytes(self) -> int:
        """Bytes of a page without padding: ``H * N * C``."""
        return self.num_heads * self.num_states * self.content_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes, padding included."""
        return self.page_bytes_padded or self.dense_page_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 1 for pages of bytes."""
        return 1 if self.dtype is None else item_bytes(self.dtype)

    def _require_whole(self) -> None:
        """Refuse numbers that are not whole, before anything is computed from them: nan is neither large nor small."""
        for what, value in list(vars(self).items()):
            if what in ("dtype", "interior") or (value is None and what in _OPTIONAL):
                continue
            try:
                object.__setattr__(self, what, as_integer(value))
            except TypeError:
                raise ConfigError(f"{type(self).__name__} needs a whole number as {what}, not {value!r}.") from None

    def _check(self) -> None:
        """Normalise `dtype` and refuse what can be no page. The numbers have been seen to be whole."""
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        name = type(self).__name__
        for what in ("block_size", "num_heads", "num_states", "content_bytes"):
            if getattr(self, what) <= 0:
                raise ConfigError(f"{name} needs a positive {what}, not {getattr(self, what)}.")
        if self.content_bytes % self.item_bytes:
            raise ConfigError(
                f"{name}: {self.content_bytes} bytes of content are no whole number of {self.dtype} elements of "
                f"{self.item_bytes} bytes; correct content_bytes or dtype."
            )
        if self.page_bytes_padded is None:
            return
        if self.page_bytes_padded < self.dense_page_bytes or self.page_bytes_padded % self.item_bytes:
            raise ConfigError(
                f"{name}: page_bytes_padded is {self.page_bytes_padded}, but a page takes {self.dense_page_bytes} "
                f"bytes in elements of {self.item_bytes}; give at least that, in whole elements."
            )


@dataclass(frozen=True)
class PageSpec(Spec):
    """A page by its bare shape, for engines that have specs of their own. `dtype` None leaves it as bytes."""

    num_heads: int
    num_states: int
    content_bytes: int
    block_size: int
    dtype: str | torch.dtype | None = None
    page_bytes_padded: int | None = None
    interior: Interior = "tokens"

    def __post_init__(self) -> None:
        self._require_whole()
        self._check()


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """Full attention; K and V of one token and head lie side by side, so that ``C = head_size + head_size_v``."""

    num_kv_heads: int
    block_size: int
    head_size: int
    dtype: str | torch.dtype
    #: Elements of V, where they are not as many as of K.
    head_size_v: int | None = None
    page_bytes_padded: int | None = None

    def __post_init__(self) -> None:
        self._require_whole()
        if self.head_size <= 0 or (self.head_size_v is not None and self.head_size_v < 0):
            raise ConfigError(
                f"{type(self).__name__} needs a positive head_size and a head_size_v of at least 0, "
                f"not {self.head_size} and {self.head_size_v}."
            )
        self._check()

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def num_states(self) -> int:
        return self.block_size

    @property
    def content_bytes(self) -> int:
        head_size_v = self.head_size if self.head_size_v is None else self.head_size_v
        return (self.head_size + head_size_v) * item_bytes(self.dtype)


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention over the last `sliding_window` tokens; its pages are those of full attention."""

    sliding_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self._require_whole()
        if self.sliding_window <= 0:
            raise ConfigError(f"SlidingWindowSpec needs a positive sliding_window, not {self.sliding_window}.")
        super().__post_init__()


@dataclass(frozen=True)
class MLASpec(Spec):
    """Multi-head latent attention: one latent vector of `head_size` elements per state, shared by all heads, no V."""

    block_size: int
    head_size: int
    dtype: str | torch.dtype
    page_bytes_padded: int | None = None
    #: Tokens that one stored state stands for.
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        self._require_whole()
        require_block_multiple(self.block_size, self.tokens_per_state)
        self._check()

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def num_states(self) -> int:
        return self.block_size // self.tokens_per_state

    @property
    def content_bytes(self) -> int:
        return self.head_size * item_bytes(self.dtype)
