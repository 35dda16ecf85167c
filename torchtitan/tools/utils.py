"""What this process runs on, and when Python may collect garbage.

``device_type`` and ``device_module`` are settled at import: the accelerator that torch sees and can
communicate on, otherwise the CPU. ``device_module`` is ``torch.cuda``, ``torch.xpu`` or ``torch.cpu``;
``torch.cpu`` lacks the memory and naming functions, so ask with ``hasattr`` before using those.
"""

import gc
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger


def get_device_info() -> tuple[str, ModuleType]:
    """The device type this process computes on and torch's module for it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # An Apple GPU has no collective of its own and FSDP does not run on it: train on the CPU there.
    if accelerator is None or accelerator.type == "mps":
        return "cpu", torch.cpu
    return accelerator.type, torch.get_device_module(accelerator)


device_type, device_module = get_device_info()


def get_local_device() -> torch.device:
    """The device of this rank: the CPU, or the accelerator number ``LOCAL_RANK``.

    A launcher that shows each rank only its own accelerator is recognised by the single visible one.
    Raises ``ValueError`` when ``LOCAL_RANK`` is missing or has no accelerator.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"cannot choose a {device_type} device: the environment variable LOCAL_RANK is not set. "
            "Start the program with torchrun, or set LOCAL_RANK=0 for a single process."
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    visible = device_module.device_count()
    if visible == 1:
        return torch.device(device_type, 0)
    if not 0 <= local_rank < visible:
        raise ValueError(
            f"LOCAL_RANK {local_rank} is outside the visible {device_type} device count {visible}. "
            "Start at most as many ranks on this machine as it has devices, or make more of them visible."
        )
    return torch.device(device_type, local_rank)


def get_device_name() -> str:
    """The product name of the device of this rank."""
    if hasattr(device_module, "get_device_name"):
        return device_module.get_device_name(get_local_device())
    return platform.processor() or platform.machine()


def _gpu_capability(*, on_rocm: bool) -> tuple[int, int]:
    """The capability of the GPU, or (0, 0), below all others, where there is none of that maker."""
    is_rocm = torch.version.hip is not None
    if is_rocm != on_rocm or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()


def has_cuda_capability(major: int, minor: int) -> bool:
    """Whether there is an NVIDIA GPU of at least this compute capability."""
    return _gpu_capability(on_rocm=False) >= (major, minor)


def has_rocm_capability(major: int, minor: int) -> bool:
    """Whether there is an AMD GPU of at least this architecture (9.4 is an MI300)."""
    return _gpu_capability(on_rocm=True) >= (major, minor)


def get_cuda_flash_attention_impl() -> str | None:
    """The name for ``torch.nn.attention.activate_flash_attention_impl`` that suits this GPU.

    None where the implementation built into torch is the one to use.
    """
    if has_cuda_capability(10, 0):
        return "FA4"
    if has_cuda_capability(9, 0):
        return "FA3"
    return None


# Dense bfloat16 throughput in FLOP/s. Vendors often print the figure with 2:4 sparsity: it is halved here.
# The first pattern that is found wins, so the special form of a product comes before the product.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA A100 Tensor Core GPU datasheet: 312 TFLOPS, PCIe and SXM alike.
    (r"A100", 312e12),
    # NVIDIA H100 datasheet, H100 NVL: 1,671 TFLOPS with sparsity.
    (r"H100 NVL", 835.5e12),
    # NVIDIA H100 PCIe datasheet: 1,513 TFLOPS with sparsity.
    (r"H100 PCIe", 756.5e12),
    # NVIDIA H100 datasheet, H100 SXM: 1,979 TFLOPS with sparsity. It calls itself "H100 80GB HBM3".
    (r"H100", 989.5e12),
    # NVIDIA H200 datasheet, H200 NVL: 1,671 TFLOPS with sparsity.
    (r"H200 NVL", 835.5e12),
    # NVIDIA H200 datasheet, H200 SXM: 1,979 TFLOPS with sparsity.
    (r"H200", 989.5e12),
    # NVIDIA GH200 datasheet: 990 TFLOPS dense.
    (r"GH200", 990e12),
    # NVIDIA GB200 NVL72 datasheet: 360 PFLOPS with sparsity for 72 GPUs.
    (r"GB200", 2.5e15),
    # NVIDIA HGX platform datasheet, HGX B200: 36 PFLOPS with sparsity for 8 GPUs.
    (r"B200", 2.25e15),
    # NVIDIA L40S datasheet: 362.05 TFLOPS dense.
    (r"L40S", 362e12),
    # NVIDIA L4 datasheet: 242 TFLOPS with sparsity.
    (r"L4", 121e12),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS dense.
    (r"MI300X", 1307.4e12),
    # AMD Instinct MI325X data sheet: 1,307.4 TFLOPS dense.
    (r"MI325X", 1307.4e12),
    # AMD Instinct MI250X data sheet: 383 TFLOPS for the two dies of a card; each is a device of its own.
    (r"MI250X", 191.5e12),
)


