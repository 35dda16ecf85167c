"""Before a save through torch_checkpointing: the ranks tell each other all that they have to, at once.

Training waits for each time that all ranks meet. Once nothing changes any more but values, they meet
once: each has taken its state, left to others what those write, and taken apart the rest to be staged.

    items_of, Backend.look, prepare -> gather -> settle -> what this rank writes
                                         |-> new to somebody: exchange.py (gather), prepare, settle (gather)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.endings import agreed_failure, Ending, ending_of, Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned.settling import Report, report_of, settle, Stager
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.components.checkpointer.tc.payload import Items, repeated

Prepare = Callable[[dict[str, Any]], None]
"""Takes apart what is to be staged; what is wrong with it the stager notes."""


class Handover(NamedTuple):
    """What the ranks have agreed on."""

    payload: dict[str, Any]
    """What this rank writes."""
    verdict: Verdict
    can_capture: bool
    """Whether each rank could take its state for a thread to go on with."""


class _Told(NamedTuple):
    failure: str | None
    ending: Ending
    digests: dict[str, bytes | None]
    is_known: bool
    report: Report | None
    can_capture: bool


def hand_over(
    take: Callable[[], Items],
    backend: Backend,
    stager: Stager | None,
    *,
    prepare: Prepare | None,
    earlier: CheckpointSaveError | None,
    group: "dist.ProcessGroup | None",
    asked: str,
    can_capture: bool = False,
) -> Handover:
    """Agree on a save of what ``take`` gives, before which the previous one ended with ``earlier``.

    What several ranks have alike is staged by all of them, where it is small, and written by one.
    Collective over ``group``; a failure of one rank is raised on all.

    Args:
        stager: None if training waits for each save.
        prepare: None if nothing is staged this time.
        asked: begins the error that tells what failed.
        can_capture: whether this rank could take its state for a thread to go on with.

    Raises:
        CheckpointSaveError: the state of some rank cannot be had, or could not be read back.
        ValueError: ranks have different tensors under one name.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    items, is_known, failure = _looked_at(take, backend, rank)
    if isinstance(earlier, CheckpointSaveTimeoutError):
        prepare = None  # nothing begins beside it, and what is prepared keeps tensors alive

    share = backend.metadata.share_of(items.values) if is_known else {}
    if is_known and prepare is not None:
        prepare(share)
    needs_writer = prepare is not None
    report = None if stager is None else report_of(stager, earlier, needs_writer=needs_writer)
    own = _Told(failure, ending_of(earlier), items.digests, is_known, report, can_capture)
    found = gather(own, group)
    if failures := [told.failure for told in found if told.failure is not None]:
        raise CheckpointSaveError(
            f"{asked} failed: {failures[0].rstrip('.')}. Older checkpoints are untouched."
        )
    everybody_knows = all(told.is_known for told in found)
    backend.metadata.agree(is_known=everybody_knows)
    reports = [told.report for told in found if told.report is not None]
    if not everybody_knows:
        share = backend.metadata.share_of(items.values)
        reports = None
        if prepare is not None:
            prepare(share)
    written = repeated([told.digests for told in found], rank)
    agreed = agreed_failure(earlier, [told.ending for told in found])
    verdict = Verdict(agreed, can_stage=False)
    if stager is not None:
        verdict = settle(stager, earlier, group, needs_writer=needs_writer, reports=reports)
    payload = {key: value for key, value in share.items() if key not in written}
    return Handover(payload, verdict, all(told.can_capture for told in found))


def _looked_at(
    take: Callable[[], Items], backend: Backend, rank: int
) -> tuple[Items, bool, str | None]:
    """What ``take`` gives, whether its tensors are as they were, and what went wrong with either."""
    items = Items({}, {})
    try:
        items = take()
        return items, backend.look(items.values, items.tensors), None
    except Exception as error:  # of any object in the state
        return items, False, f"rank {rank}: {error}"
