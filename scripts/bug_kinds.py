"""What a bug is that is planted on purpose: its name, what is changed, and who should notice.

bug_list.py -> BUGS -> seeded_bugs.py
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change of one file."""

    path: str
    """From the root of the tree."""
    old: str
    """Stands there exactly once."""
    new: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """Something that is wrong."""

    name: str
    what: str
    """One sentence without its full stop, for a table."""
    edits: tuple[Edit, ...]
    only: str = ""
    """Which tests, as ``-k`` of pytest takes it, where others would take long and could notice nothing."""
    tests: tuple[str, ...] = ()
    """In the place of the crash tests, where it takes what these do not have: any of them that fails counts."""
    may_wait: bool = False
    """Whether a lock that is waited for in vain is what the bug leads to."""


def changes(path: str, *changes: tuple[str, str]) -> tuple[Edit, ...]:
    """Several changes of one file, as (old, new)."""
    return tuple(Edit(path=path, old=old, new=new) for old, new in changes)


def one_change(name: str, what: str, path: str, old: str, new: str, **more: Any) -> Bug:
    """A bug in one place; ``more`` are fields of it."""
    return Bug(name=name, what=what, edits=(Edit(path=path, old=old, new=new),), **more)
