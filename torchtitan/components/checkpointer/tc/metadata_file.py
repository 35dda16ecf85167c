"""Read ``metadata.pkl`` without running what it may hold.

torch_checkpointing writes a pickle of dicts, lists and plain values there, and unpickles whatever it
finds: a file from elsewhere could make it call anything. Here a pickle that names a class or a
function is refused, and so is the name of a class among its values: the library would import its
module. Nothing of that package is imported, so settings can be checked without it.
"""

import io
import pickle
from typing import Any

from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.tc.index import MARKER


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise _refusal(f"{module_name}.{global_name}")


def _refusal(name: Any) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"it asks for {name}, and the index of a checkpoint holds no code"
    )


def _require_no_names_of_classes(tree: Any) -> None:
    if isinstance(tree, dict):
        # How the library describes a file of JSON that is to become an object.
        if tree.get("type") == "JsonSerialization" and tree.get("cls") is not None:
            raise _refusal(tree["cls"])
        for value in tree.values():
            _require_no_names_of_classes(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _require_no_names_of_classes(value)


def parse_metadata(checkpoint_id: str, content: bytes) -> dict[str, Any]:
    """``content`` of the file as the plain dict that it holds.

    Raises:
        CheckpointDamagedError: it is damaged, or holds anything but plain values.
    """
    advice = "if it is damaged, move it away."
    try:
        metadata = _PlainUnpickler(io.BytesIO(content)).load()
        _require_no_names_of_classes(metadata)
    except Exception as error:
        # Damaged pickles raise whatever their bytes happen to spell: KeyError, EOFError, ...
        raise CheckpointDamagedError(
            f"The index {checkpoint_id}/{MARKER} cannot be read: {error!r}. The path must be one "
            f"checkpoint, a step-N directory; {advice}"
        ) from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("metadata"), dict):
        raise CheckpointDamagedError(
            f"The index {checkpoint_id}/{MARKER} is not one that torch_checkpointing writes; {advice}"
        )
    return metadata


def read_metadata(checkpoint_id: str) -> dict[str, Any]:
    """``parse_metadata`` of the file in the local directory ``checkpoint_id``.

    Raises:
        CheckpointDamagedError: it is not there, or as above.
        OSError: the disk does not let it be read now, which says nothing about the checkpoint.
    """
    try:
        with open(f"{checkpoint_id}/{MARKER}", "rb") as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamagedError(
            f"There is no index {checkpoint_id}/{MARKER}. The path must be one checkpoint, a step-N "
            "directory."
        ) from error
    return parse_metadata(checkpoint_id, content)
