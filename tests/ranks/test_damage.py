"""Damage of a checkpoint is found while it is loaded, and the run goes on from the newest good step.

More than a thousand damages of every kind, in data, index and manifest. Most of them are tried in one
process, which reads the files of both ranks as well; some on two ranks, each of which reads its part.
"""

import logging
import random
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.tools.logging import logger

from tests.fixtures.make_checkpoints import build, generators, Run
from tests.ranks.damage import Damage, KINDS, random_damage, Step
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.recomputed import manifest_in
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    over,
    PINNED,
    TC,
    TC_WAITING,
    Way,
)

LAST = 3
WEIGHTS = "weights"
"""Where the checkpoint of the weights alone lies that the run has saved in the end."""
NUM_ROWS = 2_000_000
"""Of a parameter of 16 MB, so that its files have several blocks."""
TOLD = re.compile("Passing over|cannot be read|unverified")
"""That it was passed over as weights only would be to take damage for what was saved."""
State = tuple[Any, str]


def state_of(run: Run) -> State:
    return run.values(), generators()


def save_steps(folder: Path, way: Way) -> list[State]:
    """Train and save after each step; the state after each, also the one whose weights are put aside."""
    run = build(folder, way, seed=1, keep_latest_k=0)
    states = []
    for step in range(1, LAST + 2):
        run.train_step()
        states.append(state_of(run))
        run.manager.save(step, last_step=step > LAST)
    run.manager.close()
    if dist.get_rank() == 0:
        (folder / "checkpoint" / f"step-{LAST + 1}").rename(folder / WEIGHTS)
    return states


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def lines_of_the_load(level: int) -> Generator[list[str]]:
    """What is logged inside, from ``level`` on."""
    lines, before = Lines(level), logger.level
    logger.addHandler(lines)
    logger.setLevel(level)
    try:
        yield lines.seen
    finally:
        logger.setLevel(before)
        logger.removeHandler(lines)


def problems_of(run: Run, states: list[State], step: int, *, with_generators: bool) -> list[str]:
    """What is wrong with ``run``, which has just been loaded and should be at ``step``. Collective."""
    wrong = []
    for at in (step, step + 1):  # where it was, and where it gets from there
        (values, generated), (found, here) = states[at - 1], state_of(run)
        differs = sorted(name for name in values if found.get(name) != values[name])
        if differs:
            wrong.append(f"at {run.progress.values} instead of step {at}; differs: {differs}")
        if with_generators and here != generated:
            wrong.append(f"other random numbers than at step {at}")
        run.train_step()
    return wrong


def load_damaged(
    folder: Path,
    way: Way,
    states: list[State],
    damage: Damage,
    *,
    with_generators: bool,
    **settings: Any,
) -> list[str]:
    """What is wrong with how a load deals with ``damage``. Collective."""
    run = build(folder, way, seed=2, load_only=True, **settings)
    # One that lost its manifest is as good as one that never had any: nothing says otherwise.
    step = LAST if damage.makes_foreign else LAST - 1
    with lines_of_the_load(logging.INFO) as lines:
        try:
            wrong = [] if run.manager.load() else ["nothing was loaded"]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
    run.manager.close()
    told = [line for line in lines if f"step-{LAST}" in line and TOLD.search(line)]
    if dist.get_rank() == 0 and not told:
        wrong.append(f"no line tells of it: {lines}")
    return wrong + problems_of(run, states, step, with_generators=with_generators)


def try_damages(
    folder: Path, way: Way, states: list[State], num: int, *, seed: int, same_ranks: bool
) -> tuple[list[str], Counter[str]]:
    """Damage the newest checkpoint in ``num`` ways; what went wrong, and how often each kind came."""
    checkpoints = folder / "checkpoint"
    paths = [checkpoints / f"step-{number}" for number in range(LAST, 0, -1)]
    step, rng = Step.of(*paths, folder / WEIGHTS), random.Random(seed)
    wrong, kinds = [], Counter[str]()
    dist.barrier()  # before rank 0 changes what others still read
    while kinds.total() < num:
        damage = random_damage(step, rng)
        # What a listing tells is found with less as well.
        verify = rng.choice(("full", "size")) if damage.is_told_by_a_listing else "full"
        kinds[damage.kind] += 1
        if dist.get_rank() == 0:
            damage.apply()
        dist.barrier()
        problems = load_damaged(
            folder, way, states, damage, with_generators=same_ranks, verify=verify
        )
        wrong += [f"{damage}, {verify}: {problem}" for problem in problems]
        dist.barrier()
        if dist.get_rank() == 0:
            step.restore()
    return wrong, kinds


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
@pytest.mark.parametrize("saved_ranks", [1, 2])
def test_every_damage_is_found_and_the_newest_good_step_resumed_bit_for_bit(
    tmp_path: Path, way: Way, saved_ranks: int
) -> None:
    [states, *_] = run_on_ranks(saved_ranks, save_steps, tmp_path, way)
    [(wrong, kinds)] = run_on_ranks(
        1,
        try_damages,
        tmp_path,
        way,
        states,
        275,
        seed=saved_ranks,
        same_ranks=saved_ranks == 1,
        timeout_seconds=240,
    )
    assert not wrong, "\n".join([f"{len(wrong)} of {kinds.total()}:", *wrong[:20]])
    assert kinds.keys() == KINDS.keys()


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_damage_that_one_rank_finds_sends_both_back_to_the_same_step(
    tmp_path: Path, way: Way
) -> None:
    ranks = run_on_ranks(2, save_steps, tmp_path, way)
    for wrong, _ in run_on_ranks(2, try_both, tmp_path, way, ranks, 40, timeout_seconds=240):
        assert not wrong, "\n".join([f"{len(wrong)}:", *wrong[:20]])


