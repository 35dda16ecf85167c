"""What retention promises, over random traces of all that happens to a folder.

A trace is a string of bytes: the first ones choose the settings, then two are an event and its
argument. The manager is real but for its bytes (choice of the start, histories, retention, deletion); the
disk is in memory, and may die or refuse before any operation. ``Story`` knows what must be there.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, HealthCheck, note, seed, settings, strategies as st
from torchtitan.components.checkpointer.deletions import PIN
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.storage import DELETED

from tests.unit_tests.components.checkpointer.failing_disk import (
    FailingDisk,
    FILES,
    KilledError,
    manifest_of,
    PAYLOAD,
    Traced,
)

SEED = int(os.environ.get("TRACES_SEED", "9"))
NUM_TRACES = int(os.environ.get("TRACES", "10000"))
FOREIGN = {"step-07": None, "step-3.bak": None, "tmp_step-9": None, "notes": b"mine", "PIN": b"x"}


class Story:
    """One folder, its runs one after the other, and what must be in it."""

    def __init__(self, header: bytes) -> None:
        self.keep = (0, 2, 2, 3, 4)[header[0] % 5]
        self.every = (0, 0, 3, 4)[header[1] % 4]
        self.disk = FailingDisk("/run")
        self.damaged: set[bytes] = set()
        self.num_payloads = self.num_pins = 0
        self.pins: set[bytes] = set()
        self.must: dict[int, bool] = {}
        """Steps that must be there, and whether they are full."""
        self.may_be: dict[int, set[bytes]] = {}
        """What each step that must be there may hold."""
        self.history: dict[int, set[bytes]] = {}
        """All that was ever saved of each step of this history."""
        self.begun_from: str | None = None
        self.saving: tuple[int, bytes, bool] | None = None
        for name, content in FOREIGN.items():
            path = f"/run/{name}/{PAYLOAD}" if content is None else f"/run/{name}"
            self.disk.write_bytes(path, content or b"theirs")
        self.theirs = self._foreign()
        if header[2] % 3 == 0:
            self._write(0, self._payload(is_full=True), 3, is_full=True)
        self.start()

    def play(self, event: int, argument: int) -> None:
        """One thing happens; then all that must be there is looked for."""
        act = EVENTS[event % len(EVENTS)]
        try:
            act(self, argument)
        except KilledError:
            self.disk.dies_in = self.disk.fails_in = None
            self.start()
        self.check()

    def start(self, step: int = -1, *, begun_from: str | None = None) -> None:
        """A new process, which loads."""
        if self.saving is not None:
            self._note_what_is_there(*self.saving)
            self.saving = None
        self.begun_from = begun_from
        self.run = Traced(
            self.disk,
            self.damaged,
            keep_latest_k=self.keep,
            keep_every=self.every,
            initial_load_path=begun_from,
        )
        self.load(step)

    def load(self, step: int) -> None:
        try:
            self.run.load(step)
        except CheckpointReadError:
            # All are damaged, or the one that was asked for; somebody puts good files there.
            self.damaged.clear()
            self.run.load(step)
        self.step = self.run.step
        self.is_settled = False
        if self.run.loaded is not None:
            assert self.run.loaded in self.history[self.step], "of another history"
            if self.step not in self.must:  # it was to go, and is what the run goes on from now
                self.must[self.step], self.may_be[self.step] = True, {self.run.loaded}
        if step == -1:
            good = [
                at
                for at, is_full in self.must.items()
                if is_full and not self.may_be[at] & self.damaged
            ]
            assert self.step >= max(good, default=0), "a newer good one was passed over"

    def save(
        self, step: int, *, is_full: bool = True, num_files: int = 3, is_last: bool = False
    ) -> None:
        """As the managers do it; with fewer files it fails after these."""
        self.step = step
        if not self.is_settled:
            self.must = {at: full for at, full in self.must.items() if at <= self.run.step}
        if not is_last:
            self._expire()
        path = f"/run/step-{step}"
        if not self.disk.isfile(f"{self.run._own_folder().step_paths.get(step)}/{MANIFEST}"):
            # What nobody has committed is moved away, and not waited with.
            self.must.pop(step, None)
        try:
            self.run._make_ready(path, None, with_retention=not is_last)
        except OSError:
            return  # all ranks are told, and the run goes on
        if not self.is_settled:
            self.history = {at: ids for at, ids in self.history.items() if at <= self.run.step}
            self.is_settled = True
        self.saving = step, self._payload(is_full=is_full), is_full
        self._write(*self.saving[:2], num_files, is_full=is_full)
        self.saving = None

    def _write(self, step: int, payload: bytes, num_files: int, *, is_full: bool) -> None:
        contents = payload, b"1", manifest_of(step, is_full=is_full)
        try:
            for name, content in list(zip(FILES, contents, strict=True))[:num_files]:
                self.disk.write_bytes(f"/run/step-{step}/{name}", content)
        except OSError:
            pass
        self._note_what_is_there(step, payload, is_full)

    def _note_what_is_there(self, step: int, payload: bytes, is_full: bool) -> None:
        files = self.disk.folders.get(f"/run/step-{step}", {})
        if files.get(PAYLOAD) != payload or FILES[1] not in files:
            return
        self.history.setdefault(step, set()).add(payload)
        if FILES[2] in files:
            self.may_be[step] = {payload}
            self.must[step] = is_full
            return
        # Without its commit record it counts, unless there is another one of the step.
        before = self.may_be[step] if step in self.must else set()
        chosen = self.disk.folders[self.run._own_folder().step_paths[step]][PAYLOAD] or b""
        self.may_be[step] = {*before, payload, chosen}
        self.must.setdefault(step, is_full)

    def _expire(self) -> None:
        """Forget what may go now: k - 1 full ones stay, k of weights, and what was asked for."""
        if self.keep == 0:
            return
        own = self.run._own_folder()
        going = self.run._deletions.waiting | self.run._damaged.keys()
        there = {at: path for at, path in own.step_paths.items() if path not in going}
        if not self.is_settled:
            there = {at: path for at, path in there.items() if at <= self.run.step}
        for kind, places in ((True, self.keep - 1), (False, self.keep)):
            steps = sorted(at for at, path in there.items() if at and self._is_full(path) is kind)
            for at in steps[: max(len(steps) - places, 0)]:
                if not self._has_reason(at):
                    self.must.pop(at, None)

    def check(self) -> None:
        """All that must hold at any moment."""
        own = self.run._own_folder()
        for step, path in own.step_paths.items():
            files = self.disk.folders[path]
            assert files.keys() >= {*FILES[:2]} and DELETED not in files, f"{path} is not whole"
            is_own = files[PAYLOAD] in self.history.get(step, ())
            assert is_own or not self.is_settled, f"{path} is of another history"
        for step in self.must:
            assert step in own.step_paths, f"step {step} is gone"
            payload = self.disk.folders[own.step_paths[step]][PAYLOAD]
            # Where it is damaged, one of the same step that was to be replaced may be taken.
            is_damaged = not self.may_be[step].isdisjoint(self.damaged)
            one_of = self.history[step] if is_damaged else self.may_be[step]
            assert payload in one_of, f"step {step} is another one"
        assert self._foreign() == self.theirs, "what is not ours was touched"
        there = {content for files in self.disk.folders.values() for content in files.values()}
        assert self.pins <= there, "what was pinned is gone"

    def check_settled(self) -> None:
        """After a save, with nothing queued, no more are there than may be."""
        if self.keep == 0:
            return
        own = self.run._own_folder()
        for kind in (True, False):
            steps = [
                at for at, path in own.step_paths.items() if at and self._is_full(path) is kind
            ]
            old = sorted(steps)[: -self.keep]
            assert all(self._has_reason(at) for at in old), f"of {steps} too many are left"

    def _has_reason(self, step: int) -> bool:
        """Whether ``step`` stays however old it is."""
        path = f"/run/step-{step}"
        is_multiple = self.every > 0 and step % self.every == 0
        return is_multiple or path == self.begun_from or self.disk.isfile(f"{path}/{PIN}")

    def full_steps(self) -> list[int]:
        """Steps that a user may ask for, whether or not they are queued for deletion."""
        own = self.run._own_folder()
        return sorted(at for at, path in own.step_paths.items() if self._is_full(path))

    def _is_full(self, path: str) -> bool:
        return not (self.disk.folders[path][PAYLOAD] or b"").startswith(b"weights")

    def _payload(self, *, is_full: bool) -> bytes:
        self.num_payloads += 1
        return f"{'full' if is_full else 'weights'} {self.num_payloads}".encode()

    def _foreign(self) -> dict[str, Any]:
        roots = tuple(f"/run/{name}" for name in FOREIGN)
        found: dict[str, Any] = {p: dict(f) for p, f in self.disk.folders.items() if p in roots}
        return found | {name: self.disk.folders["/run"].get(name) for name in FOREIGN}

    def _ours(self) -> list[str]:
        return [
            path
            for path in self.disk.folders
            if path.startswith("/run/step-") and not self._is_theirs(path)
        ]

    def _is_theirs(self, path: str) -> bool:
        return path.removeprefix("/run/") in FOREIGN


def a_save(story: Story, argument: int) -> None:
    story.save(story.step + 1 + argument % 2)
    if argument & 4 and story.is_settled:
        clean = story.disk.fails_in is None and not story.run._deletions._failures
        story.run.delete_some(100)
        if clean and story.disk.fails_in is None:
            story.check_settled()


def a_failing_save(story: Story, argument: int) -> None:
    story.save(story.step + 1, num_files=argument % 3)


def a_save_of_weights(story: Story, argument: int) -> None:
    # A folder that holds nothing but weights is no start for a run.
    if any(is_full for step, is_full in story.must.items() if 0 < step <= story.step):
        story.save(story.step + 1, is_full=False, is_last=argument % 4 == 0)


def the_step_again(story: Story, argument: int) -> None:
    if story.step:
        story.save(story.step, num_files=3 - argument % 3, is_last=argument % 2 == 0)


def death(story: Story, argument: int) -> None:
    story.disk.dies_in = argument % 40


def a_refusal(story: Story, argument: int) -> None:
    story.disk.fails_in = argument % 40


def a_clean_end(story: Story, argument: int) -> None:
    queued = story.run._deletions.waiting
    pinned = {path for path in queued if story.disk.isfile(f"{path}/{PIN}")}
    is_steady = story.disk.fails_in is None
    story.run.close()
    assert story.run.purge_queue.empty() and not story.run._deletions.waiting
    if is_steady:
        assert not any(story.disk.isdir(path) for path in queued - pinned), "queued and not gone"
    story.start()


def a_rollback(story: Story, argument: int) -> None:
    if steps := story.full_steps():
        story.start(steps[argument % len(steps)])


def a_load_in_the_run(story: Story, argument: int) -> None:
    if steps := story.full_steps():
        story.load(steps[argument % len(steps)])


def some_deletions(story: Story, argument: int) -> None:
    story.run.delete_some(1 + argument % 3)


def a_pin(story: Story, argument: int) -> None:
    ours = story._ours()
    if ours:
        story.num_pins += 1
        content = f"pin {story.num_pins}".encode()
        files = story.disk.folders[ours[argument % len(ours)]]
        story.pins -= {files.get(PIN, b"")}
        story.pins.add(content)
        files[PIN] = content


def no_pins(story: Story, argument: int) -> None:
    story.pins.clear()
    for path in story._ours():
        story.disk.folders[path].pop(PIN, None)


def damage(story: Story, argument: int) -> None:
    own = story.run._own_folder()
    if own.step_paths:
        path = sorted(own.step_paths.values())[argument % len(own.step_paths)]
        story.damaged.add(story.disk.read_bytes(f"{path}/{PAYLOAD}"))


def a_start_from_an_own_one(story: Story, argument: int) -> None:
    if story.must:
        story.start(begun_from=f"/run/step-{sorted(story.must)[argument % len(story.must)]}")


def a_purge_by_hand(story: Story, argument: int) -> None:
    if story.is_settled:
        story._expire()
        story.run._purge_stale_checkpoints(is_save_in_flight=bool(argument % 2))


EVENTS: list[Callable[[Story, int], None]] = [
    *[a_save] * 5,
    a_failing_save,
    a_save_of_weights,
    the_step_again,
    death,
    death,
    a_refusal,
    a_clean_end,
    a_rollback,
    a_load_in_the_run,
    some_deletions,
    a_pin,
    no_pins,
    damage,
    a_start_from_an_own_one,
    a_purge_by_hand,
]


@pytest.fixture(scope="module", autouse=True)
def quiet_rank_zero() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
        logging.disable(logging.CRITICAL)
        yield
        logging.disable(logging.NOTSET)


@pytest.mark.slow
@seed(SEED)
@settings(
    max_examples=NUM_TRACES,
    derandomize=False,
    report_multiple_bugs=False,
    database=None,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(st.binary(min_size=9, max_size=63))
def test_what_retention_promises_holds_over_any_trace(trace: bytes) -> None:
    story = Story(trace[:3])
    note(f"TRACES_SEED={SEED}, keep_latest_k {story.keep}, keep_every {story.every}")
    for event, argument in zip(trace[3::2], trace[4::2], strict=False):
        note(f"{EVENTS[event % len(EVENTS)].__name__} {argument}")
        story.play(event, argument)
