"""What a pickle gets in the place of the classes and functions that it asks for.

A stand-in makes a value of what it is given and does nothing else, and a pickle can give it no
attribute. So reading a pickle with stand-ins runs nothing of what the pickle names.

    contents.py, screening.py (the index of DCP) -> stand_in
"""

import pickle
from collections.abc import Callable
from typing import Any

RULE = "and a checkpoint holds data, not programs"
"""The end of what is said about a pickle that wants more."""


class Closed(type):
    """A class that takes no attribute, which a pickle may give to what it has on its stack."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes {cls.__name__}, {RULE}")


def stand_in(name: str, make: Callable[..., Any]) -> type:
    """A class called ``name`` that gives ``make(*args)`` when a pickle calls it."""
    return Closed(name, (), {"__slots__": (), "__new__": lambda cls, *args: make(*args)})