def try_both(
    folder: Path, way: Way, ranks: list[list[State]], num: int
) -> tuple[list[str], Counter[str]]:
    return try_damages(folder, way, ranks[dist.get_rank()], num, seed=3, same_ranks=True)


def flip_bits(folder: Path, way: Way, num: int) -> list[str]:
    """Flip one bit at a time in files of several blocks; where it was not found."""
    run = build(folder, way, seed=1, num_rows=NUM_ROWS)
    run.train_step()
    run.manager.save(1)
    run.manager.close()
    path, rng, wrong = folder / "checkpoint" / "step-1", random.Random(5), []
    run = build(folder, way, seed=2, num_rows=NUM_ROWS, load_only=True)
    blocks = {path / name: each.block_bytes for name, each in manifest_in(path).files.items()}
    large = sorted(file for file, length in blocks.items() if file.stat().st_size > 2 * length)
    for number in range(num):
        file = large[number % len(large)]
        position, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        flip(file, position, bit)
        start = position // blocks[file] * blocks[file]
        try:
            run.manager.load(1)
            wrong.append(f"bit {bit} of byte {position} of {file.name} was not found")
        except CheckpointDamagedError as error:
            if f"{file} is damaged: bytes {start}.." not in str(error):
                wrong.append(str(error))
        flip(file, position, bit)
    if not run.manager.load(1):
        wrong.append("what is good again was not loaded")
    run.manager.close()
    return wrong


def flip(file: Path, position: int, bit: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(position)
        [value] = opened.read(1)
        opened.seek(position)
        opened.write(bytes([value ^ bit]))


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_a_flipped_bit_is_found_in_any_block_of_a_large_file(tmp_path: Path, way: Way) -> None:
    [wrong] = run_on_ranks(1, flip_bits, tmp_path, way, 10)
    assert not wrong, "\n".join(wrong)


def damage_all(folder: Path, way: Way) -> tuple[list[str], list[str]]:
    """With one more checkpoint damaged each time: the step that is loaded, or the error."""
    found = []
    for number in range(LAST, 0, -1):
        if dist.get_rank() == 0:
            path = folder / "checkpoint" / f"step-{number}"
            # In the part of the other rank.
            [last] = {*path.glob("__1_0.distcp"), *path.glob("model_1.pt")}
            flip(last, last.stat().st_size - 1, 1)
        dist.barrier()
        run = build(folder, way, seed=2, load_only=True)
        try:
            run.manager.load()
            found.append(f"step {run.progress.values['step']}")
        except CheckpointReadError as error:
            found.append(str(error))
        run.manager.close()
        dist.barrier()
    files = sorted(entry.name for entry in (folder / "checkpoint").iterdir())
    return found, files


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_a_run_with_nothing_good_left_stops_and_names_all(tmp_path: Path, way: Way) -> None:
    run_on_ranks(2, save_steps, tmp_path, way)
    for found, files in run_on_ranks(2, damage_all, tmp_path, way):
        assert found[:2] == ["step 2", "step 1"]
        assert all(f"step-{number}" in found[2] for number in (1, 2, 3))
        assert files == ["step-1", "step-2", "step-3"]


def load_clean(folder: Path, ways: list[Way], ranks: dict[str, list[list[State]]]) -> list[str]:
    wrong = []
    for way in ways:
        states = ranks[way.name][dist.get_rank()]
        for verify in ("full", "size"):
            run = build(folder / way.name, way, seed=2, load_only=True, verify=verify)
            with lines_of_the_load(logging.WARNING) as lines:
                run.manager.load()
            run.manager.close()
            problems = problems_of(run, states, LAST, with_generators=True)
            wrong += [f"{way}, {verify}: {each}" for each in (*problems, *lines)]
    return wrong


def save_all(folder: Path, ways: list[Way]) -> dict[str, list[State]]:
    return {way.name: save_steps(folder / way.name, way) for way in ways}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(1, [DISABLED, TC_WAITING]), (2, [ASYNC, PINNED, TC])],
    ids=["1", "2"],
)
def test_what_is_as_it_was_written_raises_no_alarm(
    tmp_path: Path, world_size: int, ways: list[Way]
) -> None:
    saved = run_on_ranks(world_size, save_all, tmp_path, ways, timeout_seconds=120)
    states = {way.name: [rank[way.name] for rank in saved] for way in ways}
    for wrong in run_on_ranks(world_size, load_clean, tmp_path, ways, states, timeout_seconds=120):
        assert not wrong, "\n".join(wrong)
