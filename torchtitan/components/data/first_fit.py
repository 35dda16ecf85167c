"""Decide which documents share a row, first fit. Pure.

A window is a number of open rows (bins). Each document goes into the first bin that has room; one
that fits in none closes the window, and opens the next. The one fact to know: a window depends on
its own documents alone, so a resume needs to read one window again and no more.

    lengths of documents -> Window.place -> bins of documents, one row each
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class Window(Generic[Item]):
    """The bins that are being filled."""

    row_length: int
    num_bins: int
    _bins: list[list[Item]] = field(default_factory=list)
    _room: list[int] = field(default_factory=list)

    def place(self, item: Item, length: int) -> bool:
        """Put a document of at most ``row_length`` tokens in; False when no bin has room for it."""
        for number, room in enumerate(self._room):
            if length <= room:
                self._bins[number].append(item)
                self._room[number] = room - length
                return True
        if len(self._bins) == self.num_bins:
            return False
        self._bins.append([item])
        self._room.append(self.row_length - length)
        return True

    def take(self) -> list[list[Item]]:
        """The bins that hold something; the window is empty then."""
        bins, self._bins, self._room = self._bins, [], []
        return bins


def first_fit(lengths: Iterable[int], row_length: int, num_bins: int) -> Iterator[list[int]]:
    """The numbers of the documents of each row; documents longer than a row are in none."""
    window = Window[int](row_length, num_bins)
    for number, length in enumerate(lengths):
        if length <= row_length and not window.place(number, length):
            yield from window.take()
            window.place(number, length)
    yield from window.take()
