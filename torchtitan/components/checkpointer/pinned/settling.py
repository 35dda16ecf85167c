"""Before a save: the ranks agree how the previous one ended, and whether their writers still work.

A writer process that dies fails the save on its own rank for sure; on another one the save may even
have succeeded. Ranks that then went different ways would wait for each other for ever.

Such a loss costs that save and not the run, because it says nothing about the next one: the disk is as
good as before, and new processes are at hand. It does when it happens twice in a row.
"""

from typing import NamedTuple, Protocol

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.endings import agreed_failure, Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned.meeting import (
    OtherRankFailedError,
    WriterMissingError,
)
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError
from torchtitan.distributed.failure import is_echo
from torchtitan.tools.logging import logger

WRITER_LOST = (WriterDiedError, WriterMissingError)


class Stager(Protocol):
    """What is asked of this rank's ``SharedMemoryStager``."""

    shortages: list[str]
    losses_in_a_row: int

    @property
    def has_usable_writer(self) -> bool: ...

    @property
    def lacks_room(self) -> bool: ...

    def start_writer(self) -> None: ...

    def take_room(self) -> None: ...

    def close(self) -> None: ...


class Report(NamedTuple):
    """What a rank knows before a save."""

    failure: str | None
    is_echo: bool
    is_loss: bool
    is_late: bool
    was_raised: bool
    is_usable: bool
    lacks_room: bool
    shortages: list[str]


def report_of(stager: Stager, failure: CheckpointSaveError | None, *, needs_writer: bool) -> Report:
    """What this rank tells the others; the arguments are those of ``settle``."""
    return Report(
        failure=None if failure is None else str(failure),
        is_echo=failure is not None and _is_told_by_others(failure),
        is_loss=failure is not None and isinstance(failure.__cause__, WRITER_LOST),
        is_late=isinstance(failure, CheckpointSaveTimeoutError),
        was_raised=failure is not None and failure.was_raised,
        is_usable=stager.has_usable_writer,
        lacks_room=needs_writer and stager.lacks_room,
        shortages=[*stager.shortages],
    )


def settle(
    stager: Stager,
    failure: CheckpointSaveError | None,
    group: "dist.ProcessGroup | None",
    *,
    needs_writer: bool,
    reports: list[Report] | None = None,
) -> Verdict:
    """Agree, and have all that the next save needs, or go without staging on all ranks.

    Writer processes are replaced on all ranks together, because those that live are still connected
    to the one that died. Memory is taken once all ranks have looked whether there is enough: what one
    of them took earlier would be missing for another that looks for both. Collective over ``group``.

    Args:
        failure: what this rank's previous save failed with.
        needs_writer: what follows is a save through the writer processes, or prepares for one.
        reports: those of all ranks, if they have told each other already.
    """
    if reports is None:
        reports = gather(report_of(stager, failure, needs_writer=needs_writer), group)
    agreed = agreed_failure(failure, reports)
    if isinstance(agreed, CheckpointSaveTimeoutError):
        return Verdict(agreed, can_stage=True)  # nothing may begin beside it
    shortages = [shortage for report in reports for shortage in report.shortages]
    replaces = needs_writer and not all(report.is_usable for report in reports)
    grows = any(report.lacks_room for report in reports)
    if not shortages and (replaces or grows):
        if replaces:
            stager.start_writer()
        stager.take_room()
        shortages = [shortage for found in gather([*stager.shortages], group) for shortage in found]
    if shortages:
        # The memory of one rank does not get larger by waiting, and a mode is one of all ranks.
        logger.warning(f"From now on training waits for each save: {shortages[0].rstrip('.')}.")
        stager.close()
    stager.losses_in_a_row = stager.losses_in_a_row + 1 if _is_loss(reports) else 0
    return Verdict(
        agreed,
        can_stage=not shortages,
        is_excused=agreed is not None and stager.losses_in_a_row == 1,
    )


def _is_told_by_others(failure: CheckpointSaveError) -> bool:
    return is_echo(failure) or isinstance(failure.__cause__, OtherRankFailedError)


def _is_loss(reports: list[Report]) -> bool:
    """Whether all that failed is that a writer process died, and what others felt of it."""
    failed = [report for report in reports if report.failure is not None]
    return any(report.is_loss for report in failed) and all(
        report.is_loss or report.is_echo for report in failed
    )
