"""The line on the console: what it says, in which order and colour, and how much time is left.

metrics of a step -> training_line | validation_line -> log
"""

from collections import deque
from typing import Any

from torchtitan.tools.utils import Color, NoColor

# Log points that the time left is estimated from: enough to even out a checkpoint in between, few
# enough to follow a run that became slower.
_PACE_POINTS = 6


class Pace:
    """How fast a run is, measured between the last few log lines."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=_PACE_POINTS)

    def add(self, step: int, seconds: float) -> None:
        """``step`` was logged at the time ``seconds``."""
        self._points.append((step, seconds))

    def seconds_left(self, total_steps: int | None) -> float | None:
        """None until two log lines lie between which steps can be timed.

        The steps before the first line do not count: they include the warm-up of this process.
        """
        if total_steps is None or len(self._points) < 2:
            return None
        (first_step, first_seconds), (step, seconds) = self._points[0], self._points[-1]
        if step <= first_step:
            return None
        seconds_per_step = (seconds - first_seconds) / (step - first_step)
        return max(total_steps - step, 0) * seconds_per_step


def training_line(
    step: str,
    metrics: dict[str, Any],
    *,
    memory: str,
    seconds_left: float | None,
    color: Color | NoColor,
) -> str:
    """The line for the training up to ``step``, such as ``10/150``."""
    parts = [
        f"{color.red}step: {step}",
        f"{color.green}loss: {metrics['loss_metrics/global_avg_loss']:.5f}",
        f"{color.orange}grad_norm: {metrics['grad_norm']:.4f}",
        f"{color.turquoise}memory: {memory}",
        f"{color.blue}tps: {round(metrics['throughput(tps)']):,}",
    ]
    if "tflops" in metrics:
        parts.append(f"{color.cyan}tflops: {metrics['tflops']:.2f}")
    if "mfu(%)" in metrics:
        parts.append(f"{color.magenta}mfu: {metrics['mfu(%)']:.2f}%")
    if seconds_left is not None:
        parts.append(f"{color.reset}left: {format_duration(seconds_left)}")
    return "  ".join(parts) + color.reset


def validation_line(
    step: str, metrics: dict[str, Any], *, memory: str, color: Color | NoColor
) -> str:
    """The line for a validation after ``step``."""
    parts = [
        f"{color.yellow}validation step: {step}",
        f"{color.green}loss: {metrics['validation_metrics/loss']:.5f}",
        f"{color.turquoise}memory: {memory}",
    ]
    tps = metrics.get("validation_metrics/throughput(tps)")
    if tps is not None:
        parts.append(f"{color.blue}tps: {round(tps):,}")
    return "  ".join(parts) + color.reset


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
