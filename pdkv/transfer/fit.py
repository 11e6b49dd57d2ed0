"""Whether two caches fit together, and which layers of one belong to which of the other."""

from __future__ import annotations

from collections.abc import Iterator

from pdkv.errors import GeometryError
from pdkv.transfer.geometry import CacheGeometry, LayerRun


def first_difference(ours: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """What keeps bytes of one cache from meaning the same in the other, as one sentence; None where nothing does.

    Where layers and blocks lie may differ: layout as far as the order inside of a page is the same, paddings, chunks,
    number of blocks.
    """
    return model_difference(ours, theirs) or _page_difference(ours, theirs)


def model_difference(ours: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """Whether the two have other groups or layers, which no transport can convert; one sentence, or None."""
    if len(ours.groups) != len(theirs.groups):
        return f"the peer has {len(theirs.groups)} KV-cache groups and this engine {len(ours.groups)}."
    for number, (our, their) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        if our != their:
            return (
                f"the layers of KV-cache group {number} differ: the peer has {their.num_layers} from {their.first!r} "
                f"on, this engine {our.num_layers} from {our.first!r} on."
            )
    return None


def require_same_bytes(ours: CacheGeometry, theirs: CacheGeometry) -> None:
    """Refuse a peer whose cache needs conversion.

    Raises:
        GeometryError: see :func:`first_difference`.
    """
    if (difference := first_difference(ours, theirs)) is not None:
        raise GeometryError(
            f"{difference} This transport copies bytes as they are: give both engines the same block size, layout and "
            "tensor parallelism, or run them on one machine over ipc, which converts."
        )


def paired_runs(ours: CacheGeometry, theirs: CacheGeometry, group: int) -> Iterator[tuple[LayerRun, LayerRun]]:
    """The layers of a group in pairs of runs of equal `count`, for two caches of the same layers."""
    left, right = list(ours.runs_of(group)), list(theirs.runs_of(group))
    while left and right:
        count = min(left[0].count, right[0].count)
        yield left[0].part(0, count), right[0].part(0, count)
        for runs in (left, right):
            if runs[0].count == count:
                runs.pop(0)
            else:
                runs[0] = runs[0].part(count, runs[0].count - count)


def _page_difference(ours: CacheGeometry, theirs: CacheGeometry) -> str | None:
    for group in range(len(ours.groups)):
        for our, their in paired_runs(ours, theirs, group):
            for name in (
                "dtype",
                "num_heads",
                "num_states",
                "block_size",
                "content_nbytes",
                "heads_outside",
                "interior",
            ):
                wanted, found = getattr(our, name), getattr(their, name)
                if wanted != found:
                    where = f"{name} of KV-cache group {group} is {found!r} on the peer and {wanted!r} here"
                    return f"{where} (layouts {theirs.layout} and {ours.layout})."
    return None
