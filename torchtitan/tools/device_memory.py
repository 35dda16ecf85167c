"""Decide what "memory" means in the metrics: the accelerator's where there is one, else the process's.

build_device_memory_monitor -> DeviceMemoryMonitor    (peaks since the last log line)
                            -> ResidentMemoryMonitor  (now: a CPU keeps no peak that can be reset)
"""

import os
from dataclasses import dataclass

import torch

from torchtitan.tools.logging import logger
from torchtitan.tools.utils import (
    device_module,
    device_type,
    get_device_name,
    get_local_device,
    resident_memory_bytes,
)

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStats:
    """One reading of the memory in use."""

    metrics: dict[str, float]
    """By tag, ``memory/...``."""

    summary: str
    """For a console line, such as ``1.50GiB(3.1%)``."""


class DeviceMemoryMonitor:
    """The peaks of torch's allocator on one accelerator since the last reset."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capacity_bytes = device_module.get_device_properties(device).total_memory
        self._warned_retries = 0
        self.reset_peak_stats()

    def get_peak_stats(self) -> MemoryStats:
        stats = device_module.memory_stats(self.device)
        active = stats.get("active_bytes.all.peak", 0)
        reserved = stats.get("reserved_bytes.all.peak", 0)
        retries = stats.get("num_alloc_retries", 0)
        if retries > self._warned_retries:
            self._warned_retries = retries
            logger.warning(
                f"{retries} allocations on {self.device} succeeded only after the cache was emptied, which "
                "stalls training: the memory is nearly full. Use smaller microbatches or more ranks."
            )
        return MemoryStats(
            metrics={
                "memory/max_active(GiB)": active / _GIB,
                "memory/max_active(%)": self._percent(active),
                "memory/max_reserved(GiB)": reserved / _GIB,
                "memory/max_reserved(%)": self._percent(reserved),
                "memory/num_alloc_retries": retries,
                "memory/num_ooms": stats.get("num_ooms", 0),
                # A save in the background holds a copy of the state in RAM.
                "memory/resident(GiB)": resident_memory_bytes() / _GIB,
            },
            summary=f"{reserved / _GIB:.2f}GiB({self._percent(reserved):.1f}%)",
        )

    def reset_peak_stats(self) -> None:
        device_module.reset_peak_memory_stats(self.device)

    def _percent(self, size_bytes: int) -> float:
        return 100 * size_bytes / self.capacity_bytes


class ResidentMemoryMonitor:
    """The memory of this process that is in RAM, for runs on a CPU."""

    def __init__(self) -> None:
        self.capacity_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def get_peak_stats(self) -> MemoryStats:
        resident = resident_memory_bytes()
        percent = 100 * resident / self.capacity_bytes
        return MemoryStats(
            metrics={"memory/resident(GiB)": resident / _GIB, "memory/resident(%)": percent},
            summary=f"{resident / _GIB:.2f}GiB({percent:.1f}%)",
        )

    def reset_peak_stats(self) -> None:
        """Nothing here: a reading is of the moment."""


def build_device_memory_monitor() -> DeviceMemoryMonitor | ResidentMemoryMonitor:
    """The monitor for the device of this rank."""
    if device_type == "cpu" or not hasattr(device_module, "memory_stats"):
        return ResidentMemoryMonitor()
    monitor = DeviceMemoryMonitor(get_local_device())
    logger.info(f"{get_device_name()}: {monitor.capacity_bytes / _GIB:.2f}GiB of memory")
    return monitor
