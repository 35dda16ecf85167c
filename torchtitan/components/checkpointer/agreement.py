"""Let rank 0 look at the disk and every rank follow.

On a shared folder two ranks can list different contents a moment apart. What a rank decides by
itself would then send ranks to different checkpoints, or leave one waiting for the others.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import cast, TypeVar

import torch.distributed as dist

from torchtitan.tools.errors import portable

T = TypeVar("T")


def rank_zero_decides(decide: Callable[[], T], group: "dist.ProcessGroup | None" = None) -> T:
    """The value of ``decide()`` on rank 0, on every rank; what it raises, every rank raises.

    A collective over ``group`` (default: all ranks) where a process group exists, otherwise a
    plain call. The value must survive pickling.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return decide()
    verdict: list[tuple[T | None, BaseException | None]] = [(None, None)]
    own_error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            verdict = [(decide(), None)]
        except Exception as error:  # whatever it is, every rank raises it
            own_error = error
            verdict = [(None, portable(error, "on rank 0"))]
    try:
        dist.broadcast_object_list(verdict, src=0, group=group)
    except RuntimeError:
        # The other ranks may have given up by now; why they had to wait says more than that.
        if own_error is None:
            raise
    if own_error is not None:
        raise own_error
    value, error = verdict[0]
    if error is not None:
        raise error
    # Rank 0 put T here whenever it did not put an error.
    return value  # pyrefly: ignore[bad-return]


def own_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A gloo group of all ranks beside training's, whose collectives may come in any order. Collective."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    # A cast, because new_group answers with a number on ranks that are not members.
    return cast(dist.ProcessGroup, group)


def renewed(group: "dist.ProcessGroup | None", timeout_seconds: float) -> dist.ProcessGroup:
    """Another ``own_group`` in the place of ``group``, which nobody uses any more. Collective."""
    dist.destroy_process_group(group)
    return own_group(timeout_seconds)


def gather(value: T, group: "dist.ProcessGroup | None" = None) -> list[T]:
    """The ``value`` of every rank, in rank order; just this one without a process group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
