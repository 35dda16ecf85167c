"""What a crash may leave in the cases that are known to go wrong; each test lists all that may be there."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.crash.model import DiskModel
from tests.crash.operations import Kind, Operation
from tests.crash.points import crash_states
from tests.crash.tree import from_values, Link, to_values


def do(kind: Kind, path: str, target: str = "", content: bytes = b"", rank: int = 0) -> Operation:
    return Operation(rank, kind, path, target, content)


def written(path: str, content: bytes) -> list[Operation]:
    return [do(Kind.CREATE, path), do(Kind.WRITE, path, content=content)]


def sync(path: str) -> Operation:
    return do(Kind.SYNC, path)


def sync_directory(path: str) -> Operation:
    return do(Kind.SYNC_DIRECTORY, path)


def rename(path: str, target: str) -> Operation:
    return do(Kind.RENAME, path, target)


def frozen(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (name, frozen(value) if isinstance(value, Mapping) else value)
        for name, value in sorted(values.items())
    )


def model_after(*operations: Operation, start: Mapping[str, Any] | None = None) -> DiskModel:
    model = DiskModel(from_values(start or {}))
    for operation in operations:
        model.apply(operation)
    return model


def outcomes(
    *operations: Operation, start: Mapping[str, Any] | None = None
) -> set[tuple[Any, ...]]:
    """All that may be on the disk after a crash just after the last of ``operations``."""
    model = model_after(*operations, start=start)
    last = operations[-1]
    return {frozen(to_values(tree)) for _, tree in crash_states(model, last)}


def these(*values: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return set(map(frozen, values))


def test_a_synced_file_whose_name_was_not_synced_may_be_gone() -> None:
    history = [*written("a", b"x"), sync("a")]
    assert outcomes(*history) == these({"a": b"x"}, {})
    assert outcomes(*history, sync_directory("")) == these({"a": b"x"})


def test_a_name_that_was_synced_before_its_file_may_hold_nothing() -> None:
    history = [*written("a", b"1234"), sync_directory("")]
    assert outcomes(*history) == these({"a": b"1234"}, {"a": b""}, {"a": b"12"}, {"a": bytes(4)})


def test_a_name_renamed_over_without_a_sync_of_the_file_may_hold_nothing() -> None:
    history = [*written("t", b"new!"), rename("t", "a")]
    new = [{"a": b"new!"}, {"a": b""}, {"a": b"ne"}, {"a": bytes(4)}]
    old = [{"a": b"old"}, {"a": b"old", "t": b""}, {"a": b"old", "t": b"new!"}]
    assert outcomes(*history, start={"a": b"old"}) == these(*new, *old)
    assert outcomes(*history, sync_directory(""), start={"a": b"old"}) == these(*new)


def test_a_name_renamed_over_with_a_synced_file_holds_the_old_or_the_new() -> None:
    history = [*written("t", b"new"), sync("t"), rename("t", "a")]
    found = outcomes(*history, start={"a": b"old"})
    assert found == these({"a": b"new"}, {"a": b"old"}, {"a": b"old", "t": b"new"})
    found = outcomes(*history, sync_directory(""), start={"a": b"old"})
    assert found == these({"a": b"new"})


def test_a_file_may_be_synced_after_it_was_renamed() -> None:
    history = [*written("t", b"x"), rename("t", "a"), sync("t"), sync_directory("")]
    assert outcomes(*history) == these({"a": b"x"})


def test_a_write_may_be_torn() -> None:
    history = [do(Kind.CREATE, "a"), sync("a"), sync_directory("")]
    model = model_after(*history, last := do(Kind.WRITE, "a", content=b"1234"))
    states = dict(crash_states(model, last))
    assert to_values(states["torn: half"]) == {"a": b"12"}
    assert to_values(states["torn: nothing"]) == {"a": b""}


def test_what_was_synced_is_kept_by_what_is_appended() -> None:
    history = [*written("a", b"ab"), sync("a"), sync_directory("")]
    found = outcomes(*history, do(Kind.WRITE, "a", content=b"cd"), do(Kind.MKDIR, "d"))
    without = {frozen({name: each for name, each in state if name == "a"}) for state in found}
    assert without == these({"a": b"abcd"}, {"a": b"ab"}, {"a": b"abc"}, {"a": b"ab\0\0"})


def test_a_file_written_anew_in_place_may_hold_the_old_the_new_or_nothing() -> None:
    found = outcomes(*written("a", b"new!"), start={"a": b"old"})
    contents = [b"new!", b"ne", bytes(4), b"", b"old"]
    assert found == these(*({"a": content} for content in contents))
    assert outcomes(*written("a", b"new!"), sync("a"), start={"a": b"old"}) == these({"a": b"new!"})


def test_the_content_of_one_file_may_be_lost_without_that_of_another() -> None:
    found = outcomes(*written("a", b"1"), *written("b", b"2"), sync_directory(""))
    assert these({"a": b"1", "b": b""}, {"a": b"", "b": b"2"}) <= found


def test_a_file_may_be_whole_while_the_name_of_an_earlier_one_is_gone() -> None:
    assert these({"b": b"2"}, {"a": b"1"}) <= outcomes(*written("a", b"1"), *written("b", b"2"))


def test_a_rename_across_directories_may_leave_both_names_and_never_neither() -> None:
    start = {"p": {"a": b"x"}, "q": {}}
    old, new = {"p": {"a": b"x"}, "q": {}}, {"p": {}, "q": {"b": b"x"}}
    both = {"p": {"a": b"x"}, "q": {"b": b"x"}}
    moved = rename("p/a", "q/b")
    assert outcomes(moved, start=start) == these(old, new, both)
    assert outcomes(moved, sync_directory("q"), start=start) == these(new, both)
    assert outcomes(moved, sync_directory("p"), start=start) == these(new)


def test_a_directory_that_is_moved_is_like_a_file_that_is() -> None:
    start = {"d": {"f": b"x"}, "q": {}}
    old, new = {"d": {"f": b"x"}, "q": {}}, {"q": {"d": {"f": b"x"}}}
    both = {"d": {"f": b"x"}, "q": {"d": {"f": b"x"}}}
    assert outcomes(rename("d", "q/d"), start=start) == these(old, new, both)


def test_a_name_is_not_taken_before_what_had_it_has_another_one() -> None:
    """As a step is saved again: the old one is moved aside, the new one gets its name."""
    start = {"s": {"f": b"old"}, "t": {"f": b"new"}, "aside": {}}
    history = [rename("s", "aside/s"), rename("t", "s")]
    found = outcomes(*history, start=start)
    old, new = {"f": b"old"}, {"f": b"new"}
    assert found == these(
        {"s": new, "aside": {"s": old}},
        {"s": old, "t": new, "aside": {}},
        {"s": old, "t": new, "aside": {"s": old}},
        {"t": new, "aside": {"s": old}},
    )
    found = outcomes(*history, sync_directory(""), start=start)
    assert found == these({"s": new, "aside": {"s": old}})


def test_what_was_unlinked_may_be_back() -> None:
    unlinked = do(Kind.UNLINK, "a")
    assert outcomes(unlinked, start={"a": b"x"}) == these({}, {"a": b"x"})
    assert outcomes(unlinked, sync_directory(""), start={"a": b"x"}) == these({})


def test_a_directory_that_was_deleted_may_be_back_with_or_without_what_it_held() -> None:
    start = {"d": {"f": b"x"}}
    history = [do(Kind.UNLINK, "d/f"), do(Kind.RMDIR, "d")]
    assert outcomes(*history, start=start) == these({}, {"d": {}}, start)
    assert outcomes(*history, sync_directory(""), start=start) == these({})
    history.insert(1, sync_directory("d"))
    assert outcomes(*history, start=start) == these({}, {"d": {}})


def test_a_directory_whose_parent_was_not_synced_may_be_gone_with_all_that_was_synced_in_it() -> (
    None
):
    history = [do(Kind.MKDIR, "d"), *written("d/f", b"x"), sync("d/f")]
    assert outcomes(*history) == these({}, {"d": {}}, {"d": {"f": b"x"}})
    history.append(sync_directory("d"))
    assert outcomes(*history) == these({}, {"d": {"f": b"x"}})
    history.append(sync_directory(""))
    assert outcomes(*history) == these({"d": {"f": b"x"}})


def test_what_is_moved_into_a_directory_that_is_not_durable_may_go_with_it() -> None:
    history = [do(Kind.MKDIR, "q/n"), rename("p/a", "q/n/a")]
    start = {"p": {"a": b"x"}, "q": {}}
    found = outcomes(*history, sync_directory("q/n"), sync_directory("p"), start=start)
    assert found == these({"p": {}, "q": {"n": {"a": b"x"}}}, {"p": {}, "q": {}})


def test_two_renames_in_one_directory_may_become_durable_in_either_order() -> None:
    found = outcomes(rename("a", "c"), rename("b", "d"), start={"a": b"1", "b": b"2"})
    values = [("a", "b"), ("c", "b"), ("a", "d"), ("c", "d")]
    assert found == these(*({first: b"1", second: b"2"} for first, second in values))


def test_two_renames_of_one_name_keep_their_order() -> None:
    start = {"a": b"1", "b": b"2"}
    found = outcomes(rename("b", "c"), rename("a", "b"), start=start)
    assert found == these({"c": b"2", "b": b"1"}, start, {"a": b"1", "c": b"2"})


def test_changes_in_one_directory_may_be_lost_without_those_in_another() -> None:
    start = {"p": {}, "q": {}}
    history = [do(Kind.CREATE, f"{path}/{name}") for path in "pq" for name in "ab"]
    whole = {"a": b"", "b": b""}
    assert these({"p": whole, "q": {}}, {"p": {}, "q": whole}) <= outcomes(*history, start=start)


def test_the_second_file_of_a_new_directory_may_be_there_without_the_first() -> None:
    history = [do(Kind.MKDIR, "d"), do(Kind.CREATE, "d/a"), do(Kind.CREATE, "d/b")]
    found = outcomes(*history)
    assert found == these(
        {}, {"d": {}}, *({"d": dict.fromkeys(names, b"")} for names in ("a", "b", "ab"))
    )


def test_what_is_there_alone_is_there_with_the_new_directory_it_is_in() -> None:
    history = [do(Kind.MKDIR, "p"), *(do(Kind.CREATE, f"p/{name}") for name in "abc")]
    assert these({"p": {"b": b""}}) <= outcomes(*history)
    history = [do(Kind.MKDIR, path) for path in "pqr"]
    history += [do(Kind.CREATE, f"{path}/{name}") for name in "ab" for path in "pqr"]
    whole = {"a": b"", "b": b""}
    assert these({"p": whole}, {"q": whole}, {"r": whole}) <= outcomes(*history)


def test_what_a_durable_deletion_took_is_forgotten() -> None:
    history = [do(Kind.MKDIR, "d"), *written("d/f", b"x"), do(Kind.UNLINK, "d/f")]
    model = model_after(*history, do(Kind.RMDIR, "d"))
    assert model.pending and model.unsynced
    model.apply(sync_directory(""))
    assert not model.pending and not model.unsynced


def test_a_file_has_one_content_under_all_its_names() -> None:
    history = [*written("a", b"1"), do(Kind.LINK, "a", "b"), sync_directory("")]
    history += [do(Kind.WRITE, "a", content=b"2"), sync("a")]
    assert outcomes(*history) == these({"a": b"12", "b": b"12"})


def test_a_new_name_of_a_file_may_be_lost_and_so_may_the_loss_of_the_old_one() -> None:
    history = [do(Kind.LINK, "a", "b"), do(Kind.UNLINK, "a")]
    found = outcomes(*history, start={"a": b"x"})
    # The last one: no promise is known that keeps an unlink behind a link.
    assert found == these({"b": b"x"}, {"a": b"x"}, {"a": b"x", "b": b"x"}, {})
    history.insert(1, sync_directory(""))
    assert outcomes(*history, start={"a": b"x"}) == these({"b": b"x"}, {"a": b"x", "b": b"x"})


def test_a_rename_to_another_name_of_the_same_file_does_nothing() -> None:
    model = model_after(do(Kind.LINK, "a", "b"), rename("a", "b"), start={"a": b"x"})
    assert to_values(model.tree()) == {"a": b"x", "b": b"x"}


def test_a_symbolic_link_is_there_whole_or_not() -> None:
    found = outcomes(do(Kind.SYMLINK, "a", "there"))
    assert found == these({}, {"a": "-> there"})


def test_an_empty_directory_may_be_replaced() -> None:
    start = {"a": {"f": b"x"}, "b": {}}
    assert outcomes(rename("a", "b"), start=start) == these(start, {"b": {"f": b"x"}})


@pytest.mark.parametrize(
    "operation",
    [
        do(Kind.MKDIR, "f"),
        do(Kind.MKDIR, "none/d"),
        do(Kind.MKDIR, "f/d"),
        do(Kind.CREATE, "d"),
        do(Kind.CREATE, ""),
        do(Kind.WRITE, "none", content=b"x"),
        do(Kind.SYNC, "d"),
        do(Kind.SYNC_DIRECTORY, "f"),
        do(Kind.UNLINK, "d"),
        do(Kind.UNLINK, "none"),
        do(Kind.RMDIR, "d"),
        do(Kind.RMDIR, "f"),
        do(Kind.LINK, "f", "l"),
        do(Kind.LINK, "d", "new"),
        do(Kind.SYMLINK, "f", "anywhere"),
        do(Kind.RENAME, "none", "new"),
        do(Kind.RENAME, "f", "d"),
        do(Kind.RENAME, "e", "d"),
        do(Kind.RENAME, "d", "f"),
        do(Kind.RENAME, "d", "d/g"),
        do(Kind.PUT, "new", content=b"x"),
    ],
    ids=str,
)
def test_what_no_disk_does_is_no_history(operation: Operation) -> None:
    start = {"f": b"", "l": Link("f"), "d": {"f": b""}, "e": {}}
    with pytest.raises(ValueError, match="the history cannot have gone so"):
        model_after(operation, start=start)
