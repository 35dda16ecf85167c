"""Places that numbers go to, and TensorBoard as one of them.

The one fact to know: numbers are worth less than training. A place that fails while a run goes on
is given up with one message, and the run goes on; only opening a place may fail.

    MetricsProcessor -> LoggerContainer -> TensorBoardLogger | WandBLogger | yours
"""

import json
from typing import Any

from torchtitan.tools.logging import logger


class BaseLogger:
    """A place that numbers go to; this one drops them."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write ``metrics`` under ``step``."""

    def close(self) -> None:
        """Write what is still held back."""


class TensorBoardLogger(BaseLogger):
    """Scalars as TensorBoard event files in ``log_dir``, their names under ``tag`` if there is one."""

    def __init__(
        self,
        log_dir: str,
        tag: str | None = None,
        config_dict: dict[str, Any] | None = None,
        purge_step: int | None = None,
    ) -> None:
        """Add a file to ``log_dir``; from ``purge_step`` on it replaces what earlier files there say."""
        try:
            # Late: it costs a second to import, and only runs that use it need the package.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "metrics.enable_tensorboard was asked for, but the package tensorboard cannot be "
                f"imported ({error}). Install tensorboard, or set --metrics.no-enable-tensorboard."
            ) from error
        self._tag = tag
        self._writer = SummaryWriter(log_dir, purge_step=purge_step)
        if config_dict is not None:
            text = f"```\n{json.dumps(config_dict, indent=2)}\n```"
            self._writer.add_text("config", text, global_step=purge_step)

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
    """Any number of loggers as one; one that fails is given up, the others go on."""

    def __init__(self) -> None:
        self.loggers: list[BaseLogger] = []

    def add_logger(self, metric_logger: BaseLogger) -> None:
        self.loggers.append(metric_logger)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for metric_logger in list(self.loggers):
            try:
                metric_logger.log(metrics, step)
            except (
                Exception
            ) as error:  # a full disk or a lost network is no reason to stop training
                self.loggers.remove(metric_logger)
                logger.error(
                    f"{type(metric_logger).__name__} could not write the metrics of step {step}: {error!r}. "
                    "It gets no more of them; training goes on."
                )

    def close(self) -> None:
        for metric_logger in self.loggers:
            try:
                metric_logger.close()
            except Exception as error:  # the others are still to be closed
                logger.error(f"{type(metric_logger).__name__} could not be closed: {error!r}.")
