"""Decide what a run tells about itself: a line on the console, and numbers in TensorBoard.

The trainer counts (tokens, loading times, checkpoint seconds); this module turns the counts since the
last line into rates, once every ``log_freq`` steps. The one fact to know: nothing is made up. Without
a known peak there is no MFU, without measured steps no time left.

    trainer counts -> MetricsProcessor.log -> console line (logging rank)
                                           -> LoggerContainer -> TensorBoardLogger
"""

import importlib.util
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchtitan.config import Configurable
from torchtitan.config.violations import reject
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.device_memory import (
    build_device_memory_monitor,
    DeviceMemoryMonitor,
    ResidentMemoryMonitor,
)
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, get_device_name, get_peak_flops, NoColor

__all__ = [
    "BaseLogger",
    "DeviceMemoryMonitor",
    "LoggerContainer",
    "MetricsProcessor",
    "ResidentMemoryMonitor",
    "TensorBoardLogger",
    "build_device_memory_monitor",
    "ensure_pp_loss_visible",
]

# Log points that the time left is estimated from: enough to even out a checkpoint in between, few
# enough to follow a run that became slower.
_PACE_POINTS = 6


class BaseLogger:
    """A place that numbers go to; this one drops them."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write ``metrics`` under ``step``."""

    def close(self) -> None:
        """Write what is still held back."""


class TensorBoardLogger(BaseLogger):
    """Scalars as TensorBoard event files in ``log_dir``, their names under ``tag`` if there is one."""

    def __init__(
        self, log_dir: str, tag: str | None = None, config_dict: dict[str, Any] | None = None
    ) -> None:
        try:
            # Late: it costs a second to import, and only runs that use it need the package.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "metrics.enable_tensorboard was asked for, but the package tensorboard cannot be "
                f"imported ({error}). Install tensorboard, or set --metrics.no-enable-tensorboard."
            ) from error
        self._tag = tag
        self._writer = SummaryWriter(log_dir)
        if config_dict is not None:
            self._writer.add_text("config", f"```\n{json.dumps(config_dict, indent=2)}\n```")
        logger.info(f"TensorBoard: writing to {log_dir}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(
                name if self._tag is None else f"{self._tag}/{name}", value, step
            )
        # A thread writes, on some file systems only when told to: a killed run must not lose this.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class LoggerContainer(BaseLogger):
    """Any number of loggers as one."""

    def __init__(self) -> None:
        self.loggers: list[BaseLogger] = []

    def add_logger(self, metric_logger: BaseLogger) -> None:
        self.loggers.append(metric_logger)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for metric_logger in self.loggers:
            metric_logger.log(metrics, step)

    def close(self) -> None:
        for metric_logger in self.loggers:
            metric_logger.close()


def ensure_pp_loss_visible(
    *, parallel_dims: ParallelDims, pp_schedule: str, color: Color | NoColor
) -> None:
    """Warn when the launcher hides the output of the rank that knows the loss."""
    rank = _logging_rank(parallel_dims, pp_schedule)
    # torchrun's filter, as run_train.sh passes it on; unset shows every rank.
    shown = [item.strip() for item in os.environ.get("LOG_RANK", "").split(",") if item.strip()]
    if parallel_dims.pp_enabled and shown and str(rank) not in shown:
        logger.warning(
            f"{color.red}only rank {rank} knows the loss with the pipeline schedule {pp_schedule}, but the "
            f"output of ranks {', '.join(shown)} is shown. Add {rank} to LOG_RANK to see it.{color.reset}"
        )


