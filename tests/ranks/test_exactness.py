"""A run that stopped and was started again gives the bits of one that never stopped, in every
layout, save mode and with accumulated gradients.

Each cell stops once; the cells of a layout together stop after the first step (the next one takes
the end of one epoch and the beginning of another), inside an epoch, exactly at the end of one, and
after what was the last step. The runs of one number of ranks share one set of processes, but each
run is a trainer of its own.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.components.data import GrainDataLoader
from torchtitan.models.common.decoder import Decoder

from tests.ranks.layouts import (
    FSDP_2,
    FSDP_TP_4,
    HSDP_4,
    Layout,
    samples_in_order,
    TP_2,
    TP_2_NO_SP,
)
from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, Recorded, run, Trace, write_corpus
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    PINNED,
    TC,
    TC_WAITING,
    Way,
)

NUM_STEPS = 5
ROWS_PER_STEP = 8
# So step 2 begins the second epoch, and step 3 ends it.
NUM_ROWS, NUM_DOCUMENTS = 12, 14
LAYOUTS = [FSDP_2, TP_2, HSDP_4, FSDP_TP_4]
ACCUMULATIONS = [1, 2]
DCP_WAYS = [DISABLED, ASYNC, PINNED]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where a run ends that another goes on from."""

    name: str
    after: int
    finished: bool = False
    """It was all that was asked for, and more steps come later."""


STOPS = [
    Stop(name="first step", after=1),
    Stop(name="inside an epoch", after=2),
    Stop(name="end of an epoch", after=3),
    Stop(name="finished", after=4, finished=True),
]


@dataclass(frozen=True, kw_only=True)
class Cell:
    layout: Layout
    accumulation: int
    way: Way
    stop: Stop

    def __str__(self) -> str:
        return f"{self.layout}-{self.way}-accumulation {self.accumulation}-{self.stop.name}"


def _cells() -> list[Cell]:
    axes = product(enumerate(LAYOUTS), enumerate(ACCUMULATIONS), enumerate(DCP_WAYS))
    return [
        Cell(
            layout=layout,
            accumulation=accumulation,
            way=way,
            stop=STOPS[(row + 2 * column + depth) % len(STOPS)],
        )
        for (row, layout), (column, accumulation), (depth, way) in axes
    ]


# How gradients are accumulated is nothing that a manager sees, and whether tokens are shared changes
# only what is computed: of these a few cells tell enough.
CELLS = [
    *_cells(),
    Cell(layout=TP_2_NO_SP, accumulation=2, way=PINNED, stop=STOPS[1]),
    Cell(layout=TP_2_NO_SP, accumulation=2, way=TC_WAITING, stop=STOPS[0]),
    Cell(layout=FSDP_2, accumulation=1, way=TC_WAITING, stop=STOPS[2]),
    Cell(layout=TP_2, accumulation=2, way=TC_WAITING, stop=STOPS[0]),
    Cell(layout=HSDP_4, accumulation=1, way=TC, stop=STOPS[1]),
    Cell(layout=FSDP_TP_4, accumulation=2, way=TC, stop=STOPS[3]),
]


def straight_and_resumed(folder: str, layout: Layout) -> dict[tuple[int, str], list[Trace]]:
    """Traces of this rank by accumulation and way: the straight run, the stopped, the resumed."""
    traces = {}
    cells = [cell for cell in CELLS if cell.layout == layout]
    for accumulation in sorted({cell.accumulation for cell in cells}):
        name = f"{layout.name}-{accumulation}"
        straight = _start_anew(_config(folder, name, layout, accumulation, load_only=True))
        for cell in cells:
            if cell.accumulation == accumulation:
                traces[accumulation, cell.way.name] = [
                    straight,
                    *_stopped_and_resumed(folder, cell),
                ]
    return traces


def all_of_one_size(folder: str, num_ranks: int) -> dict[str, dict[tuple[int, str], list[Trace]]]:
    return {
        layout.name: straight_and_resumed(folder, layout)
        for layout in dict.fromkeys(cell.layout for cell in CELLS)
        if layout.num_ranks == num_ranks
    }


