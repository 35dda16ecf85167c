"""Write a nested state so that DCP keeps all of it, and read it back. Pure.

DCP stores the leaves of nested dicts under dotted names, and so forgets what has no leaf (an empty
dict), turns every key into a string, and stores a tuple with tensors as one opaque value. Such
containers are written as dicts with a marked key; all others, and all leaves, stay as they are.

    {}             {"!empty": None}
    {3: x}         {"!3": x}                     (also None, bool and float keys, tuples of these)
    (tensor, 1)    {"!tuple": [tensor, 1]}
"""

import ast
import copy
from collections.abc import Mapping
from typing import Any

import torch

_MARK = "!"
_EMPTY = "!empty"
_TUPLE = "!tuple"


def encode(value: Any) -> Any:
    """``value`` with containers of its own; tensors are the same objects, other leaves copies.

    A list that goes on growing while a snapshot is written therefore does not change the snapshot.

    Raises:
        TypeError: a dict has a key that cannot be written as a literal.
    """
    if isinstance(value, Mapping):
        return {_encode_key(key): encode(item) for key, item in value.items()} or {_EMPTY: None}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple and _holds_more_than_values(value):
        return {_TUPLE: [encode(item) for item in value]}
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def decode(value: Any) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, dict):
        if value.keys() == {_EMPTY}:
            return {}
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        # Of a dict that is empty on one rank and holds something on another, both are read.
        return {_decode_key(key): decode(item) for key, item in value.items() if key != _EMPTY}
    return [decode(item) for item in value] if type(value) is list else value


def _holds_more_than_values(container: tuple[Any, ...] | list[Any]) -> bool:
    return any(
        isinstance(item, (torch.Tensor, Mapping))
        or (type(item) in (tuple, list) and _holds_more_than_values(item))
        for item in container
    )


def _encode_key(key: Any) -> str:
    if isinstance(key, str) and not key.startswith(_MARK):
        return key
    text = repr(key)
    try:
        is_literal = ast.literal_eval(text) == key
    except (ValueError, SyntaxError):
        is_literal = False
    if not is_literal:
        raise TypeError(
            f"a state to save has the key {text}; its dicts may have strings, numbers, None and "
            "tuples of these as keys. Use one of them instead."
        )
    return _MARK + text


def _decode_key(key: Any) -> Any:
    if not isinstance(key, str) or not key.startswith(_MARK):
        return key
    return ast.literal_eval(key.removeprefix(_MARK))
