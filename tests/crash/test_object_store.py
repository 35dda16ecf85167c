"""On an object store, which renames nothing: wherever a save is cut short, a start finds all that was promised.

A put or a delete is there whole, in order and for good, so a crash leaves what a prefix of them has left.
All stories are those of torch_checkpointing: DCP saves to local paths only.
"""

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from torchtitan.components.checkpointer.deletions import PIN

from tests.crash.checking import AGAIN, Checker, KEEP, PromiseBrokenError
from tests.crash.faults import Fault, Faults, faults_at, How, Place
from tests.crash.listening import Lines
from tests.crash.object_store import Bucket, objects_of, ROOT, tree_of
from tests.crash.operations import Kind
from tests.crash.points import object_store_points
from tests.crash.promises import PINNED, Promises
from tests.crash.scenarios import evenly
from tests.crash.small_run import SmallRun
from tests.crash.stories import Stage, STORIES
from tests.crash.tree import lay_out, read_tree
from tests.crash.troubled import (
    is_nothing_to_go_on_from,
    Life,
    owed_after,
    RAISE,
    RunEndedError,
    TroubledRun,
    WARN,
)
from tests.unit_tests.components.checkpointer.ways import TC_WAITING

pytestmark = pytest.mark.usefixtures("one_rank")

TOLD = ("first saves", "saved again", "last save", "last weights", "gone back", "expired")
_POINTS_SHARE, _FAULTS_SHARE = 1 / 8, 1 / 16
"""Of the number of crash points that is asked for, or that there is time for each day."""

of_each_story = pytest.mark.parametrize("story", TOLD)


@dataclass(frozen=True)
class BucketStage(Stage):
    """Where a story takes place on an object store."""

    bucket: Bucket
    life: Life

    def run(self, by: str, **settings: Any) -> SmallRun:
        self.life.num_runs += 1
        keywords = {"storage_config": self.bucket}
        return TroubledRun(str(ROOT), self.way, self.life, by=by, keywords=keywords, **settings)

    def pin(self, step: int) -> None:
        if self.bucket.below(f"checkpoint/step-{step}"):
            # What a user does is not refused.
            faults, self.bucket.faults = self.bucket.faults, Faults()
            self.bucket.put(f"checkpoint/step-{step}/{PIN}", b"")
            self.bucket.faults = faults
            self.bucket.note(PINNED, step)


def play(story: str, fault: Fault | None = None, policy: str = RAISE) -> Bucket:
    """What is in a store after ``story``, and what was done and said."""
    bucket = Bucket(faults=Faults(fault))
    life = Life(bucket.faults, policy, bucket.note)
    try:
        STORIES[story](BucketStage(TC_WAITING, cast(Any, None), bucket, life))
    except RunEndedError:
        pass
    bucket.faults.end()
    return bucket


@dataclass(frozen=True)
class BucketChecker(Checker):
    """Starts again on a store, of which a folder is made to be looked at."""

    bucket: Bucket

    def check_folder(self, folder: Path, promises: Promises, *, steps: int = 1) -> None:
        self.bucket.objects.clear()
        self.bucket.objects.update(objects_of(read_tree(folder)))
        super().check_folder(folder, promises, steps=steps)

    def _run(self, folder: Path) -> SmallRun:
        keywords = {"storage_config": self.bucket}
        return SmallRun(ROOT, self.way, by=AGAIN, keep=KEEP, on_damaged="fail", keywords=keywords)

    def _require_all_there(self, folder: Path, promises: Promises) -> None:
        super()._require_all_there(self._seen(folder), promises)

    def _require_clean(self, folder: Path, promises: Promises) -> None:
        super()._require_clean(self._seen(folder), promises)

    def _seen(self, folder: Path) -> Path:
        shutil.rmtree(folder)
        lay_out(tree_of(_moved(self.bucket.objects)), folder)
        return folder


