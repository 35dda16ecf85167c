"""What is said of an accelerator's memory, on a stand-in for the module of its device."""

from types import SimpleNamespace

import pytest
import torch
from torchtitan.tools import device_memory
from torchtitan.tools.device_memory import DeviceMemoryMonitor, ResidentMemoryMonitor

GIB = 1024**3
DEVICE = torch.device("meta")


class Accelerator:
    """80 GiB of memory; counts how often its peaks are forgotten."""

    def __init__(self) -> None:
        self.stats: dict[str, int] = {}
        self.num_resets = 0

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        assert device == DEVICE
        return SimpleNamespace(total_memory=80 * GIB)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == DEVICE
        return self.stats

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        assert device == DEVICE
        self.num_resets += 1


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    stand_in = Accelerator()
    monkeypatch.setattr(device_memory, "device_module", stand_in)
    return stand_in


def test_peaks_are_told_in_gib_and_as_shares_of_the_device(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "resident_memory_bytes", lambda: 3 * GIB)
    monitor = DeviceMemoryMonitor(DEVICE)
    accelerator.stats = {
        "active_bytes.all.peak": 20 * GIB,
        "reserved_bytes.all.peak": 60 * GIB,
        # What is in use now, rather than at the peak, is not asked for.
        "active_bytes.all.current": GIB,
        "reserved_bytes.all.current": GIB,
        "num_ooms": 1,
    }
    found = monitor.get_peak_stats()
    assert found.metrics == {
        "memory/max_active(GiB)": 20,
        "memory/max_active(%)": 25,
        "memory/max_reserved(GiB)": 60,
        "memory/max_reserved(%)": 75,
        "memory/num_alloc_retries": 0,
        "memory/num_ooms": 1,
        "memory/resident(GiB)": 3,
    }
    assert found.summary == "60.00GiB(75.0%)"


def test_before_the_first_allocation_all_is_zero(accelerator: Accelerator) -> None:
    found = DeviceMemoryMonitor(DEVICE).get_peak_stats()
    resident = found.metrics.pop("memory/resident(GiB)")
    assert resident > 0 and set(found.metrics.values()) == {0}


def test_peaks_are_forgotten_at_the_beginning_and_when_asked(accelerator: Accelerator) -> None:
    monitor = DeviceMemoryMonitor(DEVICE)
    assert accelerator.num_resets == 1
    monitor.get_peak_stats()
    assert accelerator.num_resets == 1
    monitor.reset_peak_stats()
    assert accelerator.num_resets == 2


def test_allocations_that_had_to_be_repeated_are_warned_of_once_each(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = DeviceMemoryMonitor(DEVICE)
    # The counter of the allocator only grows; a reading without news says nothing.
    for num_retries in (0, 2, 2, 2, 5, 5):
        accelerator.stats = {"num_alloc_retries": num_retries}
        assert monitor.get_peak_stats().metrics["memory/num_alloc_retries"] == num_retries
    said = [record.getMessage() for record in caplog.records]
    assert [message.split()[0] for message in said] == ["2", "5"]
    assert all("only after the cache was emptied" in message for message in said)


def test_the_monitor_is_that_of_the_device(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_memory, "get_local_device", lambda: DEVICE)
    monkeypatch.setattr(device_memory, "get_device_name", lambda: "NVIDIA Fast")
    caplog.set_level("INFO")
    monkeypatch.setattr(device_memory, "device_type", "cpu")
    assert isinstance(device_memory.build_device_memory_monitor(), ResidentMemoryMonitor)
    monkeypatch.setattr(device_memory, "device_type", "cuda")
    assert isinstance(device_memory.build_device_memory_monitor(), DeviceMemoryMonitor)
    assert "NVIDIA Fast: 80.00GiB of memory" in caplog.text
    # Some accelerators of torch keep no statistics.
    monkeypatch.setattr(device_memory, "device_module", SimpleNamespace())
    assert isinstance(device_memory.build_device_memory_monitor(), ResidentMemoryMonitor)
