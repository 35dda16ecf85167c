"""Describe a function so that a changed one is noticed.

What filters and processors make is cached and counted in saved positions, so a fingerprint has to
cover the functions that a recipe passes in. The one fact to know: it covers the body, defaults and
captured values of a function, not the other functions that it calls.

    function -> syntax tree of its source, else its code -> digest -> fingerprint of the data
"""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any


def describe_function(function: Callable[..., Any]) -> str:
    """A line that changes with what ``function`` does; comments and formatting do not count.

    Raises ValueError for objects that cannot be told apart from changed ones.
    """
    describe = getattr(function, "describe", None)
    if callable(describe):
        return str(describe())
    if isinstance(function, functools.partial):
        inner = describe_function(function.func)
        return f"partial({inner}, {function.args!r}, {sorted(function.keywords.items())!r})"
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
    body = hashlib.sha256(_body(function).encode()).hexdigest()[:16]
    return f"{function.__qualname__} {body} {captured} {defaults}"


def _value(value: Any) -> str:
    return describe_function(value) if callable(value) else repr(value)


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
        _code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts
    ]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
