"""One save on all ranks: all of them have written, or none of them has saved.

The library's barrier only counts arrivals. So a rank that fails leaves the others waiting for the whole
timeout, an arrival of a failed save is still counted in the next one, and ranks other than 0 call a
save done before rank 0 has given it its name. Here a rank arrives with its error, each save counts
for itself, and there are two stops:

    every rank: files written -> agree ---> rank 0: manifest, tmp_step-N becomes step-N -> publish ---> done
                a failure of any rank is the failure of all, in the words of the first that failed

What each rank has written comes to rank 0 with the first stop, for the manifest.

    in a writer process    StoreCommit   over the store at which the writers have met
    in the trainer         GroupCommit   over its group for checkpoints
"""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch_checkpointing.barriers import Barrier, BarrierConfig
from torch_checkpointing.types import RankInfo

from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.integrity.digests import FileDigest
from torchtitan.components.checkpointer.pinned.meeting import (
    ALL_HERE,
    committed_key,
    failure_elsewhere,
    lost,
    OtherRankLostError,
    written_key,
)

Files = Mapping[str, FileDigest]
"""What was written, by name in the checkpoint."""


# In the place of the length of what was written.
_HAS_FAILED = -1


class _Stop(IntEnum):
    WRITTEN = 0
    PUBLISHED = 1
    OVER = 2


