"""What a run starts from: chosen by rank 0, followed by all ranks, and chosen anew when it is damaged.

A checkpoint is found to be damaged while it is read. Every rank then raises the same error, before any
object but tensors has changed, and the newest checkpoint before it is tried. Nothing is loaded rather
than something else: when all are damaged the run stops, and a step that was asked for is that or an error.

    base.load -> _load_what_passes -> _load of the manager -> _choose_start -> source.find_start
                        ^                     |                 _verification -> the read
                        +- pass over, again --+
"""

from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer import run_changes
from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.folder_view import FolderView
from torchtitan.components.checkpointer.history import renames
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.same_view import unseen, wait_for_same_view
from torchtitan.components.checkpointer.source import (
    damage_of,
    falls_back,
    find_start,
    Request,
    Source,
    Start,
    what_else,
)
from torchtitan.components.checkpointer.source_text import what_leaves
from torchtitan.components.checkpointer.state import TRAIN_STATE
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger


@contextmanager
def _looking_into(folder: str) -> Generator[None]:
    """Let a disk that does not answer be told as what it is, which is no word about a checkpoint."""
    try:
        yield
    except CheckpointError:
        raise  # one of them is a FileNotFoundError
    except OSError as error:
        raise CheckpointReadError(
            f"The checkpoints in {folder} cannot be looked at: {error}. That says nothing about them; see "
            "to the disk and start again."
        ) from error


