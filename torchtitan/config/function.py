"""A plain function where a configurable object is expected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchtitan.config.configurable import Configurable

Result = TypeVar("Result")


class Function(Generic[Result], Configurable):
    """Calls the function that its config names: ``Function.Config(fn=f).build()(x) == f(x)``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which function to call."""

        fn: Callable[..., Any]
        """The function. It has no form on the command line: recipes set it."""

    def __init__(self, config: Config) -> None:
        # Result is known to the reader of the recipe, not to the config.
        self.fn: Callable[..., Result] = config.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """The result of the function for these arguments."""
        return self.fn(*args, **kwargs)
