"""The flat names of what lies in a nested state: those that DCP's index has, whatever is nested how.

{"a": {"b": 1}} of the item ``extra`` -> extra.a.b
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchtitan.components.checkpointer.state import MODEL

Nested = tuple[str | int, ...]
"""Where something lies in the state dict of an item."""

_DEEP = (Mapping, list, torch.Tensor)


def leaves(tree: Any, nested: Nested = ()) -> Iterator[tuple[Nested, Any]]:
    """(where, what) of all that is not a container; a list of plain values is one value, as in DCP."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*nested, key))
    elif isinstance(tree, list) and any(isinstance(one, _DEEP) for one in tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*nested, index))
    else:
        yield nested, tree


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
