"""A run without a trainer: every shape of setting that a real one has, and recipes good and bad."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import tyro
from torchtitan.config import Configurable, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.violations import reject


class Saver(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        """Whether to save."""

        interval: int = 5
        """Steps between two saves."""

        exclude: list[str] = field(default_factory=list)
        """Keys to leave out."""

        def __post_init__(self) -> None:
            if self.interval < 1:
                reject(f"saver.interval is {self.interval}; it must be at least 1. Raise it.")

    def __init__(self, config: Config) -> None:
        self.config = config


class AsyncSaver(Saver):
    @dataclass(kw_only=True, slots=True)
    class Config(Saver.Config):
        async_mode: str = "disabled"
        """How saves overlap with training."""


class Full(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        debug: bool = False
        """Say more."""


class MemoryBudget(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        memory_budget: float = 0.5
        """Share of the memory that may be used."""


Policy = (
    Annotated[Full.Config, tyro.conf.subcommand(name="full")]
    | Annotated[MemoryBudget.Config, tyro.conf.subcommand(name="memory-budget")]
    | Annotated[None, tyro.conf.subcommand(name="none")]
)


class Strict(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1
        """Raises by itself, as a class of a user may, if it is not positive."""

        def __post_init__(self) -> None:
            if self.size <= 0:
                raise ValueError("size must be positive")


class Run(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        hidden: Annotated[Any, tyro.conf.Suppress] = None
        hf_assets_path: str = "tests"
        """Folder of the tokenizer."""

        hook: Callable[[], None] | None = None
        """Called by nobody."""

        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        saver: Saver.Config = field(default_factory=AsyncSaver.Config)
        strict: Strict.Config = field(default_factory=Strict.Config)
        override: OverrideConfig = field(default_factory=OverrideConfig)
        memory_policy: Policy = field(default_factory=Full.Config)

    def __init__(self, config: Config) -> None:
        self.config = config


def small() -> Run.Config:
    return Run.Config(training=TrainingConfig(steps=7))


def broken() -> Run.Config:
    return replace(small(), training=TrainingConfig(steps=-3))


def broken_inside() -> Run.Config:
    return replace(small(), hidden=Saver.Config(interval=-1))


def saving() -> Run.Config:
    saver = AsyncSaver.Config(enable=True, interval=7, exclude=["a"], async_mode="async")
    return replace(small(), saver=saver)


def in_trouble() -> Run.Config:
    raise ValueError("trouble of the recipe's own")


def no_config() -> str:
    return "small"


class Upper:
    """No recipe: it does not begin with a lower-case letter."""
