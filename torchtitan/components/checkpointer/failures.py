"""Does a run go on after a save that failed? One that failed on one rank has failed on all of them.

With ``--checkpoint.on_save_failure raise`` it ends with the first one. With ``warn`` it says so and
tries again when the next save is due, until ``--checkpoint.max_failed_saves`` in a row have failed.
What only says that a process was lost, and nothing of the next save, is excused with either.

    endings.py, or a save that training waited for -> FailedSaves -> a warning | what the run ends with
"""

from dataclasses import dataclass, field

from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned.meeting import (
    OtherRankFailedError,
    OtherRankLostError,
    WriterMissingError,
)
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError
from torchtitan.distributed.failure import is_echo
from torchtitan.tools.logging import logger

FLAG = "--checkpoint.max_failed_saves"


@dataclass(kw_only=True)
class FailedSaves:
    """Those since the last save that was good."""

    goes_on: bool
    """Whether a run goes on at all after a failed save."""

    limit: int
    """With this many in a row it does not."""

    unsettled: CheckpointSaveError | None = None
    """What the previous save failed with on this rank, until the ranks have told each other."""

    is_open: bool = False
    """A save was left to the background, and the ranks have not told each other how it ended."""

    _in_a_row: list[str] = field(default_factory=list)

    def raised(self, failure: CheckpointSaveError) -> None:
        """Somebody is told of ``failure`` between two saves; at the next one the other ranks are."""
        failure.was_raised = True
        self.unsettled = failure

    def seen(self, failure: CheckpointSaveError) -> CheckpointSaveError | None:
        """This rank knows that the save in flight has failed; what is to be raised without the others.

        None where the run goes on for now, or the other ranks may have something to say to it.
        """
        self.unsettled = failure
        if not self.ends_with(failure):
            return None
        self.raised(failure)
        return self.failed(failure, newest_step=None)

    def ends_with(self, failure: CheckpointSaveError) -> bool:
        """Whether the run ends with this ``failure`` of the previous save, whatever the other ranks say."""
        is_one_more = self.goes_on and len(self._in_a_row) + 1 < self.limit
        return not is_one_more and not _may_be_excused(failure)

    def settled(
        self, failure: CheckpointSaveError | None, *, is_excused: bool, newest_step: int | None
    ) -> CheckpointSaveError | None:
        """The ranks have agreed that the previous save ended with ``failure``; what is to be raised.

        Args:
            newest_step: that of the newest good checkpoint, for the message.
        """
        was_open = self.is_open
        # What was given up may turn out to be good all the same.
        self.unsettled, self.is_open = None, isinstance(failure, CheckpointSaveTimeoutError)
        if failure is None:
            if was_open:
                self.succeeded()
            return None
        if failure.was_raised:
            # Whoever goes on after it begins anew, as the rank has done which raised it.
            self._in_a_row.clear()
            return None
        if is_excused and not self.goes_on:
            logger.warning(
                "Training goes on without that checkpoint, since it was lost with a process that wrote "
                f"it. If the next one is lost in this way as well, the run ends. {failure}"
            )
            return None
        return self.failed(failure, newest_step=newest_step)

    def failed(
        self, failure: CheckpointSaveError, *, newest_step: int | None
    ) -> CheckpointSaveError | None:
        """One more has failed, on all ranks; what is to be raised, or None after a warning."""
        if not self.goes_on:
            return failure
        self._in_a_row.append(str(failure))
        num_failed = len(self._in_a_row)
        if num_failed >= self.limit:
            return self._all_of_them(failure)
        newest = "there is none yet" if newest_step is None else f"that of step {newest_step}"
        logger.warning(
            f"{failure} Training goes on, and the next save is tried when it is due. Failed in a row: "
            f"{num_failed}; the run ends with {self.limit} ({FLAG}). The newest good checkpoint: {newest}."
        )
        return None

    def succeeded(self) -> None:
        """A save was good."""
        self._in_a_row.clear()

    def _all_of_them(self, last: CheckpointSaveError) -> CheckpointSaveError:
        told, self._in_a_row = self._in_a_row, []
        if len(told) == 1:
            return last
        lines = "".join(f"\n  {failure}" for failure in told)
        error = type(last)(f"{len(told)} saves in a row have failed, the limit of {FLAG}:{lines}")
        error.__cause__ = last
        return error


def _may_be_excused(failure: CheckpointSaveError) -> bool:
    # Of another rank that has failed, and not just lost its process, the words are enough.
    cause = failure.__cause__
    if isinstance(cause, OtherRankFailedError):
        return isinstance(cause, OtherRankLostError)
    return isinstance(cause, (WriterDiedError, WriterMissingError)) or is_echo(failure)