def get_peak_flops(name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the GPU that calls itself ``name``; None when it is not known."""
    # A MIG instance bears the name of the whole GPU but is only a slice of it.
    if re.search(r"\bMIG\b", name):
        return None
    for pattern, flops in _PEAK_FLOPS:
        if re.search(rf"\b{pattern}\b", name, re.IGNORECASE):
            return flops
    return None


def resident_memory_bytes() -> int:
    """The memory of this process that is in RAM now (where /proc is missing: its highest value so far)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # macOS counts bytes, every other Unix kibibytes.
        return peak if sys.platform == "darwin" else peak * 1024


class GarbageCollection:
    """Collects garbage at chosen steps, because ranks that pause at different moments wait for each other.

    Building one turns off Python's automatic collection for the whole process. ``debug`` makes every
    collection a full one and logs how many objects were kept alive by cycles alone.
    """

    def __init__(self, gc_freq: int = 1000, debug: bool = False) -> None:
        if gc_freq <= 0:
            raise ValueError(
                f"garbage collection every {gc_freq} steps was asked for; it must be greater than 0. "
                "Set --training.gc_freq to a positive number of steps."
            )
        self.gc_freq = gc_freq
        self.debug = debug
        gc.disable()
        self.collect("at the start")

    def run(self, step: int) -> bool:
        """Collect if it is due at ``step``; says whether it did."""
        # The first step is slow already, and the start has just collected.
        if step <= 1 or step % self.gc_freq != 0:
            return False
        with sl.log_trace_span("gc_collect"):
            sl.add_step_tag("gc")
            if self.debug:
                found = self.collect(f"at step {step}, all generations", generation=2)
                logger.info(f"Objects that only cycles kept alive: {found}")
            else:
                self.collect(f"at step {step}")
        return True

    @staticmethod
    @contextmanager
    def paused() -> Generator[None]:
        """No automatic collection in the block, which makes much that stays and little garbage."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    @staticmethod
    def collect(reason: str, generation: int = 1) -> int:
        """Collect up to ``generation`` (2 is everything); returns the number of objects found."""
        started = time.monotonic()
        found = gc.collect(generation)
        logger.debug(f"Garbage collection {reason}: {time.monotonic() - started:.2f} s")
        return found


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Create floating-point tensors as ``dtype`` inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def check_if_feature_in_pytorch(
    feature_name: str, pull_request: str, min_nightly_version: str | None = None
) -> None:
    """Warn when the installed torch is older than ``min_nightly_version``, which brought the feature."""
    if min_nightly_version is not None and torch.__version__ < torch.torch_version.TorchVersion(
        min_nightly_version
    ):
        logger.warning(
            f"{feature_name} needs torch {min_nightly_version} or newer ({pull_request}); "
            f"torch {torch.__version__} is installed. Install a newer one to use it."
        )


@dataclass(frozen=True)
class Color:
    """Terminal escapes for log lines."""

    black: str = "\033[30m"
    red: str = "\033[31m"
    green: str = "\033[32m"
    yellow: str = "\033[33m"
    blue: str = "\033[34m"
    magenta: str = "\033[35m"
    cyan: str = "\033[36m"
    white: str = "\033[37m"
    orange: str = "\033[38;2;180;60;0m"
    turquoise: str = "\033[38;2;54;234;195m"
    reset: str = "\033[39m"


@dataclass(frozen=True)
class NoColor:
    """The fields of ``Color``, all empty, for output that is no terminal."""

    black: str = ""
    red: str = ""
    green: str = ""
    yellow: str = ""
    blue: str = ""
    magenta: str = ""
    cyan: str = ""
    white: str = ""
    orange: str = ""
    turquoise: str = ""
    reset: str = ""
