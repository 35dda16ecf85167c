"""The base class of every piece of a model: built from a Config, filled with weights by name.

A model is built on the meta device, cut into shards, and only then given memory and weights. The one
fact to know: the weights do not depend on that cut. Every rank draws the *whole* of a parameter from
the same seeded generator and keeps its own share, so one rank and many, sharded or not, start from
the same bits, and no rank waits for another. The price is the memory of one whole parameter at a time.

    Config.build -> (meta device) -> FSDP -> to_empty -> init_states -> training
                                                         ^^^^^^^^^^^ this file
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import distribute_tensor, DTensor

from torchtitan.config import Configurable

ParamInit = dict[str, Callable[[torch.Tensor], Any]]


class Module(nn.Module, Configurable):
    """An ``nn.Module`` that is built from its nested ``Config``.

    It has no ``__init__`` of its own, so ``class X(nn.Linear, Module)`` constructs like ``nn.Linear``.
    """

    _param_init: ParamInit | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: ParamInit | None = None
        """How to fill each own parameter, by its name in the module; the function gets the whole,
        unsharded tensor and writes to it. None leaves it to the module's ``reset_parameters``."""

        # super() without arguments does not work in a class that slots=True has rebuilt.
        def build(self, **kwargs: Any) -> Any:
            """Make the module and hand it ``param_init``, the same object."""
            module = Configurable.Config.build(self, **kwargs)
            module._param_init = self.param_init
            return module

    def init_states(self, *, buffer_device: torch.device | str | None = None) -> None:
        """Fill all parameters and buffers in place, children before their parent.

        Parameters are drawn from the default generator of the device they are on. Buffers are computed
        on ``buffer_device``; None means where they are.
        Raises ``ValueError`` for a module with parameters that nothing says how to fill.
        """
        for child in _nearest_modules(self):
            child.init_states(buffer_device=buffer_device)
        with torch.no_grad():
            self._init_self_parameters()
            self._init_self_buffers(buffer_device=buffer_device)

    def _init_self_parameters(self) -> None:
        own = dict(self.named_parameters(recurse=False))
        if not own:
            return
        reset = getattr(self, "reset_parameters", None)
        if self._param_init is not None:
            missing = sorted(own.keys() - self._param_init.keys())
            if missing:
                raise ValueError(
                    f"cannot initialise {type(self).__name__}: its parameters {missing} are not in "
                    f"param_init, which knows {sorted(self._param_init)}. Add one function for each."
                )
            for name, param in own.items():
                fill(param, self._param_init[name])
        elif reset is not None:
            with _whole_parameters(self, own):
                reset()
        else:
            raise ValueError(
                f"cannot initialise {type(self).__name__}: it owns the parameters {sorted(own)} but has "
                "neither param_init nor reset_parameters(). Set param_init in its Config."
            )

    def _init_self_buffers(self, *, buffer_device: torch.device | str | None = None) -> None:
        """Compute the buffers of this module alone; a module that has any overrides this."""


class ModuleList(nn.ModuleList, Module):
    """``nn.ModuleList`` that takes part in ``init_states``."""


class ModuleDict(nn.ModuleDict, Module):
    """``nn.ModuleDict`` that takes part in ``init_states``."""


class Sequential(nn.Sequential, Module):
    """``nn.Sequential`` that takes part in ``init_states``."""


def fill(param: torch.Tensor, init: Callable[[torch.Tensor], Any]) -> None:
    """Run ``init`` on the whole of ``param`` and keep this rank's share of the result."""
    if not isinstance(param, DTensor):
        init(param)
        return
    whole = _empty_whole(param)
    init(whole)
    keep_share(param, whole)


def keep_share(param: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's share of ``whole`` into ``param``; every rank must hold the same ``whole``."""
    # src_data_rank=None cuts locally. A broadcast per parameter would cost time and prove nothing.
    share = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(share.to_local())


def _empty_whole(param: DTensor) -> torch.Tensor:
    # With CPU offload the shards lie on the CPU while the mesh is one of GPUs: ask the shard.
    return torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)


@contextmanager
def _whole_parameters(module: Module, own: dict[str, nn.Parameter]) -> Generator[None, None, None]:
    """Let a ``reset_parameters`` that knows nothing of shards write to whole tensors."""
    sharded = {name: param for name, param in own.items() if isinstance(param, DTensor)}
    whole = {name: nn.Parameter(_empty_whole(param)) for name, param in sharded.items()}
    module._parameters.update(whole)
    try:
        yield
    finally:
        module._parameters.update(sharded)
    for name, param in sharded.items():
        keep_share(param, whole[name])


def _nearest_modules(parent: nn.Module) -> Iterator[Module]:
    """The closest descendants that are ``Module``, through wrappers such as a checkpoint wrapper."""
    for child in parent.children():
        if isinstance(child, Module):
            yield child
        else:
            yield from _nearest_modules(child)
