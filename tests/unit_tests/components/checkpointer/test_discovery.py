import pytest
from hypothesis import given, strategies as st
from torchtitan.components.checkpointer import CheckpointManager, CheckpointStorage
from torchtitan.components.checkpointer.dcp import _FilesystemCheckpointStorage
from torchtitan.components.checkpointer.dcp_index import parse_entry
from torchtitan.components.checkpointer.discovery import (
    find_steps,
    Finder,
    Kind,
    OwnFolder,
    parse_step,
    step_name,
)
from torchtitan.components.checkpointer.formats import DCP, finder, Format, TORCH_CHECKPOINTING
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.integrity.manifest import (
    head_of,
    Manifest,
    ManifestKind,
    render,
)
from torchtitan.tools import filesystem

from tests.unit_tests.components.checkpointer.fakes import folder_of, MemoryStorage
from tests.unit_tests.components.checkpointer.mixed_folders import finder_of, put

FOREIGN_NAMES = [
    "step-07",
    "step-00",
    "tmp_step-7",
    "step-7.bak",
    "step-9.partial",
    "step-7 ",
    " step-7",
    "step-7\n",
    "step--7",
    "step-+7",
    "step-7.0",
    "step-1e3",
    "step-",
    "step",
    "Step-7",
    "step_7",
    "step-\u0667",
    "superseded",
    ".step-7",
    "",
]


@given(st.integers(0, 10**18))
def test_a_step_and_its_name_stand_for_each_other(step: int) -> None:
    assert parse_step(step_name(step)) == step


@given(st.text() | st.from_regex(r"(tmp_)?[sS]tep-[0-9+ .a]*", fullmatch=True))
def test_a_name_that_parses_is_exactly_the_one_we_write(name: str) -> None:
    step = parse_step(name)
    assert step is None or step_name(step) == name


def test_names_that_only_look_like_ours_are_nobody_s_checkpoints() -> None:
    assert [name for name in FOREIGN_NAMES if parse_step(name) is not None] == []
    assert parse_entry("step-9.partial") is None
    assert parse_entry("step-9") == (9, False)


def finder_in(storage: MemoryStorage) -> Finder:
    return finder(DCP, storage, frozenset())


def test_found_steps_are_in_the_order_of_their_numbers_and_directories() -> None:
    storage = folder_of("step-9", "step-10", "step-100", *filter(None, FOREIGN_NAMES))
    storage.add("/run/step-11", b"a file")
    found = find_steps(storage, "/run", parse=parse_entry)
    assert found == [(n, f"/run/step-{n}", False) for n in (9, 10, 100)]


def test_only_a_directory_with_its_marker_is_complete() -> None:
    storage = MemoryStorage("/run/step-1", "/run/step-2", "/run/step-3", "/run/step-4/.metadata")
    storage.add("/run/step-2/.metadata", b"index")
    storage.add("/run/step-3/model.safetensors.index.json", b"{}")
    storage.add("/run/step-1/.metadata.tmp", b"index")
    found = finder_in(storage).complete_steps("/run")
    # step-4 has a directory where the marker should be a file.
    assert sorted(found) == [2, 3]


@pytest.mark.parametrize("chosen", [DCP, TORCH_CHECKPOINTING], ids=lambda it: it.backend)
def test_what_has_lost_its_marker_beside_its_manifest_is_damaged_and_not_unfinished(
    chosen: Format,
) -> None:
    storage = MemoryStorage()
    head = head_of(2, "full", chosen.backend, 1, None)
    manifest = Manifest(head=head, files={chosen.marker: digest_of(b"gone")})
    storage.add("/run/step-2/manifest.json", render(manifest))
    storage.add("/run/step-3/manifest.json", b"and this one is damaged itself")
    found = finder_in(storage).look_into("/run")
    assert sorted(found.step_paths) == [2, 3] and not found.unfinished
    assert found.others == ({} if chosen is DCP else {2: chosen.backend})
    kinds = {step: found.kind_of(path) for step, path in found.step_paths.items()}
    assert kinds == {2: Kind.FULL, 3: Kind.UNREADABLE}, "what was full is found damaged by the load"


@pytest.mark.parametrize("chosen", [DCP, TORCH_CHECKPOINTING], ids=lambda it: it.backend)
@pytest.mark.parametrize(
    "step, kind, now",
    [
        (2, "full", Kind.FULL),
        (2, "model_only", Kind.MODEL_ONLY),
        (2, "hf", Kind.MODEL_ONLY),
        (1, "model_only", Kind.FULL),
    ],
)
def test_what_was_saved_as_full_is_not_taken_for_weights_whatever_lies_there_now(
    chosen: Format, step: int, kind: ManifestKind, now: Kind
) -> None:
    storage = MemoryStorage()
    put(storage, chosen, "/run", 2, "weights")
    found = finder_of(chosen, storage)
    assert found.kind_of("/run/step-2") is Kind.MODEL_ONLY
    manifest = Manifest(head=head_of(step, kind, chosen.backend, 1, None), files={})
    storage.add("/run/step-2/manifest.json", render(manifest))
    # A manifest of another step is none of this one: whatever it says, the load has to find that.
    assert found.kind_of("/run/step-2") is now
    storage.add("/run/step-2/manifest.json", b"damaged")
    assert found.kind_of("/run/step-2") is Kind.MODEL_ONLY


def test_a_missing_folder_holds_nothing() -> None:
    assert finder_in(MemoryStorage()).complete_steps("/x") == {}


def test_the_newest_full_step_passes_over_exports_seeds_and_damage() -> None:
    kinds = {
        0: Kind.FULL,
        10: Kind.FULL,
        20: Kind.FULL,
        30: Kind.MODEL_ONLY,
        40: Kind.UNREADABLE,
        50: Kind.UNREADABLE,
    }
    asked = []

    def kind_of(path: str) -> Kind:
        asked.append(path)
        return kinds[int(path)]

    own = OwnFolder(path="/run", step_paths={n: str(n) for n in kinds}, kind_of=kind_of)
    passed_over = {50: Kind.UNREADABLE, 40: Kind.UNREADABLE, 30: Kind.MODEL_ONLY}
    assert own.newest_full() == (20, passed_over)
    assert asked == ["50", "40", "30", "20"]


def test_the_newest_step_is_found_on_a_uri_by_a_manager_that_has_only_a_storage() -> None:
    manager = CheckpointManager.__new__(CheckpointManager)
    manager._storage = _FilesystemCheckpointStorage()
    folder = "memory://discovery-test/run"
    assert manager._find_load_step(folder=folder) == -1
    for name in ("step-3/.metadata", "step-12/model.safetensors.index.json", "step-40/junk"):
        fs, inner = filesystem._resolve(f"{folder}/{name}")
        fs.makedirs(inner.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(inner, b"x")
    assert manager._find_load_step(folder=folder) == 12


def test_the_storages_answer_the_protocol() -> None:
    assert isinstance(_FilesystemCheckpointStorage(), CheckpointStorage)
    assert isinstance(MemoryStorage(), CheckpointStorage)
