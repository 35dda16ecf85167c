"""What is different in the settings since a checkpoint was saved, and where the checkpoint wins. Pure.

Whoever changes the learning rate of a resumed run has to know that part of the optimizer's settings
lies in its state. What cannot change what is trained is not compared.

    manifest.json (the resolved config then) + the resolved config now -> changes -> told
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer.integrity.manifest import without_addresses
from torchtitan.components.checkpointer.state import OPTIMIZER, RANK_STATE

_NOT_COMPARED = re.compile(
    r"(dump_folder|metrics|profiler|checkpoint|comm|debug\.(print_config|save_config_file)"
    r"|training\.gc_(freq|debug)|dataloader\.(cache_dir|num_workers|num_prefetch_batches))(\.|\Z)"
)
_NOT_THERE = "not there"
_MAX_LENGTH = 80

_RATE = re.compile(r"optimizer\..*\.lr|lr_scheduler\..*")
_OPTIMIZER = re.compile(r"optimizer\.(param_groups\.[0-9]+\.optimizer_kwargs|.*_by_name)\..*")
_SEED = re.compile(r"debug\.seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting that differs."""

    name: str
    then: str
    now: str
    holds: str = ""
    """What of the checkpoint holds all the same; empty when the setting of this run does."""


def changes(
    then: dict[str, Any], now: dict[str, Any], *, excluded: Collection[str] = ()
) -> list[Change]:
    """The settings that differ, in the order of the config; ``excluded`` parts are not restored."""
    before, after = (dict(_flat(without_addresses(config))) for config in (then, now))
    return [
        Change(
            name=name,
            then=before.get(name, _NOT_THERE),
            now=after.get(name, _NOT_THERE),
            holds=_what_holds(name, excluded),
        )
        for name in dict.fromkeys([*after, *before])
        if before.get(name) != after.get(name) and not _NOT_COMPARED.match(name)
    ]


def told(found: list[Change], path: str) -> str:
    """One block for the log about what has changed since the checkpoint ``path``."""
    lines = [
        f"    {change.name}: {_short(change.then)} -> {_short(change.now)}"
        + (f"  ({change.holds})" if change.holds else "")
        for change in found
    ]
    return "\n".join([f"Settings that differ from those of {path} (then -> now):", *lines])


def _what_holds(name: str, excluded: Collection[str]) -> str:
    if _RATE.fullmatch(name) and OPTIMIZER not in excluded:
        return "the rate in the checkpoint holds for the first step, then the new one"
    if _OPTIMIZER.fullmatch(name) and OPTIMIZER not in excluded:
        return (
            "the value in the checkpoint holds; to take the new one leave out the optimizer's state "
            "once, with --checkpoint.exclude_from_loading optimizer,lr_scheduler"
        )
    if _SEED.fullmatch(name) and RANK_STATE not in excluded:
        return "the random number generators in the checkpoint go on"
    return ""


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        parts = enumerate(value)
    else:
        yield name, json.dumps(value)
        return
    for key, part in parts:
        yield from _flat(part, f"{name}.{key}" if name else str(key))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
