"""Places that numbers go to, and TensorBoard as one of them.

The one fact to know: numbers are worth less than training. A place that fails while a run goes on
is given up with one message, and the run goes on; one that is full is tried again with the next numbers.
Only opening a place may fail, and not because it is full.

    MetricsProcessor -> LoggerContainer -> TensorBoardLogger | WandBLogger | yours
"""

import json
from typing import Any

from torchtitan.components.metrics.event_file import EventFile
from torchtitan.observability.growing_file import is_full
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
        self._tag = tag
        text = {}
        if config_dict is not None:
            text["config"] = f"```\n{json.dumps(config_dict, indent=2)}\n```"
        try:
            self._file = EventFile(log_dir, purge_step=purge_step, text=text)
        except ImportError as error:
            raise ImportError(
                "metrics.enable_tensorboard was asked for, but the package tensorboard cannot be "
                f"imported ({error}). Install tensorboard, or set --metrics.no-enable-tensorboard."
            ) from error
        try:
            self._file.begin()
        except OSError as error:
            if not is_full(error):
                raise
            # The first numbers try it again, and whoever logs them says so if that fails too.

    def log(self, metrics: dict[str, Any], step: int) -> None:
        prefix = "" if self._tag is None else f"{self._tag}/"
        self._file.add_scalars({f"{prefix}{name}": it for name, it in metrics.items()}, step)

    def close(self) -> None:
        self._file.close()


class LoggerContainer(BaseLogger):
    """Any number of loggers as one; one that fails is given up, the others go on."""

    def __init__(self) -> None:
        self.loggers: list[BaseLogger] = []
        self._full: list[BaseLogger] = []

    def add_logger(self, metric_logger: BaseLogger) -> None:
        self.loggers.append(metric_logger)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for metric_logger in list(self.loggers):
            try:
                metric_logger.log(metrics, step)
            except Exception as error:  # no reason to stop training
                self._pass_over(metric_logger, step, error)

    def _pass_over(self, metric_logger: BaseLogger, step: int, error: Exception) -> None:
        failed = (
            f"{type(metric_logger).__name__} could not write the metrics of step {step}: {error!r}."
        )
        if not is_full(error):
            self.loggers.remove(metric_logger)
            logger.error(f"{failed} It gets no more of them; training goes on.")
        elif metric_logger not in self._full:
            self._full.append(metric_logger)
            logger.warning(
                f"{failed} Training goes on, and so does this as soon as there is room; what comes until "
                "then is left out."
            )

    def close(self) -> None:
        for metric_logger in self.loggers:
            try:
                metric_logger.close()
            except Exception as error:  # the others are still to be closed
                logger.error(f"{type(metric_logger).__name__} could not be closed: {error!r}.")
