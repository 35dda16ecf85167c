import os
from pathlib import Path

import pytest
from torchtitan.components.data import (
    DatasetIterationPolicy,
    IndexedJsonlSource,
    LocalFilesSource,
    RandomAccessDataSource,
)
from torchtitan.components.data.files import JsonlFile, Record, SampleError

POLICY = DatasetIterationPolicy(seed=0, shuffle=False, repeat=True, dp_rank=0, dp_world_size=1)


def jsonl(*patterns: str | Path) -> RandomAccessDataSource:
    config = IndexedJsonlSource.Config(patterns=tuple(map(str, patterns)))
    return config.build(dataset_iteration_policy=POLICY)


def local(*patterns: str | Path) -> RandomAccessDataSource:
    config = LocalFilesSource.Config(patterns=[str(pattern) for pattern in patterns])
    return config.build(dataset_iteration_policy=POLICY)


def texts(source: RandomAccessDataSource) -> list[str]:
    return [record.fields["text"] for record in source.scan()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.jsonl").write_text('{"text": "b0"}\n\n  \t\n{"text": "b1"}')
    (tmp_path / "a.jsonl").write_text('{"text": "a0"}\n{"text": "a1"}\n')
    return tmp_path


def test_files_come_sorted_and_blank_lines_count_for_nothing(folder: Path) -> None:
    source = jsonl(folder / "*.jsonl")
    assert len(source) == 4
    assert [source[index]["text"] for index in range(4)] == ["a0", "a1", "b0", "b1"]
    assert texts(source) == ["a0", "a1", "b0", "b1"]
    assert texts(jsonl(folder / "b.jsonl", folder / "a.jsonl")) == texts(source)


def test_negative_numbers_count_from_the_end_and_others_are_index_errors(folder: Path) -> None:
    source = jsonl(folder / "*.jsonl")
    assert source[-1]["text"] == "b1"
    assert source[-4]["text"] == "a0"
    for outside in (4, -5):
        with pytest.raises(IndexError):
            source[outside]


def test_every_pattern_without_a_file_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        jsonl(folder / "a.jsonl", folder / "y*.jsonl", folder / "x.jsonl", folder)
    message = str(caught.value)
    assert message.index(f"{folder},") < message.index("x.jsonl") < message.index("y*.jsonl")
    assert "a.jsonl" not in message and str(Path.cwd()) in message


def test_a_file_named_twice_is_refused_under_any_name(folder: Path) -> None:
    (folder / "link.jsonl").symlink_to(folder / "a.jsonl")
    with pytest.raises(ValueError, match="more than once"):
        jsonl(folder / "a.jsonl", folder / "a*")
    with pytest.raises(ValueError, match="more than once.*link.jsonl"):
        jsonl(folder / "a.jsonl", folder / "link.jsonl")


def test_all_empty_files_are_named(folder: Path) -> None:
    for name in ("d.jsonl", "c.jsonl"):
        (folder / name).touch()
    with pytest.raises(ValueError, match=r"empty data files: .*c\.jsonl, .*d\.jsonl"):
        jsonl(folder / "*.jsonl")


def test_a_name_with_glob_characters_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "[1].jsonl").write_text('{"text": "x"}\n')
    assert texts(jsonl(tmp_path / "[1].jsonl")) == ["x"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "a JSON list, not an object"),
        ('"text"', "a JSON str, not an object"),
        ("\udcff", "not JSON"),
        ("[" * 200_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(folder: Path, line: str, reason: str) -> None:
    file = folder / "a.jsonl"
    file.write_bytes(b'{"text": "a0"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    where = f"{file}, line 3: {reason}"
    with pytest.raises(SampleError) as scanned:
        texts(jsonl(file))
    with pytest.raises(SampleError) as picked:
        jsonl(file)[1]
    (probed,) = [found for found in JsonlFile(file).probe(None) if isinstance(found, SampleError)]
    assert str(scanned.value).startswith(where)
    assert str(probed).startswith(where)
    assert str(picked.value).startswith(where)


def test_suffixes_decide_how_local_files_are_read(folder: Path) -> None:
    (folder / "story.txt").write_text("one\n\ntwo\n")
    (folder / "marked.md").write_bytes(b"\xef\xbb\xbfafter the mark")
    source = local(folder / "*")
    assert texts(source) == ["a0", "a1", "b0", "b1", "after the mark", "one\n\ntwo\n"]
    assert source[-1]["text"] == "one\n\ntwo\n"


def test_unknown_suffixes_are_all_named(folder: Path) -> None:
    for name in ("z.csv", "c.gz"):
        (folder / name).write_text("x")
    with pytest.raises(ValueError, match=r"how to read .*c\.gz, .*z\.csv\. Use \.jsonl"):
        local(folder / "*")


def test_text_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"ab\xff")
    with pytest.raises(SampleError, match=r"x\.txt, byte 2: not UTF-8"):
        texts(local(tmp_path / "x.txt"))


def test_a_large_file_is_probed_at_both_ends_and_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.components.data.files._TAIL_BYTES", 100)
    file = tmp_path / "large.jsonl"
    lines = [f'{{"text": "{number:03d}"}}' for number in range(50)]
    lines[20] = "broken, but in the middle"
    lines[48] = "broken"
    file.write_text("\n".join(lines) + "\n")
    found = list(JsonlFile(file).probe(num_lines=3))
    good = [record.fields["text"] for record in found if isinstance(record, Record)]
    assert good == ["000", "001", "002", "047", "049"]
    (problem,) = [str(error) for error in found if isinstance(error, SampleError)]
    assert problem.startswith(f"{file}, 1 lines before its end: not JSON")

    file.write_text("\n".join(lines[:6]))
    assert len(list(JsonlFile(file).probe(num_lines=4))) == 6


def test_the_digest_follows_content_and_order_not_names(folder: Path) -> None:
    cache = folder / "cache"
    original = jsonl(folder / "*.jsonl").digest(cache)
    moved = folder / "moved"
    moved.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        os.rename(folder / name, moved / name)
    assert jsonl(moved / "*.jsonl").digest(cache) == original

    os.rename(moved / "a.jsonl", moved / "c.jsonl")
    assert jsonl(moved / "*.jsonl").digest(cache) != original
    os.rename(moved / "c.jsonl", moved / "a.jsonl")
    (moved / "a.jsonl").write_text('{"text": "a0"}\n{"text": "a2"}\n')
    assert jsonl(moved / "*.jsonl").digest(cache) != original


def test_a_settled_file_is_read_once_and_a_changed_one_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(folder / "a.jsonl")
    # A clock of the future makes the file an old one.
    monkeypatch.setattr("torchtitan.components.data.digests.time.time", lambda: 4e9)
    digest = source.digest(folder / "cache")
    (note,) = (folder / "cache/digests").glob("*.json")
    note.write_text(note.read_text().replace('"digest": "', '"digest": "noted'))
    assert source.digest(folder / "cache") != digest

    (folder / "a.jsonl").write_text('{"text": "a1"}\n{"text": "a0"}\n')
    assert source.digest(folder / "cache") == source.digest(folder / "other cache") != digest


def test_a_file_changed_a_moment_ago_is_not_noted(folder: Path) -> None:
    jsonl(folder / "a.jsonl").digest(folder / "cache")
    assert not list((folder / "cache/digests").glob("*.json"))


def test_a_file_that_changes_or_goes_while_it_is_read_is_named(folder: Path) -> None:
    refuse_changes = jsonl(folder / "*.jsonl").watch()
    refuse_changes()
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"text": "b1"}\n')
    reason = "changed while it was read; start again when it is complete"
    with pytest.raises(ValueError, match=rf"^{folder}/b\.jsonl {reason}"):
        refuse_changes()
    (folder / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=rf"^{folder}/a\.jsonl, {folder}/b\.jsonl {reason}"):
        refuse_changes()


def test_a_cache_folder_that_cannot_be_made_costs_no_digest(folder: Path) -> None:
    source = jsonl(folder / "a.jsonl")
    assert source.digest(folder / "a.jsonl") == source.digest(folder / "cache")


def test_a_text_in_place_of_patterns_is_refused(folder: Path) -> None:
    config = IndexedJsonlSource.Config(patterns=str(folder / "*.jsonl"))  # type: ignore[arg-type]: on purpose
    with pytest.raises(
        ValueError, match="expected, but found the text .*Put it into a list or tuple"
    ):
        config.build(dataset_iteration_policy=POLICY)
