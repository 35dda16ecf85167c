import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.data import (
    GrainDataLoader,
    IndexedJsonlSource,
    LocalFilesSource,
    SingleDatasetConfig,
    TextSequence,
)
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.unit_tests.components.data.conftest import ROW_LENGTH

MakeLoader = Callable[..., GrainDataLoader]
Row = tuple[tuple[int, ...], ...]


def rows_in(loader: GrainDataLoader) -> Any:
    """The rows that a loader of a corpus reads."""
    feed: Any = loader._feed
    return feed._rows


def rows_of(batch: tuple) -> list[Row]:
    """(inputs, labels, positions) of each row of a microbatch."""
    inputs, labels = batch
    parts = [
        tensor.view(-1, ROW_LENGTH).tolist()
        for tensor in (inputs["input"], labels, inputs["positions"])
    ]
    return [tuple(map(tuple, row)) for row in zip(*parts, strict=True)]


def take(loaders: list[GrainDataLoader], num_microbatches: int) -> list[Row]:
    """The rows of all ranks in the global order."""
    return [
        row
        for _ in range(num_microbatches)
        for loader in loaders
        for row in rows_of(next(iter(loader)))
    ]


def ranks(make_loader: MakeLoader, world: int, **settings: object) -> list[GrainDataLoader]:
    return [make_loader(world=world, rank=rank, **settings) for rank in range(world)]


@pytest.fixture(scope="session")
def num_rows(tokenizer: HuggingFaceTokenizer, corpus: Path, cache_dir: str) -> int:
    config = GrainDataLoader.Config(files=[str(corpus)], cache_dir=cache_dir)
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=tokenizer,
        max_context_length=ROW_LENGTH,
        num_tokens_per_batch=ROW_LENGTH,
    )
    return len(rows_in(loader))


@pytest.mark.parametrize(("world", "rows"), [(2, 1), (4, 1), (1, 3), (2, 2), (4, 3)])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_ranks_and_microbatches_do_not_change_the_order(
    make_loader: MakeLoader, num_rows: int, world: int, rows: int, prefetch: int
) -> None:
    num_microbatches = 3 * num_rows // (world * rows)
    loaders = ranks(make_loader, world, rows=rows, num_prefetch_batches=prefetch)
    straight = take([make_loader()], num_microbatches * world * rows)
    assert take(loaders, num_microbatches) == straight


def test_each_epoch_brings_every_row_once(make_loader: MakeLoader, num_rows: int) -> None:
    straight = take([make_loader()], 2 * num_rows)
    first, second = straight[:num_rows], straight[num_rows:]
    assert set(first) == set(second)
    assert first != second
    unshuffled = take([make_loader(shuffle=False)], 2 * num_rows)
    assert unshuffled[:num_rows] == unshuffled[num_rows:]
    assert set(unshuffled) == set(first)


def test_a_run_stopped_anywhere_goes_on_with_the_next_row(
    make_loader: MakeLoader, num_rows: int
) -> None:
    total = 2 * num_rows + 5
    straight = take([make_loader()], total)
    states = []
    first_run = make_loader(num_prefetch_batches=2)
    for _ in range(total):
        states.append(first_run.state_dict())
        take([first_run], 1)
    assert (states[num_rows]["epoch"], states[num_rows]["next_row"]) == (1, 0)
    resumed = make_loader()
    for stop, state in enumerate(states):
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        following = straight[stop : stop + 3]
        assert take([resumed], len(following)) == following


def test_a_changed_layout_continues_the_global_order(
    make_loader: MakeLoader, num_rows: int
) -> None:
    straight = take([make_loader()], 2 * num_rows)
    seen: list[Row] = []
    state = None
    for world, rows, microbatches in [(2, 1, 3), (1, 2, 2), (4, 1, num_rows // 4), (3, 2, 1)]:
        loaders = ranks(make_loader, world, rows=rows, num_prefetch_batches=2)
        for loader in loaders:
            loader.load_state_dict(state)
        seen += take(loaders, microbatches)
        states = [loader.state_dict() for loader in loaders]
        assert all(found == states[0] for found in states)
        state = states[0]
    assert seen == straight[: len(seen)]


def test_loading_into_a_used_loader_moves_it(make_loader: MakeLoader) -> None:
    loader = make_loader(num_prefetch_batches=2)
    straight = take([loader], 6)
    loader.load_state_dict({})
    assert take([loader], 2) == straight[:2]
    state = loader.state_dict()
    take([loader], 3)
    loader.load_state_dict(state)
    assert take([loader], 4) == straight[2:]
    loader.load_state_dict(None)
    assert take([loader], 1) == straight[:1]


def test_resuming_reads_nothing_that_was_consumed(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(rows=2)
    take([loader], 4)
    read = []
    row_at = rows_in(loader).row_at
    monkeypatch.setattr(
        rows_in(loader), "row_at", lambda position: read.append(position) or row_at(position)
    )
    loader.load_state_dict(loader.state_dict())
    take([loader], 1)
    assert read == [8, 9]


def test_the_state_counts_what_was_handed_out_not_what_was_read(make_loader: MakeLoader) -> None:
    loader = make_loader(num_prefetch_batches=3)
    fresh = loader.state_dict()
    assert fresh["epoch"] == fresh["next_row"] == 0
    take([loader], 2)
    assert loader.state_dict()["next_row"] == 2
    assert loader.state_dict().keys() == fresh.keys()


def test_the_state_survives_a_checkpoint_into_a_fresh_loader(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    loader = make_loader()
    take([loader], 5)
    expected = loader.state_dict()
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path, no_dist=True)
    fresh = make_loader()
    dcp.load({"dataloader": fresh}, checkpoint_id=tmp_path, no_dist=True)
    assert fresh.state_dict() == expected
    assert take([fresh], 2) == take([loader], 2)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"seed": 7}, "packing"), ({"shuffle": False}, "packing"), ({"row_length": 8}, "packing")],
)
def test_an_order_that_changed_is_refused_and_the_loader_stays(
    make_loader: MakeLoader, settings: dict, name: str
) -> None:
    state = make_loader().state_dict()
    changed = make_loader(**settings)
    next(iter(changed))
    with pytest.raises(ValueError, match=f"the {name} changed"):
        changed.load_state_dict(state)
    assert changed.state_dict()["next_row"] == 1


