"""Decide which ranks form which axis of parallelism.

The ranks are one line, "world". Every axis is a way of cutting that line, outermost first:

    grid     pp | dp_replicate | dp_shard | cp | tp
    data     pp |        batch            | cp | tp      batch = dp_replicate * dp_shard: who reads other rows
    loss     pp |           loss               | tp      loss  = batch * cp: who holds other tokens
    dense    pp | dp_replicate |    fsdp       | tp      fsdp  = dp_shard * cp: who shares a parameter's shards
    sparse   pp | dp_replicate |   efsdp     |   ep      the same ranks, cut for the experts

An axis of size 1 needs no communication and gets a backend that does none; fsdp alone is always
real, because a model is sharded over it on a single rank too. Building the meshes is collective:
every rank creates every group in the same order.

    parallelism config -> problems (before anything starts) -> ParallelDims -> get_mesh -> fsdp, loss, clipping
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the "fake" backend)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config import ParallelismConfig
from torchtitan.tools.utils import device_type


class MeshAxisName(StrEnum):
    """The axes that ``ParallelDims`` has a mesh for."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    BATCH = "batch"
    LOSS = "loss"
    FSDP = "fsdp"
    EFSDP = "efsdp"


# Which cut each axis is taken from. An axis that several cuts share (pp, say) has its groups
# created once.
_CUTS: dict[str, tuple[str, ...]] = {
    "grid": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "data": ("pp", "batch", "cp", "tp"),
    "loss": ("pp", "loss", "tp"),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep"),
}

_FLAGS = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def problems(parallelism: ParallelismConfig, world_size: int) -> list[str]:
    """Say why these degrees do not fit ``world_size`` ranks; empty when they do."""
    degrees = _degrees_of(parallelism)
    return _degree_problems(degrees, world_size) or _expert_problems(
        _with_computed_shard(degrees, world_size)
    )


@dataclass
class ParallelDims:
    """The degree of each kind of parallelism, and the device mesh of each axis.

    ``dp_shard`` -1 takes the ranks that the other degrees leave. Raises AssertionError when the
    degrees do not fit ``world_size``, ValueError when only ``ep`` does not. ``problems`` says the same beforehand.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int

    _world_mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    _single_axis_meshes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False)
    _multi_axis_meshes: dict[tuple[str, ...], DeviceMesh] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def from_config(cls, parallelism_config: ParallelismConfig, world_size: int) -> "ParallelDims":
        return cls(**_degrees_of(parallelism_config), world_size=world_size)

    def __post_init__(self) -> None:
        degrees = self.degrees()
        if found := _degree_problems(degrees, self.world_size):
            raise AssertionError("; ".join(found))
        degrees = _with_computed_shard(degrees, self.world_size)
        if found := _expert_problems(degrees):
            raise ValueError("; ".join(found))
        self.dp_shard = degrees["dp_shard"]

    @property
    def world_mesh(self) -> DeviceMesh:
        """All ranks on one axis, "world"."""
        if self._world_mesh is None:
            self.build_mesh()
        assert self._world_mesh is not None
        return self._world_mesh

    def build_mesh(self) -> DeviceMesh:
        """Create the mesh of every axis and return the one of all ranks. Collective."""
        world = init_device_mesh(device_type, (self.world_size,), mesh_dim_names=("world",))
        sizes = self._axis_sizes()
        always_real = {"fsdp", "efsdp"} if self.ep_enabled else {"fsdp"}
        for axes in _CUTS.values():
            known = set(self._single_axis_meshes)
            real = [
                axis
                for axis in axes
                if axis not in known and (sizes[axis] > 1 or axis in always_real)
            ]
            cut = world._unflatten(
                0,
                tuple(sizes[axis] for axis in axes),
                axes,
                backend_override={axis: "fake" for axis in axes if axis not in real},
            )
            for axis in axes:
                if axis not in known:
                    self._single_axis_meshes[axis] = cut[axis]
        self._world_mesh = world
        return world

    def get_optional_mesh(
        self, dims: str | list[str], *, include_singleton_axes: bool = False
    ) -> DeviceMesh | None:
        """The mesh over ``dims`` (outermost first), or None when there is nothing to parallelize.

        Axes of size 1 are left out unless ``include_singleton_axes``. Asking twice gives the same object.
        Raises ValueError for a name that is no axis, and for axes that overlap.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        unknown = sorted({name for name in names if name not in set(MeshAxisName)})
        if unknown or not names:
            raise ValueError(
                f"Invalid mesh dim: {unknown or 'none given'} in a request for {list(names)}. "
                f"Choose from {[str(name) for name in MeshAxisName]}."
            )
        _ = self.world_mesh
        if not include_singleton_axes:
            names = tuple(name for name in names if self._single_axis_meshes[name].size() > 1)
        if not names:
            return None
        if len(names) == 1:
            return self._single_axis_meshes[names[0]]
        if names not in self._multi_axis_meshes:
            self._multi_axis_meshes[names] = self._joined(names)
        return self._multi_axis_meshes[names]

    def get_mesh(
        self, dims: str | list[str], *, include_singleton_axes: bool = False
    ) -> DeviceMesh:
        """Like ``get_optional_mesh``, but raises ValueError where that returns None."""
        mesh = self.get_optional_mesh(dims, include_singleton_axes=include_singleton_axes)
        if mesh is None:
            raise ValueError(
                f"asked for the mesh over {dims}, but every axis of it has size 1 ({self.describe()}). "
                "Raise the degree, or use get_optional_mesh where this is allowed."
            )
        return mesh

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """The meshes of all axes with more than one rank, by name."""
        _ = self.world_mesh
        return {name: mesh for name, mesh in self._single_axis_meshes.items() if mesh.size() > 1}

    def describe(self) -> str:
        """The degrees as ``dp_replicate 1, dp_shard 2, ...`` for a log line."""
        return ", ".join(f"{axis} {degree}" for axis, degree in self.degrees().items())

    def degrees(self) -> dict[str, int]:
        """The degree of each axis."""
        return {axis: getattr(self, axis) for axis in _FLAGS}

    @property
    def dp_enabled(self) -> bool:
        return self.dp_replicate_enabled or self.dp_shard_enabled

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.dp_shard > 1

    @property
    def cp_enabled(self) -> bool:
        return self.cp > 1

    @property
    def dp_cp_enabled(self) -> bool:
        return self.dp_enabled or self.cp_enabled

    @property
    def fsdp_enabled(self) -> bool:
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def tp_enabled(self) -> bool:
        return self.tp > 1

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    @property
    def ep_enabled(self) -> bool:
        return self.ep > 1

    @property
    def non_data_parallel_size(self) -> int:
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """What a context length must be a multiple of: sequence parallelism cuts it in ``tp``
        pieces, and the balanced order of context parallelism in ``2 * cp``."""
        return self.tp * self.cp * 2

    def _axis_sizes(self) -> dict[str, int]:
        sizes = {axis: getattr(self, axis) for axis in _FLAGS}
        sizes["batch"] = self.dp_replicate * self.dp_shard
        sizes["loss"] = sizes["batch"] * self.cp
        sizes["fsdp"] = self.dp_shard * self.cp
        sizes["efsdp"] = self.dp_shard * self.cp * self.tp // self.ep
        return sizes

    def _joined(self, names: tuple[str, ...]) -> DeviceMesh:
        # Sharing the groups of the single axes, where a slice of a fresh cut would open new ones.
        try:
            return DeviceMesh._concatenate([self._single_axis_meshes[name] for name in names])
        except RuntimeError as error:
            raise ValueError(
                f"asked for one mesh over {list(names)}, but these axes hold the same ranks twice "
                f"({self.describe()}). Name axes that do not contain one another."
            ) from error


