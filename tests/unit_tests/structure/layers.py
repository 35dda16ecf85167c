"""Which module may import which: the order of the layers, as a table and two pure functions.

A module imports only layers below its own. Packages of one layer do not import each other, except
for the pairs in ``SIDEWAYS``, each with its reason. The functions work on source text, so that a
planted violation is a test case like any other.

    source text -> imports_of -> violations_of (LAYERS, SIDEWAYS) -> one line per violation
"""

import ast
import fnmatch
from collections.abc import Iterator, Set
from dataclasses import dataclass

# (pattern of module names, layer, depth of the package that counts as one unit within the layer).
# The first pattern that matches decides.
LAYERS: list[tuple[str, int, int]] = [
    ("torchtitan.experiments*", 11, 3),
    ("torchtitan.models.*.config_registry", 10, 4),
    ("torchtitan.launch", 10, 2),
    ("torchtitan.train", 10, 2),
    ("torchtitan.farewell", 9, 2),
    ("torchtitan.preflight*", 9, 2),
    ("torchtitan.trainer", 8, 2),
    # Parts of the trainer, in files of their own.
    ("torchtitan.assembly", 7, 2),
    ("torchtitan.train_step", 7, 2),
    # Datasets by name, for recipes.
    ("torchtitan.hf_datasets*", 7, 2),
    ("torchtitan.components*", 6, 3),
    # Siblings of the components, and above the parts that several models share.
    ("torchtitan.models.common*", 5, 3),
    ("torchtitan.models*", 6, 3),
    ("torchtitan.protocols*", 4, 2),
    ("torchtitan.distributed*", 3, 2),
    ("torchtitan.tools.profiler", 2, 3),
    ("torchtitan.config*", 1, 2),
    ("torchtitan.tools*", 0, 2),
    ("torchtitan.observability*", -1, 2),
    ("torchtitan", -2, 1),
]

# Importing unit -> imported unit or module -> why one component cannot do without the other.
SIDEWAYS: dict[tuple[str, str], str] = {
    ("torchtitan.components.optimizer", "torchtitan.components.checkpointer.utils"): (
        "canonical parameter names; that module imports nothing of ours"
    ),
    ("torchtitan.components.data", "torchtitan.components.tokenizer"): (
        "text becomes tokens while the corpus is read"
    ),
    ("torchtitan.components.tokenizer", "torchtitan.components.chat_template"): (
        "a tokenizer brings the template that conversations are written with"
    ),
    ("torchtitan.components.validate", "torchtitan.components.data"): "it reads batches of its own",
    ("torchtitan.components.validate", "torchtitan.components.loss"): "it evaluates the loss",
    ("torchtitan.components.validate", "torchtitan.components.metrics"): "it logs its result",
    ("torchtitan.components.validate", "torchtitan.components.tokenizer"): (
        "its data loader is built with the tokenizer"
    ),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Import:
    """One module that a source file imports."""

    target: str
    line: int
    at_top: bool
    """Executed when the module is imported, under no condition."""
    relative: bool


def imports_of(source: str, modules: Set[str]) -> Iterator[Import]:
    """All imports in ``source``; ``modules`` tells a submodule from a name inside a package."""
    tree = ast.parse(source)
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        at_top = id(node) in top
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
            relative = False
        elif isinstance(node, ast.ImportFrom):
            base, relative = node.module or "", node.level > 0
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in modules else base for name in submodules]
        else:
            continue
        for target in dict.fromkeys(targets):
            yield Import(target=target, line=node.lineno, at_top=at_top, relative=relative)


def place_of(module: str) -> tuple[int, str] | None:
    """Layer and unit of ``module``; None for a module that is not ours."""
    for pattern, layer, depth in LAYERS:
        if fnmatch.fnmatchcase(module, pattern):
            return layer, ".".join(module.split(".")[:depth])
    return None


def sideways_pair(unit: str, target: str) -> tuple[str, str] | None:
    """The entry of ``SIDEWAYS`` under which ``unit`` imports ``target``."""
    for allowed_unit, allowed_target in SIDEWAYS:
        inside = target == allowed_target or target.startswith(f"{allowed_target}.")
        if unit == allowed_unit and inside:
            return allowed_unit, allowed_target
    return None


def violations_of(module: str, source: str, modules: Set[str]) -> list[str]:
    """What ``module`` imports against the rules, one line each, in order of appearance."""
    found = []
    place = place_of(module)
    if place is None:
        return [f"{module}: belongs to no layer; add it to LAYERS"]
    layer, unit = place
    for imported in imports_of(source, modules):
        at = f"{module}:{imported.line}:"
        if imported.relative:
            found.append(f"{at} relative import; write the full name")
            continue
        if imported.target.split(".")[0] in ("tests", "scripts", "benchmarks"):
            found.append(f"{at} imports {imported.target}, which users do not have")
        target_place = place_of(imported.target)
        if target_place is None:
            continue
        if not imported.at_top:
            found.append(f"{at} imports {imported.target} in a function or under a condition")
        target_layer, target_unit = target_place
        if target_layer > layer:
            found.append(f"{at} imports {imported.target}, which is a layer above")
        elif target_layer == layer and target_unit != unit:
            if sideways_pair(unit, imported.target) is None:
                found.append(f"{at} imports its sibling {imported.target}")
    return found
