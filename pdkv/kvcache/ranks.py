"""Agreement between the ranks of an engine, over a CPU group of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pdkv.kvcache.sizing import AgreeMinimum


def minimum_over(group: ProcessGroup) -> AgreeMinimum:
    """The `agree_minimum` of :mod:`pdkv.kvcache.sizing` and :func:`pdkv.lifecycle.extend` for the ranks of `group`.

    The returned function is a collective: all ranks call it, in the same order, or those that did wait until the
    group's own timeout and then raise what its backend raises.

    Args:
        group: a group whose backend works on CPU tensors, such as gloo. NCCL's does not.
    """

    def agree_minimum(value: int) -> int:
        import torch
        from torch import distributed

        least = torch.tensor([value], dtype=torch.int64)
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN, group=group)
        return int(least.item())

    return agree_minimum


__all__ = ["minimum_over"]
