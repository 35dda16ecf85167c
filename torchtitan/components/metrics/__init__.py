"""What a run tells about itself: a line on the console, structured scalars, TensorBoard, W&B.

processor (counts -> rates) -> console (the line)
                            -> structured log (always, unless --debug.no-enable-structured-logging)
                            -> loggers (TensorBoard), wandb_logger (W&B), as asked
continuation (which curves a start goes on with) -> loggers, wandb_logger
"""

from torchtitan.components.metrics.console import format_duration
from torchtitan.components.metrics.loggers import BaseLogger, LoggerContainer, TensorBoardLogger
from torchtitan.components.metrics.processor import ensure_pp_loss_visible, MetricsProcessor
from torchtitan.components.metrics.wandb_logger import WandBLogger
from torchtitan.tools.device_memory import (
    build_device_memory_monitor,
    DeviceMemoryMonitor,
    ResidentMemoryMonitor,
)

__all__ = [
    "BaseLogger",
    "DeviceMemoryMonitor",
    "LoggerContainer",
    "MetricsProcessor",
    "ResidentMemoryMonitor",
    "TensorBoardLogger",
    "WandBLogger",
    "build_device_memory_monitor",
    "ensure_pp_loss_visible",
    "format_duration",
]
