"""Is a save due at this step? Pure: the answer depends on the arguments alone."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSchedule:
    """The steps after which a run saves."""

    interval: int
    """Save whenever the step is a multiple of this."""

    first_step: bool = False
    """Save after step 1 as well, to find out early that saving works."""

    load_only: bool = False
    """Never save."""

    def is_due(self, step: int, *, last_step: bool = False) -> bool:
        """Whether to save after ``step``; the last step is always saved."""
        if self.load_only:
            return False
        if last_step or (self.first_step and step == 1):
            return True
        return step % self.interval == 0
