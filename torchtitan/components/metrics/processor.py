"""Turn the counts of a run into rates, once every ``log_freq`` steps, and hand them on.

The trainer and its checkpointer count (tokens, loading times, seconds in saves). The one fact to know:
nothing is made up. Without a known peak there is no MFU, without measured steps no time left.

    trainer counts -> MetricsProcessor.log -> console line (logging rank)
                                           -> structured log (every rank)
                                           -> LoggerContainer -> TensorBoardLogger, WandBLogger
"""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchtitan.components.metrics import console, continuation, wandb_logger
from torchtitan.components.metrics.loggers import LoggerContainer, TensorBoardLogger
from torchtitan.config import Configurable
from torchtitan.config.violations import reject
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.device_memory import build_device_memory_monitor
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, get_device_name, get_peak_flops, NoColor

# What the whole run has in common; only the logging rank says it.
_OF_THE_RUN = (
    "loss_metrics/",
    "grad_norm",
    "lr/",
    "n_tokens_seen",
    "validation_metrics/loss",
    "checkpoint/age",
)


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

    The trainer adds to ``ntokens_since_last_log``, ``data_loading_times`` (seconds, one per batch) and
    ``validation_seconds_since_last_log``; it sets ``num_flops_per_token``, ``total_steps``, ``checkpointer``
    and, right before its loop, ``start_step``, from which moment time counts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        log_freq: int = 10
        """Steps between two log lines; the first step is always logged."""

        enable_tensorboard: bool = False
        """Write the metrics for TensorBoard too; a resumed run goes on in the same folder."""

        disable_color_printing: bool = False
        """Never colour the console; without a terminal there is no colour anyway."""

        save_tb_folder: str = "tb"
        """Folder for TensorBoard files, inside of the dump folder."""

        save_for_all_ranks: bool = False
        """Let every rank write its own TensorBoard files, instead of the one that logs the loss."""

        enable_wandb: bool = False
        """Send the metrics to Weights & Biases, needs the package wandb; a resumed run goes on there."""

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
            if self.enable_wandb:
                found += wandb_logger.problems(os.environ)
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
        # A process that was started without one has None there.
        has_terminal = sys.stdout is not None and sys.stdout.isatty()
        plain = config.disable_color_printing or not has_terminal
        self.color: Color | NoColor = NoColor() if plain else Color()
        self.device_memory_monitor = build_device_memory_monitor()
        # The peak is that of bfloat16: a share of it says nothing about quantized arithmetic.
        self.peak_flops = None if has_quantization else get_peak_flops(get_device_name())

        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._logging_rank = _logging_rank(parallel_dims, pp_schedule)
        self.logger = LoggerContainer()
        self._places = _Places(
            dump_folder=dump_folder,
            replica=ft_replica_id if ft_enable else None,
            config_dict=config_dict,
            tag=tag,
        )
        self._is_open = False
        ensure_pp_loss_visible(
            parallel_dims=parallel_dims, pp_schedule=pp_schedule, color=self.color
        )

        self.num_flops_per_token = 0
        self.optimizers: Optimizer | None = None
        self.model_parts: Sequence[nn.Module] | None = None
        self.total_steps: int | None = None
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.checkpointer: _Checkpointer | None = None
        self.validation_seconds_since_last_log = 0.0
        self._begin(0)

    @property
    def start_step(self) -> int:
        """The step this process goes on after, 0 for a new run; setting it starts the clock.

        If steps are left, it also opens TensorBoard and W&B, which need to know it. Collective.
        """
        return self._start_step

    @start_step.setter
    def start_step(self, step: int) -> None:
        self._begin(step)
        if self.total_steps is None or step < self.total_steps:
            self._open_loggers()

    def _begin(self, step: int) -> None:
        self._start_step = self._last_step = step
        self._last_log_seconds = time.perf_counter()
        self._last_blocked_seconds = self._blocked_seconds()
        self._pace = console.Pace()

    def _open_loggers(self) -> None:
        wants_any = self.config.enable_tensorboard or self.config.enable_wandb
        if self._is_open or not wants_any:
            return
        self._is_open = True
        config, places, speaks = self.config, self._places, self._rank == self._logging_rank
        path = continuation.record_path(places.dump_folder, places.replica)
        record = continuation.record_of_start(path, self._start_step)
        identity: dict[str, Any] = {}
        folder = os.path.join(places.dump_folder, config.save_tb_folder)
        if config.enable_tensorboard:
            name = continuation.tensorboard_folder(record, folder)
            if config.save_for_all_ranks:
                name = continuation.agreed_name(name, self._logging_rank)
            record = dataclasses.replace(record, tensorboard=name)
            folder = os.path.join(folder, name)
        if config.enable_wandb and speaks:
            record, identity = continuation.wandb_identity(record, os.environ)
        if speaks:
            continuation.write_record(path, record)
        if config.enable_tensorboard and (config.save_for_all_ranks or speaks):
            self._open_tensorboard(folder)
        if config.enable_wandb and speaks:
            wandb = wandb_logger.WandBLogger(
                places.dump_folder,
                places.config_dict,
                places.tag,
                identity=identity,
                start_step=self._start_step,
            )
            self.logger.add_logger(wandb)

    def _open_tensorboard(self, folder: str) -> None:
        places = self._places
        parts = [] if places.replica is None else [f"replica_{places.replica}"]
        parts += [f"rank_{self._rank}"] if self.config.save_for_all_ranks else []
        folder = os.path.join(folder, *parts)
        # Also for a new run: another start of the same minute may have written to the folder.
        purge_step = self._start_step + 1
        self.logger.add_logger(
            TensorBoardLogger(folder, places.tag, places.config_dict, purge_step=purge_step)
        )
        if self._rank == self._logging_rank:
            after = f", after step {self._start_step}" if self._start_step else ""
            logger.info(f"TensorBoard: writing to {folder}{after}")

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
        self._open_loggers()
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
            **self._age_metrics(step),
            **memory.metrics,
            **(extra_metrics or {}),
        }
        self._hand_on(metrics, step)
        self._pace.add(step, now)
        if self._rank == self._logging_rank:
            line = console.training_line(
                self._step_text(step),
                metrics,
                memory=memory.summary,
                seconds_left=self._pace.seconds_left(self.total_steps),
                color=self.color,
            )
            logger.info(line)

        self._last_step, self._last_log_seconds = step, now
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self._last_blocked_seconds = self._blocked_seconds()
        self.validation_seconds_since_last_log = 0.0
        self.device_memory_monitor.reset_peak_stats()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Say how a validation went; the counts of the training stay as they are."""
        self._open_loggers()
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {"validation_metrics/loss": loss, **(extra_metrics or {})}
        self._hand_on(metrics, step)
        if self._rank == self._logging_rank:
            logger.info(
                console.validation_line(
                    self._step_text(step), metrics, memory=memory.summary, color=self.color
                )
            )

    def close(self) -> None:
        """Write out everything; nothing may be logged afterwards."""
        self.logger.close()

    def _hand_on(self, metrics: dict[str, Any], step: int) -> None:
        self.logger.log(metrics, step)
        own = metrics
        if self._rank != self._logging_rank:
            # One source for each number: under pipelining other ranks do not even know the loss.
            own = {name: metrics[name] for name in metrics if not name.startswith(_OF_THE_RUN)}
        sl.log_trace_scalar(own)

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
        blocked_seconds = self._blocked_seconds() - self._last_blocked_seconds
        metrics = {
            "time_metrics/end_to_end(s)": seconds / num_steps,
            "time_metrics/data_loading(s)": sum(loading) / len(loading) if loading else 0.0,
            "time_metrics/data_loading(%)": 100 * sum(loading) / seconds,
            "time_metrics/checkpoint(s)": blocked_seconds,
            "time_metrics/checkpoint(%)": 100 * blocked_seconds / seconds,
        }
        if self.validation_seconds_since_last_log > 0:
            metrics["time_metrics/validation(s)"] = self.validation_seconds_since_last_log
        return metrics

    def _age_metrics(self, step: int) -> dict[str, float]:
        age = None if self.checkpointer is None else self.checkpointer.checkpoint_age(step)
        if age is None:
            return {}
        return {"checkpoint/age(steps)": age.steps, "checkpoint/age(s)": age.seconds}

    def _blocked_seconds(self) -> float:
        return 0.0 if self.checkpointer is None else self.checkpointer.blocked_seconds

    def _step_text(self, step: int) -> str:
        return str(step) if self.total_steps is None else f"{step}/{self.total_steps}"


class _Age(Protocol):
    @property
    def steps(self) -> int: ...

    @property
    def seconds(self) -> float: ...


class _Checkpointer(Protocol):
    """What saves the run, as far as its numbers tell of it."""

    blocked_seconds: float
    """For how long it has kept the training thread from training."""

    def checkpoint_age(self, step: int) -> _Age | None:
        """How much work no checkpoint holds after ``step``; None where nothing is saved."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class _Places:
    """Where the metrics of a run go, and under which names."""

    dump_folder: str
    replica: int | None
    config_dict: dict[str, Any] | None
    tag: str | None


def _logging_rank(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The first rank that computes the loss."""
    # This schedule is V-shaped: the first rank holds the last stage as well.
    if not parallel_dims.pp_enabled or pp_schedule == "ZBVZeroBubble":
        return 0
    return parallel_dims.world_size // parallel_dims.pp * (parallel_dims.pp - 1)