def _moved(objects: dict[str, bytes]) -> dict[str, bytes]:
    """``objects`` as they would lie where those that the record lists are moved aside."""
    found = dict(objects)
    listed = json.loads(found.pop("checkpoint/superseded.json", b'{"superseded": []}'))
    for name in listed["superseded"]:
        for key in [each for each in found if each.startswith(f"checkpoint/{name}/")]:
            file = key.rpartition("/")[2]
            found[f"checkpoint/superseded/{name}.99/{file}"] = found.pop(key)
    return found


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="store-", dir=memory if memory.is_dir() else None) as place:
        yield BucketChecker(TC_WAITING, Path(place), Bucket())


def num_chosen(request: pytest.FixtureRequest, share: float) -> float:
    """How many for each story."""
    wanted = request.config.getoption("--crash-points")
    return math.inf if wanted == "all" else math.ceil(wanted * share / len(TOLD))


def test_an_object_store_copies_and_deletes_where_others_rename() -> None:
    bucket = Bucket()
    store = bucket.create_storage()
    for name in ("b", "a"):
        store.write(ROOT / f"tmp/{name}", name.encode())
    store.rename(ROOT / "tmp", ROOT / "step", is_directory=True)
    assert bucket.objects == {"step/a": b"a", "step/b": b"b"}
    done = [f"{each.kind} {each.path}" for each in bucket.log]
    assert done[2:] == ["put step/a", "put step/b", "delete tmp/a", "delete tmp/b"]
    assert store.isdir(ROOT / "step") and not store.exists(ROOT / "tmp")
    store.write(ROOT / "tmp/c", b"c")
    with pytest.raises(FileExistsError):
        store.rename(ROOT / "tmp", ROOT / "step", is_directory=True)
    assert sorted(store.ls(ROOT)) == ["step", "tmp"]


def test_an_upload_that_is_given_up_leaves_nothing() -> None:
    bucket = Bucket()
    upload = bucket.create_storage().stream_write(ROOT / "a")
    upload.write(b"half")
    upload.__exit__(KeyError, KeyError(), None)
    assert upload.closed and not bucket.objects and not bucket.log


def test_an_object_store_may_do_what_it_says_it_has_not_done() -> None:
    at = Place(Kind.PUT, "a")
    for how, is_there in [(How.REFUSED, False), (How.DONE, True), (How.GONE, False)]:
        bucket = Bucket(faults=Faults(Fault(at, how, errno.EIO)))
        with pytest.raises(OSError, match="Input/output error"):
            bucket.put("a", b"")
        assert ("a" in bucket.objects) == is_there == bool(bucket.log)


@of_each_story
def test_a_start_after_a_crash_on_an_object_store_goes_on_from_what_was_promised(
    story: str,
    checker: Checker,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    # A user who has put a file and has not said so yet may find that it counts or not.
    points = [
        it for it in object_store_points(play(story).log) if it.operation.path[-4:] != f"/{PIN}"
    ]
    share = num_chosen(request, _POINTS_SHARE)
    chosen = points if math.isinf(share) else evenly(points, int(share))
    case = f"{story}, {TC_WAITING.format.backend} on an object store"
    record_property("crash_points", [case, len(chosen), len(points)])
    for point in chosen:
        try:
            checker.check(point.tree, Promises().after(point.notes))
        except PromiseBrokenError as error:
            pytest.fail(f"{case}, {point}:\n{error}", pytrace=False)


@of_each_story
def test_what_an_object_store_refuses_costs_no_more_than_the_save_that_it_falls_into(
    story: str,
    checker: Checker,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    trials = [
        (fault, policy)
        for at in play(story).faults.seen
        for fault in faults_at(at)
        for policy in (RAISE, WARN)
    ]
    share = num_chosen(request, _FAULTS_SHARE)
    chosen = trials if math.isinf(share) else evenly(trials, int(share))
    record_property("faults", [f"{story}, on an object store", len(chosen), len(trials)])
    for fault, policy in chosen:
        with Lines() as lines:
            try:
                bucket = play(story, fault, policy)
                owed = owed_after(bucket.log)
                if not is_nothing_to_go_on_from(owed):
                    checker.check(tree_of(bucket.objects), owed)
            except Exception as error:
                pytest.fail(
                    f"{story}, on_save_failure {policy}, {fault}:\n{error}\n\nlogged before:\n{lines}",
                    pytrace=False,
                )
