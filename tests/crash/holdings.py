"""What lies in the folder of a run: which states, whole, and what should not be there.

This knows the layout on the disk by itself, from docs/checkpoint.md, and asks no manager: what the product
takes for a checkpoint is what is tested.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from xxhash import xxh3_64_hexdigest

from tests.crash.promises import Saved
from tests.crash.small_run import SmallRun
from tests.unit_tests.components.checkpointer.ways import Way

_STEP = re.compile(r"step-(0|[1-9][0-9]*)(\.[2-9][0-9]*)?")


@dataclass
class Holdings:
    """What was found."""

    counting: set[Saved] = field(default_factory=set)
    """Under the names that checkpoints have."""

    replaced: set[Saved] = field(default_factory=set)
    superseded: set[Saved] = field(default_factory=set)
    litter: list[str] = field(default_factory=list)
    """Paths of what no run should leave."""
    pinned: set[int] = field(default_factory=set)
    damaged: list[str] = field(default_factory=list)
    """Paths of what has the marks of a checkpoint, and does not hold what was saved."""

    @property
    def everywhere(self) -> set[Saved]:
        return self.counting | self.replaced | self.superseded


def look_at(folder: Path, way: Way) -> Holdings:
    """What is in the folder of a run that dumps into ``folder``."""
    found = Holdings()
    top = folder / "checkpoint"
    for path in sorted(top.iterdir()) if top.is_dir() else ():
        if path.name == "superseded":
            # Of another history, of no use to anybody but people: whatever it is, it stays.
            found.superseded |= {it for each in path.iterdir() if (it := _saved(each, way))}
        elif path.name == "replaced":
            found.litter.append(path.name)
            found.replaced |= {it for each in path.iterdir() if (it := _saved(each, way))}
        elif (saved := _saved(path, way)) is not None:
            found.counting.add(saved)
            found.pinned |= {saved.step} if (path / "PIN").exists() else set()
            found.litter += _litter(path)
        else:
            found.litter.append(path.name)
            found.damaged += [path.name] if _has_marks(path, way) else []
    return found


def _has_marks(path: Path, way: Way) -> bool:
    is_marked = any((path / name).is_file() for name in ("manifest.json", way.format.marker))
    is_going = (path / "manifest.deleted").exists()
    return is_marked and not is_going and _STEP.fullmatch(path.name) is not None


def _saved(path: Path, way: Way) -> Saved | None:
    """Which state ``path`` holds, all of it as it was written; None if there is none."""
    name = _STEP.fullmatch(path.name)
    if name is None or not (path / way.format.marker).is_file():
        return None
    if (path / "manifest.deleted").exists():
        return None
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return _loaded(path, way, int(name[1]))
    try:
        told = json.loads(manifest.read_bytes())
    except ValueError:
        return None
    is_whole = all(
        (path / each).is_file() and xxh3_64_hexdigest((path / each).read_bytes()) == it["xxh3_64"]
        for each, it in told["files"].items()
    )
    if not is_whole or told["step"] != int(name[1]):
        return None
    return Saved(told["step"], told["config"]["by"], told["kind"] == "full")


def _loaded(path: Path, way: Way, step: int) -> Saved | None:
    """The same of one without a manifest: what a load of it gives, as a full one or of weights alone."""
    for takes_weights in (False, True):
        with TemporaryDirectory() as empty:
            begins = {"initial_load_path": str(path), "initial_load_model_only": takes_weights}
            run = SmallRun(empty, way, by="again", load_only=True, **begins)
            try:
                run.manager.load()
                return run.found_weights(step) if takes_weights else run.found()
            except Exception:  # whatever damage, or a lack of all the rest, leads to
                continue
            finally:
                run.close()
    return None


def _litter(path: Path) -> Iterator[str]:
    """What is in a checkpoint and no part of it."""
    manifest = path / "manifest.json"
    if manifest.is_file():
        known = {*json.loads(manifest.read_bytes())["files"], manifest.name, "PIN"}
        yield from (f"{path.name}/{it.name}" for it in path.iterdir() if it.name not in known)
    else:
        # Killed when all but the manifest was there. What was to become that goes with the rest one day.
        left = (it.name for it in path.glob("*.tmp") if it.name != f"{manifest.name}.tmp")
        yield from (f"{path.name}/{name}" for name in left)
