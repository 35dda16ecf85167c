"""Whether there is memory enough is asked of the machine and of every group that may have a limit."""

from pathlib import Path

import pytest
from torchtitan.components.checkpointer.pinned import memory

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control groups lie, none of which has a limit yet."""
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS_OF_SELF", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_a_shortage_names_both_numbers_and_counts_the_ranks_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GIB)
    assert memory.shortage(2 * GIB) is None
    shortage = memory.shortage(3 * GIB)
    assert shortage is not None and "3.00 GiB on each of the 4 ranks" in shortage
    assert "only 8.00 GiB of memory are free" in shortage
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert memory.shortage(3 * GIB) is None


def test_without_limits_it_is_what_the_machine_has(groups: Path) -> None:
    machine = memory.available_bytes()
    assert machine is not None and machine > 2**28
    write(groups, own="0::/job/step\n")
    write(groups / "job", memory__max="max\n", memory__current="7\n")
    assert memory.available_bytes() not in (None, 7)


@pytest.mark.parametrize("limited", ["", "job", "job/step"])
def test_a_limit_counts_on_the_own_group_and_on_every_one_above(groups: Path, limited: str) -> None:
    write(groups, own="0::/job/step\n")
    write(
        groups / limited,
        memory__max="1000000\n",
        memory__current="700000\n",
        memory__stat="anon 5\ninactive_file 200000\n",
    )
    assert memory.available_bytes() == 500000


def test_groups_of_the_first_version_have_other_names(groups: Path) -> None:
    write(groups, own="9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n")
    write(
        groups / "memory/job",
        memory__limit_in_bytes="1000000\n",
        memory__usage_in_bytes="900000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 300000\n",
    )
    assert memory.available_bytes() == 400000
