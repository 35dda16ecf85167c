"""Describe a function so that a changed one is noticed.

What filters and processors make is cached and counted in saved positions, so a fingerprint has to
cover the functions that a recipe passes in. The one fact to know: it covers the body, defaults and
captured values of a function, not the other functions that it calls. Values are written so that every
process writes them alike: in the repr of a set the order, in that of many objects an address differs.

    function -> syntax tree of its source, else its code -> digest -> fingerprint of the data
"""

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

# As the repr that every object inherits has it.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def describe_function(function: Callable[..., Any]) -> str:
    """A line that changes with what ``function`` does; comments and formatting do not count.

    Raises ValueError for objects that cannot be told apart from changed ones.
    """
    describe = getattr(function, "describe", None)
    if callable(describe):
        return str(describe())
    if isinstance(function, functools.partial):
        inner = describe_function(function.func)
        return f"partial({inner}, {_value(function.args)}, {_value(function.keywords)})"
    if isinstance(function, MethodType):
        return f"{describe_function(function.__func__)} of {_value(function.__self__)}"
    if isinstance(function, type) or inspect.isbuiltin(function):
        return f"{function.__module__}.{function.__qualname__}"
    if not isinstance(function, FunctionType):
        raise ValueError(
            f"{function!r} is a {type(function).__name__}, and nothing tells when it changes. Use a "
            "function, or give it a method describe() that returns a text of all that decides its "
            "output."
        )
    captured = [_value(cell.cell_contents) for cell in function.__closure__ or ()]
    defaults = [_value(value) for value in function.__defaults__ or ()]
    if function.__kwdefaults__:
        defaults.append(_value(function.__kwdefaults__))
    body = hashlib.sha256(_body(function).encode()).hexdigest()[:16]
    return f"{function.__qualname__} {body} {captured} {defaults}"


def _value(value: Any) -> str:
    """What decides ``value``, the same in every process. Raises ValueError for an object that hides it."""
    if callable(value):
        return describe_function(value)
    # The latter is a tokenizer's.
    for name in ("describe", "fingerprint"):
        if callable(tell := getattr(value, name, None)):
            return str(tell())
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(_value, value))}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_value(key)}: {_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} [{', '.join(map(_value, value))}]"
    # The repr of these two leaves out what is long.
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return f"array {value.dtype} {value.shape} {content}"
    text = repr(value)
    if _ADDRESS.search(text):
        raise ValueError(
            f"a function of the data holds {text}, of which nothing tells when it changes. Hold plain "
            "values instead, or give the object a method describe() that returns a text of all that decides "
            "the output."
        )
    return text


def _body(function: FunctionType) -> str:
    # A lambda's source is the whole statement around it, with the others in it.
    if function.__name__ != "<lambda>":
        try:
            return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(function))))
        except (OSError, TypeError, SyntaxError):
            pass
    return _code(function.__code__)


def _code(code: CodeType) -> str:
    constants = [
        _code(item) if isinstance(item, CodeType) else _value(item) for item in code.co_consts
    ]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
