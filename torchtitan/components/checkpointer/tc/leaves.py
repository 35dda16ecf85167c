"""The flat names of what lies in a nested state: those that DCP's index has, whatever is nested how.

{"a": {"b": 1}} of the item ``extra`` -> extra.a.b
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.state import MODEL
from torchtitan.components.checkpointer.tensor_memory import local_part

Nested = tuple[str | int, ...]
"""Where something lies in the state dict of an item."""

_CONTAINERS = (Mapping, list)
_DEEP = (*_CONTAINERS, torch.Tensor)

# An optimizer has thousands of these, and to ask whether something is a Mapping takes long.
_SURELY_LEAVES = frozenset(
    (bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter, DTensor)
)


def leaves(tree: Any, nested: Nested = ()) -> Iterator[tuple[Nested, Any]]:
    """(where, what) of all that is not a container; a list of plain values is one value, as in DCP."""
    if isinstance(tree, Mapping):
        entries: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(one, _DEEP) for one in tree):
        entries = enumerate(tree)
    else:
        yield nested, tree
        return
    for key, value in entries:
        if type(value) not in _SURELY_LEAVES and isinstance(value, _CONTAINERS):
            yield from leaves(value, (*nested, key))
        else:
            yield (*nested, key), value


def tensor_bytes(tree: Any) -> int:
    """About how long the elements of all tensors in ``tree`` are that are this rank's.

    For what payload.py has let pass, all of which are strided; tied ones count twice.
    """
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    return sum(local_part(tensor).nbytes for tensor in tensors)


def path_of(key: str, nested: Nested) -> Nested:
    """Where it lies in a checkpoint, in which the entries of the model stand at the top."""
    return nested if key == MODEL else (key, *nested)


def name_of(key: str, nested: Nested) -> str:
    """The path, written with dots."""
    return ".".join(str(part) for part in path_of(key, nested))


def require_distinct_names(key: str, tree: Any) -> None:
    """Check that no two leaves of the item ``key`` have one name; a load would fill one of them.

    Raises:
        ValueError: names those that have.
    """
    found: dict[str, Nested] = {}
    clashes = []
    for nested, _ in leaves(tree):
        name = name_of(key, nested)
        if (other := found.setdefault(name, nested)) != nested:
            clashes.append(f"{name} ({list(other)} and {list(nested)})")
    if clashes:
        raise ValueError(
            f"it has two entries of one name, once they are written with dots: {', '.join(sorted(clashes))}. "
            "Rename one of them"
        )
