"""What a user can set, and how it is set: config classes, recipes, the command line, overrides.

recipe function -> config <- command line (manager) ; config -> build (configurable) | replace (override)
"""

import torch

TORCH_DTYPE_MAP = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

# After the map, so that a module of this package could use it.
from torchtitan.config.configs import (  # noqa: E402
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.configurable import Configurable  # noqa: E402
from torchtitan.config.function import Function  # noqa: E402
from torchtitan.config.override import (  # noqa: E402
    apply_overrides,
    clear_overrides,
    derive,
    Override,
    override,
)

__all__ = [
    "CommConfig",
    "CompileConfig",
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
