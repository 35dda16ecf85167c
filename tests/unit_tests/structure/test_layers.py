"""The layers of the package, on the real tree and on planted violations."""

import pytest

from tests.unit_tests.structure.layers import (
    imports_of,
    place_of,
    SIDEWAYS,
    sideways_pair,
    violations_of,
)
from tests.unit_tests.structure.sources import module_name, ROOT, tracked_files

SOURCES = {
    module_name(path): (ROOT / path).read_text() for path in tracked_files("torchtitan/*.py")
}
MODULES = frozenset(SOURCES)


def test_every_module_imports_only_what_stands_below_it() -> None:
    found = [line for name in MODULES for line in violations_of(name, SOURCES[name], MODULES)]
    assert not found, "\n".join(sorted(found))


def test_every_allowed_sideways_import_is_used() -> None:
    used = set()
    for name, source in SOURCES.items():
        place = place_of(name)
        assert place is not None
        for imported in imports_of(source, MODULES):
            used.add(sideways_pair(place[1], imported.target))
    assert not set(SIDEWAYS) - used


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("torchtitan.tools.utils", "import torchtitan.config", "a layer above"),
        ("torchtitan.tools.utils", "from torchtitan import config", "a layer above"),
        ("torchtitan.config.manager", "from torchtitan.tools import profiler", "a layer above"),
        ("torchtitan.distributed.fsdp", "from torchtitan.protocols.model import M", "above"),
        ("torchtitan.protocols.model", "from torchtitan.models.common import x", "a layer above"),
        ("torchtitan.models.common.rope", "import torchtitan.models.llama3.model", "above"),
        ("torchtitan.models.llama3.model", "import torchtitan.components.loss", "its sibling"),
        ("torchtitan.components.loss", "from torchtitan.models.llama3 import model", "its sibling"),
        ("torchtitan.models.llama3.model", "import torchtitan.models.qwen3.model", "its sibling"),
        ("torchtitan.components.loss", "from torchtitan.components import metrics", "its sibling"),
        (
            "torchtitan.components.optimizer.utils",
            "from torchtitan.components.checkpointer import base",
            "its sibling",
        ),
        ("torchtitan.trainer", "from torchtitan.preflight import check", "a layer above"),
        ("torchtitan.train", "import torchtitan.experiments.torchft", "a layer above"),
        ("torchtitan.train", "import torchtitan.models.llama3.config_registry", "its sibling"),
        ("torchtitan.components.loss", "from . import metrics", "relative import"),
        ("torchtitan.components.loss", "from .metrics import x", "relative import"),
        ("torchtitan.trainer", "def f():\n    import torchtitan.config", "in a function"),
        (
            "torchtitan.trainer",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torchtitan.config",
            "under a condition",
        ),
        (
            "torchtitan.trainer",
            "try:\n    import torchtitan.config\nfinally:\n    pass",
            "condition",
        ),
        ("torchtitan.trainer", "from tests.ranks import pool", "users do not have"),
        ("torchtitan_extra", "import torch", "belongs to no layer"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    modules = MODULES | {
        "torchtitan.tools.profiler",
        "torchtitan.components.metrics",
        "torchtitan.components.checkpointer.base",
        "torchtitan.models.llama3.model",
        "torchtitan.config",
    }
    found = violations_of(module, source, modules)
    assert len(found) == 1, found
    assert complaint in found[0]
    assert found[0].startswith(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("torchtitan.config.manager", "from torchtitan.tools.logging import logger"),
        (
            "torchtitan.components.checkpointer.dcp",
            "import torchtitan.components.checkpointer.base",
        ),
        (
            "torchtitan.components.optimizer.utils",
            "from torchtitan.components.checkpointer.utils import canonical_fqn",
        ),
        ("torchtitan.components.validate", "from torchtitan.components.data.loader import x"),
        ("torchtitan.models.llama3.model", "from torchtitan.models.common import rope"),
        ("torchtitan.models.llama3.config_registry", "from torchtitan.trainer import Trainer"),
        ("torchtitan.train", "import torch\nfrom torchtitan.preflight import check"),
        ("torchtitan.trainer", "def f():\n    import numpy"),
    ],
)
def test_an_import_that_the_rules_allow_passes(module: str, source: str) -> None:
    assert violations_of(module, source, MODULES) == []