def test_a_corpus_that_changed_is_refused(make_loader: MakeLoader, tmp_path: Path) -> None:
    state = make_loader().state_dict()
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "something else, long enough to fill the row of sixteen tokens"}')
    with pytest.raises(ValueError, match="the corpus changed"):
        make_loader(files=str(other)).load_state_dict(state)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_repeat_all_ranks_stop_at_the_same_batch(
    make_loader: MakeLoader,
    num_rows: int,
    world: int,
    prefetch: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaders = ranks(make_loader, world, rows=2, repeat=False, num_prefetch_batches=prefetch)
    caplog.set_level("INFO")
    batches = [list(loader) for loader in loaders]
    assert {len(found) for found in batches} == {num_rows // (2 * world)}
    for loader in loaders:
        assert list(loader) == []
        assert loader.state_dict() == loaders[0].state_dict()
    resumed = make_loader(rows=2, world=world, repeat=False)
    resumed.load_state_dict(loaders[0].state_dict())
    assert list(resumed) == []
    assert f"{num_rows % (2 * world)} rows that fill no batch" in caplog.text


def test_iterating_again_goes_on(make_loader: MakeLoader) -> None:
    loader = make_loader()
    assert iter(loader) is iter(loader)
    straight = take([make_loader()], 2)
    assert take([loader], 1) + take([loader], 1) == straight


def test_batches_are_flat_int64(make_loader: MakeLoader) -> None:
    inputs, labels = next(iter(make_loader(rows=3)))
    assert sorted(inputs) == ["input", "positions"]
    for tensor in (*inputs.values(), labels):
        assert tensor.shape == (3 * ROW_LENGTH,)
        assert tensor.dtype == torch.int64


def test_closing_ends_all_threads(make_loader: MakeLoader) -> None:
    def reading() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "prefetch" in thread.name]

    held = []
    open_loader = make_loader(num_prefetch_batches=2)
    take([open_loader], 1)
    assert len(reading()) == 1
    open_loader.close()
    for _ in range(20):
        loader = make_loader(num_prefetch_batches=2)
        take([loader], 1)
        # Held here, so that it is not its destruction that ends the thread.
        held.append(loader._opened)
        loader.close()
        loader.close()
    assert reading() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_row_that_fails_is_raised_and_met_again(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = take([make_loader()], 6)
    loader = make_loader(rows=2, num_prefetch_batches=2)
    row_at = rows_in(loader).row_at
    # The second row of the second microbatch: the first one was read by then.
    failing = {3}

    def row_or_error(position: int) -> TextSequence:
        if position in failing:
            raise OSError("disk gone")
        return row_at(position)

    monkeypatch.setattr(rows_in(loader), "row_at", row_or_error)
    assert take([loader], 1) == straight[:2]
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    assert loader.state_dict()["next_row"] == 2
    failing.clear()
    assert take([loader], 2) == straight[2:]


def test_ids_beyond_the_vocabulary_are_refused(
    make_loader: MakeLoader,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "_vocab_size", 300)
    with pytest.raises(ValueError, match="says that its vocabulary has 300 entries"):
        make_loader(cache_dir=str(tmp_path))


def test_a_file_that_grows_after_its_digest_leaves_no_cache(
    make_loader: MakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "growing.jsonl"
    file.write_text('{"text": "a few words to fill the row with tokens"}\n' * 9)
    digest_of = LocalFilesSource.digest

    def digest(source: LocalFilesSource, cache_folder: Path) -> str:
        found = digest_of(source, cache_folder)
        with file.open("a") as grown:
            grown.write('{"text": "more words"}\n')
        return found

    monkeypatch.setattr(LocalFilesSource, "digest", digest)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"growing\.jsonl changed while it was read; start again"):
        make_loader(files=str(file), cache_dir=str(cache))
    assert not list(cache.glob("tokens/*/header.json"))
    monkeypatch.undo()
    make_loader(files=str(file), cache_dir=str(cache))


def test_documents_that_are_not_packed_are_refused(
    tokenizer: HuggingFaceTokenizer, corpus: Path, cache_dir: str
) -> None:
    source = IndexedJsonlSource.Config(patterns=(str(corpus),))
    config = GrainDataLoader.Config(dataset=SingleDatasetConfig(source=source), cache_dir=cache_dir)
    with pytest.raises(ValueError, match="Wrap it in ConcatThenSplitPackingConfig"):
        config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=tokenizer,
            max_context_length=8,
            num_tokens_per_batch=8,
        )