class MetricsProcessor(Configurable):
    """Counts of a run since the last log line, and what is said about them.

    The trainer adds to ``ntokens_since_last_log``, ``data_loading_times`` (seconds, one per batch) and the
    two ``*_seconds_since_last_log``; it sets ``num_flops_per_token``, ``total_steps`` and, right before its
    loop, ``start_step``, from which moment time counts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        log_freq: int = 10
        """Steps between two log lines; the first step is always logged."""

        enable_tensorboard: bool = False
        """Write the metrics for TensorBoard too."""

        disable_color_printing: bool = False
        """Never colour the console; without a terminal there is no colour anyway."""

        save_tb_folder: str = "tb"
        """Folder for TensorBoard files, inside of the dump folder."""

        save_for_all_ranks: bool = False
        """Let every rank write its own TensorBoard files, instead of the one that logs the loss."""

        enable_wandb: bool = False
        """Send the metrics to Weights & Biases."""

        def __post_init__(self) -> None:
            if self.log_freq <= 0:
                reject(
                    f"metrics.log_freq must be greater than 0, but is {self.log_freq}. To log seldom, set "
                    "it to a large number of steps."
                )

        def check(self) -> list[str]:
            """What keeps the metrics from being written as asked, one message each."""
            found = []
            if self.enable_tensorboard and importlib.util.find_spec("tensorboard") is None:
                found.append(
                    "metrics.enable_tensorboard was asked for, but the package tensorboard is not "
                    "installed. Install it, or set --metrics.no-enable-tensorboard."
                )
            if self.save_for_all_ranks and not self.enable_tensorboard:
                found.append(
                    "metrics.save_for_all_ranks has no effect without TensorBoard files; add "
                    "--metrics.enable-tensorboard or leave it out."
                )
            return found

    def __init__(
        self,
        config: Config,
        *,
        parallel_dims: ParallelDims,
        dump_folder: str = "./outputs",
        pp_schedule: str = "1F1B",
        ft_enable: bool = False,
        ft_replica_id: int = 0,
        config_dict: dict[str, Any] | None = None,
        tag: str | None = None,
        has_quantization: bool = False,
    ) -> None:
        self.config = config
        self.parallel_dims = parallel_dims
        plain = config.disable_color_printing or not sys.stdout.isatty()
        self.color: Color | NoColor = NoColor() if plain else Color()
        self.device_memory_monitor = build_device_memory_monitor()
        # The peak is that of bfloat16: a share of it says nothing about quantized arithmetic.
        self.peak_flops = None if has_quantization else get_peak_flops(get_device_name())

        rank = dist.get_rank() if dist.is_initialized() else 0
        self._is_logging_rank = rank == _logging_rank(parallel_dims, pp_schedule)
        self.logger = LoggerContainer()
        if config.enable_tensorboard and (config.save_for_all_ranks or self._is_logging_rank):
            folder = [dump_folder, config.save_tb_folder, datetime.now().strftime("%Y%m%d-%H%M")]
            folder += [f"replica_{ft_replica_id}"] if ft_enable else []
            folder += [f"rank_{rank}"] if config.save_for_all_ranks else []
            self.logger.add_logger(TensorBoardLogger(os.path.join(*folder), tag, config_dict))
        ensure_pp_loss_visible(
            parallel_dims=parallel_dims, pp_schedule=pp_schedule, color=self.color
        )

        self.num_flops_per_token = 0
        self.optimizers: Optimizer | None = None
        self.model_parts: Sequence[nn.Module] | None = None
        self.total_steps: int | None = None
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.checkpoint_seconds_since_last_log = 0.0
        self.validation_seconds_since_last_log = 0.0
        self.start_step = 0

    @property
    def start_step(self) -> int:
        """The step this process continues from, 0 for a new run; setting it starts the clock."""
        return self._start_step

    @start_step.setter
    def start_step(self, step: int) -> None:
        self._start_step = self._last_step = step
        self._last_log_seconds = time.perf_counter()
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_POINTS)

    def should_log(self, step: int) -> bool:
        """True for the first step, every ``log_freq``-th one, and the last one of the run."""
        return step in (1, self.total_steps) or step % self.config.log_freq == 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Say how training went since the last call, and start counting anew."""
        now = time.perf_counter()
        seconds = max(now - self._last_log_seconds, 1e-9)
        # Validation has a line of its own; checkpoints are part of what training costs.
        training_seconds = max(seconds - self.validation_seconds_since_last_log, 1e-9)
        tps = self.ntokens_since_last_log / (
            training_seconds * self.parallel_dims.non_data_parallel_size
        )
        memory = self.device_memory_monitor.get_peak_stats()
        metrics: dict[str, Any] = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tps,
            **self._flops_metrics(tps),
            **self._time_metrics(seconds, max(step - self._last_step, 1)),
            **memory.metrics,
            **(extra_metrics or {}),
        }
        self.logger.log(metrics, step)
        self._pace.append((step, now))
        self._print_line(step, metrics, memory.summary)

        self._last_step, self._last_log_seconds = step, now
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.checkpoint_seconds_since_last_log = 0.0
        self.validation_seconds_since_last_log = 0.0
        self.device_memory_monitor.reset_peak_stats()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Say how a validation went; the counts of the training stay as they are."""
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {"validation_metrics/loss": loss, **(extra_metrics or {})}
        self.logger.log(metrics, step)
        if not self._is_logging_rank:
            return
        color = self.color
        parts = [
            f"{color.yellow}validation step: {self._step_text(step)}",
            f"{color.green}loss: {loss:.5f}",
            f"{color.turquoise}memory: {memory.summary}",
        ]
        if "validation_metrics/throughput(tps)" in metrics:
            parts.append(
                f"{color.blue}tps: {round(metrics['validation_metrics/throughput(tps)']):,}"
            )
        logger.info("  ".join(parts) + color.reset)

    def close(self) -> None:
        """Write out everything; nothing may be logged afterwards."""
        self.logger.close()

    def _flops_metrics(self, tps: float) -> dict[str, float]:
        if self.num_flops_per_token <= 0:
            return {}
        flops = self.num_flops_per_token * tps
        metrics = {"tflops": flops / 1e12}
        if self.peak_flops is not None:
            metrics["mfu(%)"] = 100 * flops / self.peak_flops
        return metrics

    def _time_metrics(self, seconds: float, num_steps: int) -> dict[str, float]:
        loading = self.data_loading_times
        metrics = {
            "time_metrics/end_to_end(s)": seconds / num_steps,
            "time_metrics/data_loading(s)": sum(loading) / len(loading) if loading else 0.0,
            "time_metrics/data_loading(%)": 100 * sum(loading) / seconds,
            "time_metrics/checkpoint(s)": self.checkpoint_seconds_since_last_log,
        }
        if self.validation_seconds_since_last_log > 0:
            metrics["time_metrics/validation(s)"] = self.validation_seconds_since_last_log
        return metrics

    def _print_line(self, step: int, metrics: dict[str, Any], memory_summary: str) -> None:
        if not self._is_logging_rank:
            return
        color = self.color
        parts = [
            f"{color.red}step: {self._step_text(step)}",
            f"{color.green}loss: {metrics['loss_metrics/global_avg_loss']:.5f}",
            f"{color.orange}grad_norm: {metrics['grad_norm']:.4f}",
            f"{color.turquoise}memory: {memory_summary}",
            f"{color.blue}tps: {round(metrics['throughput(tps)']):,}",
        ]
        if "tflops" in metrics:
            parts.append(f"{color.cyan}tflops: {metrics['tflops']:.2f}")
        if "mfu(%)" in metrics:
            parts.append(f"{color.magenta}mfu: {metrics['mfu(%)']:.2f}%")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"{color.reset}left: {format_duration(left)}")
        logger.info("  ".join(parts) + color.reset)

    def _step_text(self, step: int) -> str:
        return str(step) if self.total_steps is None else f"{step}/{self.total_steps}"

    def _seconds_left(self) -> float | None:
        """None until two log lines lie between which steps can be timed.

        The steps before the first line do not count: they include the warm-up of this process.
        """
        if self.total_steps is None or len(self._pace) < 2:
            return None
        (first_step, first_seconds), (step, seconds) = self._pace[0], self._pace[-1]
        if step <= first_step:
            return None
        seconds_per_step = (seconds - first_seconds) / (step - first_step)
        return max(self.total_steps - step, 0) * seconds_per_step


def format_duration(seconds: float) -> str:
    """``seconds`` in its two largest units, such as ``1m 23s`` or ``2d 03h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _logging_rank(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The first rank that computes the loss."""
    # This schedule is V-shaped: the first rank holds the last stage as well.
    if not parallel_dims.pp_enabled or pp_schedule == "ZBVZeroBubble":
        return 0
    return parallel_dims.world_size // parallel_dims.pp * (parallel_dims.pp - 1)