def _degrees_of(parallelism: ParallelismConfig) -> dict[str, int]:
    return {axis: getattr(parallelism, flag) for axis, flag in _FLAGS.items()}


def _degree_problems(degrees: dict[str, int], world_size: int) -> list[str]:
    found = [
        f"--parallelism.{_FLAGS[axis]} is {degree}; set it to 1 or more"
        + (", or to -1 for all remaining ranks." if axis == "dp_shard" else ".")
        for axis, degree in degrees.items()
        if degree < 1 and not (axis == "dp_shard" and degree == -1)
    ]
    if found:
        return found
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if degrees[axis] != -1]
    product = prod(degrees[axis] for axis in axes)
    shown = " * ".join(f"{axis} ({degrees[axis]})" for axis in axes)
    if degrees["dp_shard"] == -1 and world_size % product:
        return [
            f"asked for {shown} = {product} times any number of sharding ranks, but there are "
            f"{world_size} ranks, no multiple of that. Change a --parallelism degree or the number of ranks."
        ]
    if degrees["dp_shard"] != -1 and product != world_size:
        return [
            f"asked for {shown} = {product} ranks, but there are {world_size}. Start {product} ranks, change a "
            f"--parallelism degree, or set --parallelism.{_FLAGS['dp_shard']} to -1 to use all ranks."
        ]
    return []


def _with_computed_shard(degrees: dict[str, int], world_size: int) -> dict[str, int]:
    if degrees["dp_shard"] != -1:
        return degrees
    others = prod(degrees[axis] for axis in ("dp_replicate", "cp", "tp", "pp"))
    return {**degrees, "dp_shard": world_size // others}


def _expert_problems(degrees: dict[str, int]) -> list[str]:
    sharing = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    if sharing % degrees["ep"] == 0:
        return []
    return [
        f"expert_parallel_degree ({degrees['ep']}) must divide dp_shard * cp * tp ({sharing}), the ranks "
        f"that share the experts. Set --parallelism.{_FLAGS['ep']} to a divisor of {sharing}."
    ]
