"""Everything that can be wrong with a checkpoint on disk.

    CheckpointError                  catch this one for "the checkpoints are the problem"
      CheckpointNotFoundError        nothing there to load (also a FileNotFoundError)
      CheckpointMismatchError        it holds another model or other state (also a ValueError)
      CheckpointReadError            it is there and cannot be read
        CheckpointDamagedError       it is there and is not what was saved
      CheckpointSaveError            a save failed; names step and path
        CheckpointSaveTimeoutError   it took too long and may still be running
      CheckpointInUseError           another run is alive in the folder

Wrong settings are plain ``ValueError`` and found before any of this runs.
"""


class CheckpointError(RuntimeError):
    """A checkpoint could not be found, read, matched or written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint where one was asked for."""

    # FileNotFoundError formats itself from (errno, strerror); this one is a plain sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The keys or shapes of a checkpoint differ from those of this run."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that should be complete could not be read."""


class CheckpointDamagedError(CheckpointReadError):
    """A checkpoint, or a file of it, is not what was saved; an older one may do."""


class CheckpointSaveError(CheckpointError):
    """A save did not become durable; older checkpoints are untouched."""

    was_raised = False
    """Somebody on some rank was told of it between two saves, so it must not be raised at the next one."""


class CheckpointSaveTimeoutError(CheckpointSaveError):
    """A save was given up. It may still be running, so no other one may begin."""


class CheckpointInUseError(CheckpointError):
    """Another run that is alive, or may be, holds the folder; nothing was written there."""


def cause_of(error: BaseException) -> str:
    """What went wrong, in short: DCP's error holds that of each rank that failed, with its stack."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return _said(error)
    return "; ".join(f"rank {rank}: {_said(it)}" for rank, (it, _) in sorted(failures.items()))


def _said(error: BaseException) -> str:
    # Its repr leaves the path out.
    is_of_a_path = isinstance(error, OSError) and error.filename is not None
    return f"{type(error).__name__}({error})" if is_of_a_path else repr(error)


def error_of_system(error: BaseException) -> OSError | None:
    """What the operating system has said that led to ``error``, if it has."""
    link: BaseException | None = error
    seen = set[int]()
    # Whoever raises an error again from what it has led to makes a ring of them.
    while link is not None and id(link) not in seen:
        if isinstance(link, OSError):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None
