"""What our modules rely on in torch_checkpointing, as tests that say which module to look at."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

VERSION = "0.1.1"
"""The one that all of this was read in."""


def relied_on_by(*modules: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the failure of a test of the library name what of ours goes wrong with it."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def checked(*arguments: Any, **keywords: Any) -> None:
            try:
                test(*arguments, **keywords)
            # What pytest.raises fails with is no Exception.
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(
                    f"torch_checkpointing is not as it was in {VERSION}; look at "
                    + ", ".join(f"torchtitan/components/checkpointer/{name}" for name in modules)
                    + f" before going on: {error!r}"
                ) from error

        return checked

    return mark


def attributes_used(function: Any, owner: str = "self") -> set[str]:
    """The names behind ``owner.`` in the source of ``function``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner
    }


def parameters_of(function: Any) -> list[str]:
    """The names that ``function`` can be given, in order."""
    return [name for name in inspect.signature(function).parameters if name != "self"]
