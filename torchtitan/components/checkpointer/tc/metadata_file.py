"""Read ``metadata.pkl`` without running what it may hold.

torch_checkpointing writes a pickle of dicts, lists and plain values there, and unpickles whatever it
finds: a file from elsewhere could make it call anything. Here a pickle that names a class or a
function is refused. Nothing of that package is imported, so settings can be checked without it.
"""

import io
import pickle
from typing import Any

from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.tc.index import MARKER


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module_name}.{global_name}, and the index of a checkpoint holds no code"
        )


def parse_metadata(checkpoint_id: str, content: bytes) -> dict[str, Any]:
    """``content`` of the file as the plain dict that it holds.

    Raises:
        CheckpointReadError: it is damaged, or holds anything but plain values.
    """
    advice = "if it is damaged, move it away."
    try:
        metadata = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # Damaged pickles raise whatever their bytes happen to spell: KeyError, EOFError, ...
        raise CheckpointReadError(
            f"The index {checkpoint_id}/{MARKER} cannot be read: {error!r}. The path must be one "
            f"checkpoint, a step-N directory; {advice}"
        ) from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("metadata"), dict):
        raise CheckpointReadError(
            f"The index {checkpoint_id}/{MARKER} is not one that torch_checkpointing writes; {advice}"
        )
    return metadata


def read_metadata(checkpoint_id: str) -> dict[str, Any]:
    """``parse_metadata`` of the file in the local directory ``checkpoint_id``.

    Raises:
        CheckpointReadError: it is not there, or as above.
        OSError: the disk does not let it be read now, which says nothing about the checkpoint.
    """
    try:
        with open(f"{checkpoint_id}/{MARKER}", "rb") as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointReadError(
            f"There is no index {checkpoint_id}/{MARKER}. The path must be one checkpoint, a step-N "
            "directory."
        ) from error
    return parse_metadata(checkpoint_id, content)
