"""What a user can set, and how it is set: config classes, recipes, the command line, overrides.

recipe function -> config <- command line (manager) ; config -> build (configurable) | replace (override)
"""

import importlib
from typing import Any

import torch

from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.configurable import Configurable
from torchtitan.config.function import Function
from torchtitan.config.override import apply_overrides, clear_overrides, derive, Override, override

TORCH_DTYPE_MAP = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

__all__ = [
    "CommConfig",
    "CompileConfig",
    "ConfigManager",
    "Configurable",
    "DebugConfig",
    "Function",
    "Override",
    "OverrideConfig",
    "ParallelismConfig",
    "TORCH_DTYPE_MAP",
    "TrainingConfig",
    "apply_overrides",
    "clear_overrides",
    "derive",
    "override",
]


def __getattr__(name: str) -> Any:
    # Late, so that `python -m torchtitan.config.manager` runs the only copy of that module, and so
    # that code which never reads a command line does not import tyro's machinery with it.
    if name == "ConfigManager":
        return importlib.import_module("torchtitan.config.manager").ConfigManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
