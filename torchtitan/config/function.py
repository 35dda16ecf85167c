"""A plain function where a configurable object is expected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchtitan.config.configurable import Configurable

R = TypeVar("R")


class Function(Generic[R], Configurable):
    """Calls the function that its config names: ``Function.Config(fn=f).build()(x) == f(x)``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which function to call."""

        fn: Callable[..., Any]
        """The function; set in code only."""

    def __init__(self, config: Config) -> None:
        self.fn: Callable[..., R] = config.fn

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self.fn(*args, **kwargs)
