"""What a run starts from, chosen by rank 0 and followed by all ranks.

base.load -> _load of the manager -> _choose_start -> source.find_start
"""

from typing import Any

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.folder_view import FolderView
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.source import find_start, Request, Source, Start
from torchtitan.components.checkpointer.state import TRAIN_STATE


class Starting(FolderView):
    """A base of the managers, see the top of the file."""

    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    exclude_from_loading: list[str]
    sd_adapter: Any
    verify: str = "full"
    on_damaged: str = "fallback"

    _run: RunDescription | None = None
    """What the trainer has told about the run, for the manifests of its checkpoints."""

    _loaded_step: int | None
    _history_settled: bool

    def _choose_start(self, step: int) -> Start:
        """What to load, and the line to log about it; the same on all ranks."""
        request = Request(
            load_step=step,
            initial_load_path=self.initial_load_path,
            initial_load_model_only=self.initial_load_model_only,
            initial_load_in_hf=self.initial_load_in_hf,
            initial_load_in_hf_quantized=self.initial_load_in_hf_quantized,
            hf_assets_path=getattr(self.sd_adapter, "hf_assets_path", None),
        )

        start = rank_zero_decides(lambda: find_start(request, self._own_folder(), self._finder()))
        # The run counts its steps from 0 when it takes over only weights (a seed has no more), or
        # everything but the step: whatever is beyond then belongs to another history.
        counts_on = TRAIN_STATE not in self.exclude_from_loading
        source = start.source
        self._loaded_step = source.step or 0 if source is not None and counts_on else 0
        self._history_settled = False
        return start

    def _verification(self, source: Source) -> Verification:
        """How to check the files of ``source`` while they are read; rank 0 has looked. Collective.

        Raises:
            CheckpointDamagedError, CheckpointMismatchError: as ``Verification.begin``, on all ranks.
        """
        mode = Verify(self.verify)
        return rank_zero_decides(
            lambda: Verification.begin(self._storage, source.path, mode, step=source.step)
        )