class Starting(FolderView):
    """A base of the managers, see the top of the file."""

    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    exclude_from_loading: list[str]
    sd_adapter: Any
    load_only: bool = False
    verify: str = "full"
    timeout_seconds: float = 600
    on_damaged: str = "fallback"

    pg: "dist.ProcessGroup | None" = None
    """The group of the manager's own collectives, None for that of training."""

    _run: RunDescription | None = None
    """What the trainer has told about the run, for the manifests of its checkpoints."""

    _loaded_step: int | None
    _history_settled: bool
    _source: Source | None = None
    _verifying: Verification | None = None
    _leaving: str = ""

    @abstractmethod
    def _load(self, step: int) -> bool:
        """Load what ``_choose_start`` answers, checked by what ``_verification`` answers.

        An error has to be the same on all ranks: CheckpointDamagedError if what is on the disk is not
        what was saved, and raised before any object has been given anything but tensors.
        """

    def _has_export(self, last_step: int) -> bool:
        """Whether the weights after ``last_step`` or a later step are there and not known to be damaged."""
        with _looking_into(self.folder):
            own = self._own_folder()
            step = own.export_step()
            if step < last_step:
                return False
            path = own.step_paths[step]
            is_off = Verify(self.verify) is Verify.OFF
            damage = "" if is_off else damage_of(path, step, self._storage)
        if damage:
            # The training state before it is still there, so the steps after that make it once more.
            logger.warning(
                f"The weights after the last step have to be made again: {' '.join(damage.split())}"
            )
        return not damage

    def _load_what_passes(self, step: int) -> bool:
        """``_load``; again without what turns out to be damaged, as long as that is allowed."""
        self._damaged = {}
        while True:
            self._source, self._verifying, self._leaving = None, None, ""
            try:
                is_loaded = self._load(step)
                break
            except CheckpointDamagedError as error:
                self._pass_over(step, error)
        self._tell_what_leaves()
        if is_loaded:
            self._tell_changes()
            self._make_durable(self._source)
        self._source = self._verifying = None  # the digests would stay for the whole run
        return is_loaded

    def _make_durable(self, source: Source | None) -> None:
        """Sync the names by which the own checkpoint ``source`` is known, from which this run goes on.

        Whoever saved it may have been killed right before that. A power cut would then take the names away,
        and by that time this run may have deleted what is older.
        """
        if source is None or source.step is None or self.load_only:
            return
        if not getattr(self._storage, "has_files", False):
            return
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        try:
            filesystem.fsync_dir(source.path)
            # What waits in replaced/ is known by the name of that as well.
            for folder in dict.fromkeys((source.path.rpartition("/")[0], self.folder)):
                filesystem.fsync_dir(folder)
        except OSError as error:
            logger.warning(
                f"The names in {source.path} could not be synced: {error}. Until the next save is complete a "
                "power cut may take away what this run goes on from. Look whether the disk is in order; if it is "
                "not, keep a copy of that directory elsewhere."
            )

    def _pass_over(self, step: int, error: CheckpointDamagedError) -> None:
        source = self._source
        if source is None or source.path in self._damaged:
            raise error  # of something that was not chosen here
        if not falls_back(self._request(step), source):
            advice = rank_zero_decides(lambda: what_else(source, self.folder, self._finder()))
            raise CheckpointDamagedError(f"{error} {advice}") from error
        text = " ".join(str(error).split())
        logger.warning(f"Passing over {source.path}, which is not deleted: {text}")
        self._damaged = {**self._damaged, source.path: text}

    def _request(self, step: int) -> Request:
        return Request(
            load_step=step,
            initial_load_path=self.initial_load_path,
            initial_load_model_only=self.initial_load_model_only,
            initial_load_in_hf=self.initial_load_in_hf,
            initial_load_in_hf_quantized=self.initial_load_in_hf_quantized,
            hf_assets_path=getattr(self.sd_adapter, "hf_assets_path", None),
            on_damaged=self.on_damaged,
        )

    def _choose_start(self, step: int) -> Start:
        """What to load, and the line to log about it; the same on all ranks."""
        request = self._request(step)
        # The run counts its steps from 0 when it takes over only weights (a seed has no more), or
        # everything but the step: whatever is beyond then belongs to another history.
        counts_on = TRAIN_STATE not in self.exclude_from_loading

        def decide() -> tuple[Start, int, str]:
            with _looking_into(self.folder):
                own = self._own_folder()
                start = find_start(request, own, self._finder())
            step = start.source.step or 0 if start.source is not None and counts_on else 0
            is_moved = renames(self._storage, self.folder)
            leaving = "" if self.load_only else what_leaves(own, step, is_moved=is_moved)
            return start, step, leaving

        start, self._loaded_step, self._leaving = rank_zero_decides(decide)
        self._source = start.source
        self._history_settled = False
        return start

    def _verification(self, source: Source) -> Verification:
        """How to check the files of ``source`` while they are read; rank 0 has looked. Collective.

        Raises:
            CheckpointDamagedError, CheckpointMismatchError, CheckpointReadError: as
                ``Verification.begin``, on all ranks.
            CheckpointReadError: a machine does not see what rank 0 has seen.
        """

        def begin() -> Verification:
            mode = Verify(self.verify)
            found = Verification.begin(self._storage, source.path, mode, step=source.step)
            found.tell_if_foreign()
            return found

        # It holds every digest: tens of megabytes for a large model, which pass by no accelerator.
        self._verifying = verifying = rank_zero_decides(begin, self.pg)
        wait_for_same_view(
            lambda: unseen(
                self._storage,
                source.path,
                verifying.manifest,
                self._finder().is_complete_for_any,
            ),
            limit_seconds=self.timeout_seconds,
            group=self.pg,
        )
        return verifying

    def _tell_what_leaves(self) -> None:
        # While it can still be prevented: nothing is moved before the first save.
        if self._leaving:
            logger.warning(self._leaving)

    def _tell_changes(self) -> None:
        """Say in what the settings of this run differ from those of the one that it goes on from."""
        source, verification = self._source, self._verifying
        if source is None or source.model_only or verification is None or self._run is None:
            return
        manifest, now = verification.manifest, self._run.config
        if manifest is None or manifest.head.config is None or now is None:
            return
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        changes = run_changes.changes(manifest.head.config, now, excluded=self.exclude_from_loading)
        if changes:
            text = run_changes.told(changes, source.path)
            log = logger.warning if any(change.holds for change in changes) else logger.info
            log(text)
