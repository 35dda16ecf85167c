"""Make rows of the documents of a stream, by the rules of ``packing.py``, as they come.

Each epoch is packed by itself: a rest that fills no row is left out at its end. The one fact to
know: behind every row stands the place from which the next one can be made: a place between
documents, and how far into a document (concatenate, then split) or into the rows of a window (first
fit) it lies.

    DocumentStream -> blocks -> documents with places -> rows with the place behind each
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from torchtitan.components.data.corpus import cut, join
from torchtitan.components.data.document_stream import DocumentStream
from torchtitan.components.data.first_fit import Window
from torchtitan.components.data.types import DataFingerprint, RowStream, StreamPoint, TextSequence
from torchtitan.tools.logging import logger


@dataclass(frozen=True, slots=True)
class _Placed:
    """A document and the places before and behind it."""

    document: TextSequence
    before: StreamPoint
    behind: StreamPoint

    @property
    def epoch(self) -> int:
        return self.before["epoch"]


class _PackedStream(RowStream):
    """What the two ways of packing a stream share."""

    def __init__(self, documents: DocumentStream, row_length: int, packing: str) -> None:
        self._documents = documents
        self._row_length = row_length
        self.fingerprint = DataFingerprint(
            corpus=f"stream {documents.description}, {documents.processing}",
            tokenizer=documents.tokenizer_digest,
            packing=f"{packing}, rows of {row_length} tokens, {documents.describe_order()}",
        )

    def start(self) -> StreamPoint:
        return self._documents.start()

    def interrupt(self) -> None:
        self._documents.interrupt()

    def summary(self) -> str:
        documents = self._documents
        return (
            f"a stream of {documents.description}, rows of {self._row_length} tokens, "
            f"{documents.describe_order()}"
        )

    def rows_from(self, point: StreamPoint) -> Iterator[tuple[TextSequence, StreamPoint]]:
        """Raises ValueError when an epoch of the stream makes no row."""
        # What lies before the point may have made rows.
        offset = point["offset"]
        has_rows = any(point[place] > 0 for place in ("block", "document", "offset"))
        for epoch, documents in groupby(self._placed(point), key=lambda placed: placed.epoch):
            for row in self._pack(documents, offset):
                has_rows = True
                yield row
            if not has_rows and epoch >= point["epoch"]:
                raise ValueError(
                    f"the stream {self._documents.description} makes no row of {self._row_length} "
                    f"tokens in epoch {epoch}. Change --training.max_context_length, take a filter "
                    "away or name more text."
                )
            has_rows, offset = False, 0

    def _placed(self, point: StreamPoint) -> Iterator[_Placed]:
        skipped = point["document"]
        for block in self._documents.blocks_from(point):
            for number in range(skipped, len(block.documents)):
                behind = block.point(number + 1)
                yield _Placed(block.documents[number], block.point(number), behind)
            skipped = 0

    @abstractmethod
    def _pack(
        self, documents: Iterable[_Placed], offset: int
    ) -> Iterator[tuple[TextSequence, StreamPoint]]:
        """The rows of the rest of one epoch; ``offset`` is that of the place it begins at."""


class ConcatThenSplitStream(_PackedStream):
    """All documents of an epoch end to end, cut every ``row_length`` tokens."""

    def __init__(self, documents: DocumentStream, row_length: int) -> None:
        super().__init__(documents, row_length, "concat-then-split")

    def _pack(
        self, documents: Iterable[_Placed], offset: int
    ) -> Iterator[tuple[TextSequence, StreamPoint]]:
        parts: list[TextSequence] = []
        room = self._row_length
        for placed in documents:
            length = len(placed.document.input_ids)
            while offset < length:
                end = min(length, offset + room)
                parts.append(cut(placed.document, offset, end))
                room -= end - offset
                offset = end
                if room == 0:
                    inside = {**placed.before, "offset": offset}
                    yield join(parts), inside if offset < length else placed.behind
                    parts, room = [], self._row_length
            offset = 0


class FirstFitStream(_PackedStream):
    """Whole documents in rows; those longer than a row are left out, and counted in the log."""

    def __init__(self, documents: DocumentStream, row_length: int, num_bins: int) -> None:
        super().__init__(documents, row_length, f"first-fit into {num_bins} bins")
        self._num_bins = num_bins
        self._num_seen = self._num_too_long = 0
        self._says = documents.policy.dp_rank == 0

    def _pack(
        self, documents: Iterable[_Placed], offset: int
    ) -> Iterator[tuple[TextSequence, StreamPoint]]:
        window = Window[TextSequence](self._row_length, self._num_bins)
        start: StreamPoint | None = None
        num_seen, num_too_long, epoch = self._num_seen, self._num_too_long, 0
        for placed in documents:
            epoch = placed.epoch
            length = len(placed.document.input_ids)
            if self._is_too_long(length):
                continue
            if start is not None and not window.place(placed.document, length):
                yield from self._rows(window, start, offset)
                start, offset = None, 0
            if start is None:
                start = placed.before
                window.place(placed.document, length)
        self._say_total(self._num_too_long - num_too_long, self._num_seen - num_seen, epoch)
        if start is not None:
            yield from self._rows(window, start, offset)

    def _rows(
        self, window: Window[TextSequence], start: StreamPoint, offset: int
    ) -> Iterator[tuple[TextSequence, StreamPoint]]:
        for number, documents in enumerate(window.take()):
            if number >= offset:
                yield join(documents, self._row_length), {**start, "offset": number + 1}

    def _is_too_long(self, length: int) -> bool:
        self._num_seen += 1
        if length <= self._row_length:
            return False
        self._num_too_long += 1
        # The first, the tenth, the hundredth: often enough to be seen, too seldom to be a flood.
        if str(self._num_too_long).strip("0") == "1" and self._says:
            logger.warning(
                f"data: first-fit left out {self._num_too_long:,} of {self._num_seen:,} documents "
                f"since the start, which are longer than a row of {self._row_length} tokens"
            )
        return True

    def _say_total(self, num_too_long: int, num_seen: int, epoch: int) -> None:
        # An epoch in whose middle the run began counts from there: the rest was not read.
        if num_too_long and self._says:
            logger.warning(
                f"data: first-fit left out {num_too_long:,} of {num_seen:,} documents that were read in "
                f"epoch {epoch}, which are longer than a row of {self._row_length} tokens. Raise "
                "--training.max_context_length to keep them."
            )