class Commit(ABC):
    """The two stops of one save; a new one for each save."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank = rank_info.role_rank
        self._num_ranks = rank_info.role_world_size
        self._next = _Stop.WRITTEN
        self._files: Files = {}

    def agree(self, files: Files) -> Files:
        """Wait until every rank has written its ``files``. Raises ``OtherRankFailedError``.

        Returns:
            those of all ranks on rank 0, and none elsewhere.
        """
        self._files = files
        self._pass(_Stop.WRITTEN, None)
        if self._rank != 0:
            return {}
        # After the stop: what fails here, the others hear of at the next one.
        return _together([files] if self._num_ranks == 1 else self._of_all_ranks())

    def publish(self) -> None:
        """Wait until rank 0 has given the save its name. Raises ``OtherRankFailedError``."""
        self._pass(_Stop.PUBLISHED, None)

    def fail(self, error: BaseException) -> None:
        """Let what this rank failed with be the failure of all, unless it is known already."""
        if self._next is _Stop.OVER:
            return
        failure = f"rank {self._rank}: {type(error).__name__}: {error}"
        if isinstance(error, OtherRankLostError):
            failure = lost(failure)
        try:
            self._pass(self._next, failure)
        except Exception:  # whatever comes of it, the caller raises what it has
            self._next = _Stop.OVER

    def _pass(self, stop: _Stop, failure: str | None) -> None:
        assert stop is self._next, f"{stop.name} comes after {self._next.name}"
        self._next = _Stop.OVER
        outcome = failure if self._num_ranks == 1 else self._meet(stop, failure)
        if outcome is not None and outcome != failure:
            raise failure_elsewhere(outcome)
        if outcome is None:
            self._next = _Stop(stop + 1)

    @abstractmethod
    def _meet(self, stop: _Stop, failure: str | None) -> str | None:
        """Tell the others ``failure``; the failure of all, or None."""

    @abstractmethod
    def _of_all_ranks(self) -> list[Files]:
        """On rank 0, once: the files of each rank, of which ``_meet`` has told."""


def _together(files_of_ranks: Iterable[Files]) -> Files:
    found: dict[str, FileDigest] = {}
    for files in files_of_ranks:
        for name, digest in files.items():
            if found.setdefault(name, digest) != digest:
                raise ValueError(
                    f"two ranks have written {name}, each of them something else; give them different "
                    "layouts"
                )
    return found


def _as_text(files: Files) -> str:
    return json.dumps({name: astuple(digest) for name, digest in files.items()})


def _from_text(text: bytes) -> Files:
    return {name: FileDigest(*values) for name, values in json.loads(text).items()}


class StoreCommit(Commit):
    """Between writer processes, over the store at which they have met."""

    def __init__(self, rank_info: RankInfo, store: dist.Store, attempt: int) -> None:
        """``attempt`` counts the saves; all ranks count alike."""
        super().__init__(rank_info)
        self._store = store
        self._arrived = f"{written_key(attempt)}/arrived"
        self._verdicts = {
            _Stop.WRITTEN: written_key(attempt),
            _Stop.PUBLISHED: committed_key(attempt),
        }

    def _meet(self, stop: _Stop, failure: str | None) -> str | None:
        own = self._files_of(self._rank)
        if stop is _Stop.WRITTEN and failure is None:
            # Before it arrives: when all have, rank 0 looks for them.
            self._store.set(own, _as_text(self._files))
        outcome = "nobody looks for them"
        try:
            outcome = self._outcome(stop, failure)
        finally:
            # Each rank takes away its own, once rank 0 has them or will not come: all at one time,
            # where rank 0 would take one after the other. Of a failure at the second stop rank 0 may
            # not know yet, and still wait for them.
            is_own_task = (outcome is None) is (stop is _Stop.PUBLISHED)
            # The store may have ended with rank 0, which does not change how the save did.
            with contextlib.suppress(RuntimeError):
                if is_own_task:
                    self._store.delete_key(own)
                elif stop is _Stop.PUBLISHED and self._rank == 0:
                    for key in self._keys():
                        self._store.delete_key(key)
        return outcome

    def _of_all_ranks(self) -> list[Files]:
        return [_from_text(text) for text in self._store.multi_get(self._keys())]

    def _keys(self) -> list[str]:
        return [self._files_of(rank) for rank in range(self._num_ranks)]

    def _files_of(self, rank: int) -> str:
        return f"{self._verdicts[_Stop.WRITTEN]}/files/{rank}"

    def _outcome(self, stop: _Stop, failure: str | None) -> str | None:
        verdict = self._verdicts[stop]
        if failure is not None:
            self._store.compare_set(verdict, "", failure)
        elif self._is_last(stop):
            self._store.compare_set(verdict, "", ALL_HERE)
        try:
            outcome = self._store.get(verdict).decode()
        except RuntimeError as error:
            # Over for good: a rank that comes later must not find all of them here.
            gave_up = f"rank {self._rank}: {error}"
            outcome = self._store.compare_set(verdict, "", gave_up).decode()
            if outcome == gave_up:
                raise
        return None if outcome == ALL_HERE else outcome

    def _is_last(self, stop: _Stop) -> bool:
        if stop is _Stop.WRITTEN:
            return self._store.add(self._arrived, 1) == self._num_ranks
        return self._rank == 0


class GroupCommit(Commit):
    """Between trainers that write by themselves; the stops are collectives over ``group``, of gloo."""

    def __init__(self, rank_info: RankInfo, group: "dist.ProcessGroup | None") -> None:
        super().__init__(rank_info)
        self._group = group
        self._gathered: list[Files] = []

    def _meet(self, stop: _Stop, failure: str | None) -> str | None:
        if stop is not _Stop.WRITTEN:
            return rank_zero_decides(lambda: failure, self._group)
        # One number from each rank to all; the digests, which are long, only to rank 0.
        content = torch.frombuffer(bytearray(_as_text(self._files).encode()), dtype=torch.uint8)
        mine = torch.tensor([_HAS_FAILED if failure is not None else content.numel()])
        sizes = [torch.zeros_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, mine, group=self._group)
        lengths = [int(size) for size in sizes]
        if _HAS_FAILED in lengths:
            return next(one for one in gather(failure, self._group) if one is not None)
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: content.numel()] = content
        found = [torch.empty_like(padded) for _ in lengths] if self._rank == 0 else None
        dist.gather(padded, found, group=self._group, group_dst=0)
        texts = zip(found or (), lengths, strict=False)
        self._gathered = [_from_text(bytes(it[:length].numpy())) for it, length in texts]
        return None

    def _of_all_ranks(self) -> list[Files]:
        return self._gathered


@dataclass
class CommitBarrierConfig(BarrierConfig):
    """What the writer is given as its barrier; the commit of each save is put in beforehand."""

    timeout_barrier_init_sec: int = 0

    def create_barrier(self, rank_info: RankInfo) -> "CommitBarrier":
        """The barrier of one writer."""
        return CommitBarrier(self)


class CommitBarrier(Barrier):
    """Stands where the library waits for all ranks: between the files and the final name."""

    commit: Commit
    written: Callable[[], Files]
    """What this rank has written."""
    prepare: Callable[[Files], None]
    """Called last, on rank 0 with the files of all ranks; what it raises prevents the final name."""

    def __init__(self, config: BarrierConfig) -> None:
        """Nothing to set up: a save brings its own commit."""

    def execute_barrier(self, timeout_secs: int) -> None:
        """Let rank 0 go on to the final name. The wait is limited by the store or the group."""
        self.prepare(self.commit.agree(self.written()))
