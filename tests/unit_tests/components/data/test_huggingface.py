"""Hugging Face datasets from local files; nothing here may reach the network."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
    SingleDatasetConfig,
)
from torchtitan.components.data.types import DatasetIterationPolicy
from torchtitan.hf_datasets.text_datasets import DATASETS

from tests.unit_tests.components.data.streams import MakeLoader, take, write_lines

POLICY = DatasetIterationPolicy(seed=0, shuffle=False, repeat=True, dp_rank=0, dp_world_size=1)
SOURCES = [HuggingFaceRandomAccessSource, HuggingFaceStreamingSource]


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, Any]:
    """Keywords that keep what the library writes inside the test."""
    return {"cache_dir": str(tmp_path / "hf")}


def config_of(source: Any, path: Path, cached: dict[str, Any], split: str = "train") -> Any:
    kwargs = {"data_files": str(path), **cached}
    return source.Config(path="json", split=split, load_dataset_kwargs=kwargs)


def test_rows_are_reached_by_number(tmp_path: Path, cached: dict[str, Any]) -> None:
    path = write_lines(tmp_path / "rows.json", ["r0", "r1", "r2"])
    source = config_of(HuggingFaceRandomAccessSource, path, cached).build(
        dataset_iteration_policy=POLICY
    )
    assert (len(source), source[0], source[-1]) == (3, {"text": "r0"}, {"text": "r2"})
    assert [record.fields["text"] for record in source.scan()] == ["r0", "r1", "r2"]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            source[outside]


def test_the_digest_is_that_of_the_rows(tmp_path: Path, cached: dict[str, Any]) -> None:
    def digest(path: Path, split: str = "train") -> str:
        config = config_of(HuggingFaceRandomAccessSource, path, cached, split)
        return config.build(dataset_iteration_policy=POLICY).digest(tmp_path / "notes")

    first = digest(write_lines(tmp_path / "one.json", ["a", "b"]))
    assert digest(tmp_path / "one.json") == first
    assert digest(write_lines(tmp_path / "two.json", ["a", "b"])) == first
    assert digest(tmp_path / "two.json", "train[:1]") != first
    assert digest(write_lines(tmp_path / "three.json", ["b", "a"])) != first


def test_a_digest_is_remembered(
    tmp_path: Path, cached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        HuggingFaceRandomAccessSource, write_lines(tmp_path / "x.json", ["a"]), cached
    )
    first = config.build(dataset_iteration_policy=POLICY).digest(tmp_path / "notes")
    monkeypatch.setattr(HuggingFaceRandomAccessSource, "scan", None)
    assert config.build(dataset_iteration_policy=POLICY).digest(tmp_path / "notes") == first


def test_a_corpus_and_lines_of_the_same_text_make_the_same_rows(
    make_loader: MakeLoader, corpus: Path, cached: dict[str, Any]
) -> None:
    source = config_of(HuggingFaceRandomAccessSource, corpus, cached)
    data = ConcatThenSplitPackingConfig(dataset=SingleDatasetConfig(source=source))
    assert take(make_loader(dataset=data), 20) == take(make_loader(), 20)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": "x"}, "row 0: no field 'text'; fields that are there: body"),
        ({"text": 5}, "row 0: field 'text' holds a int, not text"),
        ({"text": None, "a": 1}, "row 0: field 'text' holds a NoneType, not text"),
    ],
)
def test_check_names_row_and_field(
    tmp_path: Path, cached: dict[str, Any], source: Any, row: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row) + "\n")
    (problem,) = SingleDatasetConfig(source=config_of(source, path, cached)).check()
    assert problem.startswith(f"json [train], {reason}")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("key", ["split", "name", "revision", "streaming"])
def test_settings_of_the_source_are_not_keywords_too(source: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"repeated in kwargs: {key}"):
        source.Config(path="json", split="train", load_dataset_kwargs={key: "x"})


@pytest.mark.parametrize(
    ("source", "kind"), [(SOURCES[0], "one Dataset"), (SOURCES[1], "one IterableDataset")]
)
def test_several_splits_are_refused(
    tmp_path: Path, cached: dict[str, Any], source: Any, kind: str
) -> None:
    config = config_of(source, write_lines(tmp_path / "x.json", ["a"]), cached)
    config.split = None
    (problem,) = SingleDatasetConfig(source=config).check()
    assert f"requires {kind}" in problem and "Name a single split" in problem


@pytest.mark.parametrize("source", SOURCES)
def test_data_that_is_not_there_is_named(
    tmp_path: Path, cached: dict[str, Any], source: Any
) -> None:
    missing = config_of(source, tmp_path / "missing.json", cached)
    (problem,) = SingleDatasetConfig(source=missing).check()
    assert problem.startswith("cannot load the dataset json [train]: ")


def test_an_empty_stream_is_found_beforehand(tmp_path: Path, cached: dict[str, Any]) -> None:
    source = config_of(HuggingFaceStreamingSource, write_lines(tmp_path / "x.json", []), cached)
    (problem,) = SingleDatasetConfig(source=source).check()
    assert problem.startswith("the dataset json [train] is empty: found no row")


def test_the_named_dataset_that_comes_along_makes_rows(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch, cached: dict[str, Any]
) -> None:
    assert sorted(DATASETS) == ["c4", "c4_test", "c4_validation"]
    monkeypatch.chdir(Path(__file__).parents[4])
    test_data: Any = DATASETS["c4_test"].source
    kwargs = {**test_data.load_dataset_kwargs, **cached}
    source = HuggingFaceRandomAccessSource.Config(
        path=test_data.path, split=test_data.split, load_dataset_kwargs=kwargs
    )
    data = SingleDatasetConfig(source=source)
    assert data.check() == []
    loader = make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data), row_length=64)
    assert len(take(loader, 2)) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_broken_files_are_named_with_the_reason(
    tmp_path: Path, cached: dict[str, Any], source: Any, make_loader: MakeLoader
) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "fine"}\n' * 30 + '{"text": broken}\n')
    data = SingleDatasetConfig(source=config_of(source, path, cached))
    (problem,) = data.check()
    assert "json [train]" in problem and "JSON parse error" in problem and "row 30" in problem
    with pytest.raises(ValueError, match=r"json \[train\].*JSON parse error.*row 30"):
        next(make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data)))
