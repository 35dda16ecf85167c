"""The device of a rank, its speed, and garbage collection at chosen steps."""

import contextlib
import gc
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import utils


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine that shows four CUDA devices; the count can be changed."""
    machine = SimpleNamespace(count=4)
    machine.device_count = lambda: machine.count
    monkeypatch.setattr(utils, "device_type", "cuda")
    monkeypatch.setattr(utils, "device_module", machine)
    return machine


@pytest.fixture
def _automatic_collection() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_everything_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert utils.get_device_info() == ("cpu", torch.cpu)
    assert (utils.device_type, utils.device_module) == ("cpu", torch.cpu)
    assert utils.get_local_device() == torch.device("cpu")
    assert utils.get_device_name()
    assert not utils.has_cuda_capability(1, 0) and not utils.has_rocm_capability(1, 0)
    assert utils.get_cuda_flash_attention_impl() is None


def test_an_apple_gpu_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    assert utils.get_device_info() == ("cpu", torch.cpu)


def test_a_rank_takes_the_device_of_its_local_number(
    four_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert utils.get_local_device() == torch.device("cuda", 3)
    four_gpus.count = 1
    assert utils.get_local_device() == torch.device("cuda", 0)
    four_gpus.count = 2
    with pytest.raises(ValueError, match="3 is outside the visible cuda device count 2"):
        utils.get_local_device()


@pytest.mark.usefixtures("four_gpus")
def test_a_rank_without_a_local_number_is_told_to_use_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="LOCAL_RANK is not set.*torchrun"):
        utils.get_local_device()


@pytest.mark.parametrize(
    ("hip", "capability", "cuda9", "rocm9", "flash"),
    [
        (None, (8, 0), False, False, None),
        (None, (9, 0), True, False, "FA3"),
        (None, (10, 0), True, False, "FA4"),
        ("6.2", (9, 4), False, True, None),
    ],
)
def test_capabilities_belong_to_the_maker_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    capability: tuple[int, int],
    cuda9: bool,
    rocm9: bool,
    flash: str | None,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert utils.has_cuda_capability(9, 0) is cuda9
    assert utils.has_rocm_capability(9, 0) is rocm9
    assert utils.get_cuda_flash_attention_impl() == flash


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GH200 480GB", 990e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("x86_64", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_or_none(name: str, flops: float | None):
    assert utils.get_peak_flops(name) == flops


def test_resident_memory_grows_with_what_is_held():
    size_bytes = 64 * 1024 * 1024
    # Fresh pages from the kernel: an allocator may hand out what this process already holds.
    with mmap.mmap(-1, size_bytes) as pages:
        before = utils.resident_memory_bytes()
        pages.write(b"\1" * size_bytes)
        assert utils.resident_memory_bytes() - before > size_bytes // 2


@pytest.mark.usefixtures("_automatic_collection")
def test_garbage_is_collected_at_multiples_of_the_frequency_only():
    collector = utils.GarbageCollection(gc_freq=3)
    assert not gc.isenabled()
    assert [step for step in range(10) if collector.run(step)] == [3, 6, 9]
    assert [step for step in range(3) if utils.GarbageCollection(gc_freq=1).run(step)] == [2]
    with pytest.raises(ValueError, match="must be greater than 0"):
        utils.GarbageCollection(gc_freq=0)


@pytest.mark.usefixtures("_automatic_collection")
def test_a_collection_finds_cycles_and_debug_says_how_many(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    collector = utils.GarbageCollection(gc_freq=2, debug=True)
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert collector.run(2)
    (line,) = [text for text in caplog.messages if "only cycles kept alive" in text]
    assert int(line.rsplit(" ", 1)[1]) >= 1


@pytest.mark.usefixtures("_automatic_collection", "fresh_structured_logger")
def test_a_collection_is_a_span_and_tags_its_step(tmp_path: Path):
    sl.init_structured_logger("training", str(tmp_path))
    sl.set_step(2)
    utils.GarbageCollection(gc_freq=2).run(2)
    assert sl.get_step_tags() == ("gc",)
    (file,) = (tmp_path / "structured_logs").iterdir()
    names = [json.loads(line)["log_type_name"] for line in file.read_text().splitlines()]
    assert names == ["gc_collect_start", "gc_collect_end"]


def test_the_default_dtype_holds_inside_the_block_only():
    with contextlib.suppress(RuntimeError), utils.set_default_dtype(torch.bfloat16):
        assert torch.ones(1).dtype == torch.bfloat16
        raise RuntimeError
    assert torch.ones(1).dtype == torch.float32


def test_round_up_gives_the_next_multiple():
    assert [utils.round_up(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16]


def test_an_old_torch_is_warned_about(caplog: pytest.LogCaptureFixture):
    utils.check_if_feature_in_pytorch("sorting", "pull 1", min_nightly_version="1.0.dev20200101")
    utils.check_if_feature_in_pytorch("sorting", "pull 1")
    assert not caplog.records
    utils.check_if_feature_in_pytorch("sorting", "pull 1", min_nightly_version="99.0.dev20300101")
    assert "sorting needs torch 99.0.dev20300101" in caplog.text


def test_no_color_has_the_fields_of_color():
    assert vars(utils.Color()).keys() == vars(utils.NoColor()).keys()
    assert set(vars(utils.NoColor()).values()) == {""}
