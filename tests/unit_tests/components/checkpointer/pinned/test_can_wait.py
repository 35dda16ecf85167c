"""Which tensors may be copied during the next forward and backward pass."""

import torch
from torch import nn
from torchtitan.components.checkpointer.state import (
    changed_by_updates_only,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("corner", self.inner.bias.detach()[:1])
        self.history = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.history

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state


def test_parameters_and_optimizer_state_wait_and_buffers_and_foreign_state_do_not() -> None:
    wrapper = ModelWrapper([Counting(), nn.BatchNorm1d(4)])
    can_wait = changed_by_updates_only({MODEL: wrapper, OPTIMIZER: object(), "extra": object()})
    waiting = {name for name, value in wrapper.state_dict().items() if can_wait(name, value)}
    # A parameter that shares memory with a buffer changes with it, and so does a view of a buffer.
    assert waiting == {"inner.weight", "weight", "bias"}
    assert not can_wait("seen", wrapper.state_dict()["seen"][1:])
    assert can_wait(OPTIMIZER, torch.zeros(1))
    assert not can_wait("extra", torch.zeros(1))
