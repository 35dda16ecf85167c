"""What a manager sees in its folder: the checkpoints of its back end and of all others.

The hooks that tell a checkpoint of the back end from everything else are declared here; a manager
supplies them. This class only reads.

    hooks of a manager + formats.other_finders -> Finder -> OwnFolder -> starting.py, housekeeping.py
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from torchtitan.components.checkpointer import discovery
from torchtitan.components.checkpointer.discovery import Finder, Kind, OwnFolder
from torchtitan.components.checkpointer.formats import Format, other_finders
from torchtitan.components.checkpointer.state import MODEL
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.tools import filesystem


class FolderView(ABC):
    """A base of the managers, see the top of the file."""

    FORMAT: ClassVar[Format | None] = None
    """How its checkpoints are told from those of other back ends; see formats.py."""

    folder: str
    _storage: MovingStorage

    _damaged: Mapping[str, str] = MappingProxyType({})
    """What is wrong with the paths in the folder that were tried in vain since the last load began."""

    @abstractmethod
    def _parse_step(self, filename: str) -> tuple[int, bool] | None:
        """The step that a directory name stands for and whether it is a staging name."""

    @abstractmethod
    def _is_valid_checkpoint(self, checkpoint_id: str) -> bool:
        """Whether the completion marker of this backend is in the directory."""

    def _kind_of(self, checkpoint_id: str) -> Kind:
        """What a complete checkpoint holds; a backend that can tell overrides this."""
        return Kind.FULL

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return filesystem.join(folder or self.folder, discovery.step_name(step))

    def _finder(self) -> Finder:
        return Finder(
            storage=self._storage,
            parse=self._parse_step,
            is_complete=self._is_valid_checkpoint,
            kind_by_index=self._kind_of,
            backend=self.FORMAT.backend if self.FORMAT else type(self).__name__,
            others=other_finders(self.FORMAT, self._storage, self._full_keys()),
        )

    def _full_keys(self) -> frozenset[str]:
        """The state keys of which a full checkpoint holds some, and one of weights none."""
        states = getattr(self, "states", {})
        return frozenset(key for key, it in states.items() if key != MODEL and it is not None)

    def _own_folder(self) -> OwnFolder:
        return self._finder().look_into(self.folder, self._damaged)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest complete step of this back end in ``folder`` (default: the own one), or -1."""
        return max(self._finder().look_into(folder or self.folder).own_steps(), default=-1)