def _stopped_and_resumed(folder: str, cell: Cell) -> list[Trace]:
    stop, name = cell.stop, f"{cell.layout.name}-{cell.accumulation}-{cell.way}"

    def config(**checkpoint: Any) -> Recorded.Config:
        return _config(
            folder, name, cell.layout, cell.accumulation, **cell.way.settings, **checkpoint
        )

    if stop.finished:
        first = config(interval=2)
        first.training.steps = stop.after
        before = _start_anew(first)
    else:
        first = config(interval=stop.after if stop.after > 1 else 1000)
        first.checkpoint.enable_first_step_checkpoint = stop.after == 1
        # One more step: it must not change what is being saved.
        before = _start_anew(first, crash_after=stop.after + 1)
    return [before, _start_anew(config(load_only=True))]


def _config(
    folder: str, name: str, layout: Layout, accumulation: int, **checkpoint: Any
) -> Recorded.Config:
    config = make_config(Path(folder), name, **checkpoint)
    config.training.steps = NUM_STEPS
    assert isinstance(config.dataloader, GrainDataLoader.Config) and config.model_spec is not None
    config.dataloader.files = [write_corpus(Path(folder), NUM_DOCUMENTS)]
    assert isinstance(config.model_spec.model, Decoder.Config)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    return layout.divide(config, rows_per_step=ROWS_PER_STEP, accumulation=accumulation)


def _start_anew(config: Recorded.Config, crash_after: int | None = None) -> Trace:
    """Run as a new process would, whose generators stand anywhere."""
    random.seed()
    np.random.seed()
    torch.seed()
    return run(config, crash_after=crash_after, draws=True)


@pytest.fixture(scope="module")
def ranks_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Cell], list[list[Trace]]]:
    """The traces of a cell, by rank; the runs of as many ranks are all made for the first one."""

    @functools.cache
    def runs(num_ranks: int) -> list[dict[str, dict[tuple[int, str], list[Trace]]]]:
        folder = str(tmp_path_factory.mktemp(f"ranks-{num_ranks}"))
        return run_on_ranks(
            num_ranks, all_of_one_size, folder, num_ranks, init=False, timeout_seconds=600
        )

    return lambda cell: [
        layouts[cell.layout.name][cell.accumulation, cell.way.name]
        for layouts in runs(cell.layout.num_ranks)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_resuming_gives_the_bits_of_the_run_that_never_stopped(
    cell: Cell, ranks_of: Callable[[Cell], list[list[Trace]]]
) -> None:
    ranks = ranks_of(cell)
    for straight, before, after in ranks:
        assert sorted(straight.losses) == list(range(1, NUM_STEPS + 1))
        # A way that was given up would pass all that follows, with saves that training waits for.
        assert before.is_background == cell.way.is_background
        assert before.has_writer == cell.way.has_writer
        assert after.resumed_from == cell.stop.after
        assert min(after.losses) == cell.stop.after + 1
        for kind in ("samples", "losses", "learning_rates", "epochs"):
            whole = getattr(straight, kind)
            for part in (before, after):
                for step, value in getattr(part, kind).items():
                    assert value == whole[step], f"{kind} of step {step}"
        assert after.state == straight.state
        assert after.rng == straight.rng
    assert len({straight.rng["torch"] for straight, *_ in ranks}) == len(ranks)
    first, *others = (straight for straight, *_ in ranks)
    assert all(other.losses == first.losses and other.state == first.state for other in others)


def test_the_cells_stop_everywhere_with_every_manager_and_save_every_layout_with_each() -> None:
    for layout in LAYOUTS:
        assert {cell.stop for cell in CELLS if cell.layout == layout} == set(STOPS)
    by_torch_checkpointing = [cell for cell in CELLS if cell.way in (TC, TC_WAITING)]
    assert {cell.layout for cell in by_torch_checkpointing} == {*LAYOUTS, TP_2_NO_SP}
    assert {cell.stop for cell in by_torch_checkpointing} == set(STOPS)
    for way in DCP_WAYS:
        assert {cell.stop for cell in CELLS if cell.way == way} == set(STOPS)
    assert len(CELLS) == 30


@pytest.mark.ranks
def test_two_epochs_end_with_the_third_step(
    ranks_of: Callable[[Cell], list[list[Trace]]],
) -> None:
    whole = [straight for straight, *_ in ranks_of(CELLS[0])]
    rows = [row for step in (1, 2, 3) for row in samples_in_order(whole, step, CELLS[0].layout)]
    assert len(set(rows[:NUM_ROWS])) == NUM_ROWS
    assert sorted(rows[:NUM_ROWS]) == sorted(rows[NUM_ROWS:])
    assert [whole[0].epochs[step] for step in (1, 2, 3)] == [0, 1, 2]
