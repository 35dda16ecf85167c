"""Ways in which the files of a checkpoint come to hold something else, applied and taken back.

Step(path, others) -> random_damage -> Damage -> (a load) -> Damage.undo
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.checkpointer.dcp_index import MARKER as DCP_MARKER
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.tc.index import MARKER as TC_MARKER

INDEXES = (DCP_MARKER, TC_MARKER)


@dataclass(frozen=True)
class Step:
    """A checkpoint as it was written, and others of its run."""

    path: Path
    files: dict[str, bytes]
    others: tuple[dict[str, bytes], ...]
    """The same files of earlier steps, and of one that holds weights alone."""

    @classmethod
    def of(cls, path: Path, *others: Path) -> "Step":
        return cls(path, contents(path), tuple(contents(each) for each in others))

    def restore(self) -> None:
        """Put every file back that is not as it was written."""
        for name, content in self.files.items():
            file = self.path / name
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@dataclass(frozen=True)
class Damage:
    """What one or two files hold instead; None for a file that is gone."""

    kind: str
    changed: dict[str, bytes | None]
    step: Step

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.changed)} of {self.step.path.name}"

    @property
    def keeps_sizes(self) -> bool:
        """Whether a listing looks as before."""
        return all(
            content is not None and len(content) == len(self.step.files[name])
            for name, content in self.changed.items()
        )

    @property
    def is_told_by_a_listing(self) -> bool:
        """Whether names and sizes, and the manifest, which is read in any case, tell of it."""
        return not self.keeps_sizes or MANIFEST in self.changed

    @property
    def makes_foreign(self) -> bool:
        """Whether the checkpoint is now one of which nothing is known."""
        return self.changed.get(MANIFEST, b"") is None

    def apply(self) -> None:
        for name, content in self.changed.items():
            if content is None:
                (self.step.path / name).unlink()
            else:
                (self.step.path / name).write_bytes(content)


Changed = dict[str, bytes | None]


def _removed(step: Step, name: str, rng: random.Random) -> Changed:
    return {name: None}


def _truncated(step: Step, name: str, rng: random.Random) -> Changed:
    content = step.files[name]
    return {name: content[: rng.choice((0, len(content) - 1, rng.randrange(len(content))))]}


def _extended(step: Step, name: str, rng: random.Random) -> Changed:
    more = rng.randbytes(rng.randint(1, 5000))
    return {name: step.files[name] + rng.choice((more, bytes(len(more))))}


def _flipped(step: Step, name: str, rng: random.Random) -> Changed:
    content = bytearray(step.files[name])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {name: bytes(content)}


def _zeroed(step: Step, name: str, rng: random.Random) -> Changed:
    content = step.files[name]
    start = rng.randrange(len(content))
    end = rng.choice((len(content), rng.randint(start + 1, len(content)), start + 1))
    return {name: content[:start] + bytes(end - start) + content[end:]}


def _swapped(step: Step, name: str, rng: random.Random) -> Changed:
    """With another file: where there are some, the same one of another rank."""
    likely = [other for other in step.files if _without_digits(other) == _without_digits(name)]
    others = [other for other in likely if other != name] or sorted(step.files.keys() - {name})
    other = rng.choice(others)
    return {name: step.files[other], other: step.files[name]}


def _without_digits(name: str) -> str:
    return "".join(letter for letter in name if not letter.isdigit())


def _of_another(step: Step, name: str, rng: random.Random) -> Changed:
    return {name: rng.choice(step.others).get(name)}


KINDS: dict[str, Callable[[Step, str, random.Random], Changed]] = {
    "removed": _removed,
    "truncated": _truncated,
    "extended": _extended,
    "flipped": _flipped,
    "zeroed": _zeroed,
    "swapped": _swapped,
    "of another": _of_another,
}


def random_damage(step: Step, rng: random.Random) -> Damage:
    """Some damage of some file, which certainly holds something else then."""
    while True:
        # As often of the manifest and of the index as of all the data.
        data = sorted(step.files.keys() - {MANIFEST, *INDEXES})
        rest = sorted(step.files.keys() & {MANIFEST, *INDEXES})
        name = rng.choice([rng.choice(data), *rest])
        kind = rng.choice(sorted(KINDS))
        changed = KINDS[kind](step, name, rng)
        if all(content != step.files[name] for name, content in changed.items()):
            return Damage(kind, changed, step)
