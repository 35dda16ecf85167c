"""Start and stop talking to the other ranks, and the few reductions a trainer needs.

    init_distributed -> ParallelDims -> set_determinism -> (training) -> clip_grad_norm_, dist_sum, ...
                                                                |
              set_pg_timeouts after the first step -------------+

The one fact to know: ``init_distributed`` makes the key-value store of the job itself and keeps it,
so that the watch for failed ranks (``failure.py``) can speak when the collectives no longer do.
"""

import itertools
import os
import random
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config import CommConfig, DebugConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_meetings = itertools.count()
_store: dist.Store | None = None
_timeout: timedelta | None = None


def dist_sum_tensor(
    x: torch.Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum ``x`` over ``extra_pg`` first and then ``mesh``; ``x`` itself when both are None."""
    return _all_reduce(x, "SUM", mesh, extra_pg)


def dist_min_tensor(
    x: torch.Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The smallest of the ranks' ``x``, elementwise, without waiting for the device."""
    return _all_reduce(x, "MIN", mesh, extra_pg)


def dist_sum(
    x: torch.Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """``dist_sum_tensor`` of a scalar, as a number. Waits for the device."""
    return float(_all_reduce(x, "SUM", mesh, extra_pg).item())


def dist_max(
    x: torch.Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """The largest of the ranks' scalars. Waits for the device."""
    return float(_all_reduce(x, "MAX", mesh, extra_pg).item())


def dist_mean(
    x: torch.Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """The mean of the ranks' scalars. Waits for the device."""
    num_ranks = (mesh.size() if mesh is not None else 1) * (extra_pg.size() if extra_pg else 1)
    # Not the reduction AVG: gloo has none.
    return dist_sum(x, mesh, extra_pg) / num_ranks


def _all_reduce(
    x: torch.Tensor, op: str, mesh: DeviceMesh | None, extra_pg: dist.ProcessGroup | None
) -> torch.Tensor:
    if isinstance(x, DTensor):
        if extra_pg is not None:
            raise ValueError(
                "asked to reduce a DTensor over a further process group, which its mesh does not know. "
                "Pass its local tensor."
            )
        sharded = [
            place for place in x.placements if not (place.is_replicate() or place.is_partial())
        ]
        if sharded:
            raise ValueError(
                f"asked to reduce a DTensor that is placed {x.placements}. Only Replicate and Partial "
                "placements hold one value that can be reduced; redistribute it first."
            )
        x = x.full_tensor()
    if extra_pg is not None:
        x = funcol.wait_tensor(funcol.all_reduce(x, reduceOp=op, group=extra_pg))
    if mesh is not None:
        x = funcol.wait_tensor(funcol.all_reduce(x, reduceOp=op, group=mesh))
    return x


def set_determinism(
    parallel_dims: ParallelDims,
    device: torch.device,
    debug_config: DebugConfig,
    distinct_seed_mesh_dims: list[str],
) -> None:
    """Seed the generators of torch, Python and NumPy, alike except along ``distinct_seed_mesh_dims``.

    Without a configured seed the ranks agree on the one that rank 0 drew. Collective when there is more than one rank.
    """
    if debug_config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=debug_config.deterministic_warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        # cuBLAS is deterministic only with a fixed workspace, read when its first handle is made.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if debug_config.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)

    seed = debug_config.seed
    if parallel_dims.world_size == 1:
        if seed is not None:
            _seed_generators(seed)
        return
    if seed is None:
        seed = _seed_of_rank_zero(device)
    seed = (seed + _index_over(parallel_dims, distinct_seed_mesh_dims)) % 2**64
    logger.debug("seed %d over distinct axes %s", seed, distinct_seed_mesh_dims)
    _seed_generators(seed)
    mesh = parallel_dims.world_mesh
    # On a CPU mesh DTensor has no generator of its own to seed and would only warn.
    if parallel_dims.world_size > parallel_dims.pp and mesh.device_type != "cpu":
        dtensor_random.manual_seed(seed, mesh)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # takes no more bits
    # Read by child processes only: this one hashed its first string long ago.
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)


def _seed_of_rank_zero(device: torch.device) -> int:
    # The first 8 bytes of the generator's state are the seed it was given.
    seed_bytes = torch.get_rng_state()[:8].to(device)
    dist.broadcast(seed_bytes, src=0)
    return int(seed_bytes.cpu().view(torch.int64).item()) % 2**64


def _index_over(parallel_dims: ParallelDims, axes: list[str]) -> int:
    index = 0
    for axis in axes:
        mesh = parallel_dims.get_optional_mesh(axis)
        if mesh is not None:
            index = index * mesh.size() + mesh.get_local_rank()
    return index


def init_distributed(
    comm_config: CommConfig,
    enable_cpu_backend: bool = False,
    base_folder: str = "",
    ranks: list[int] | None = None,
) -> int:
    """Join the process group of the job and return its number of ranks.

    Ranks come from the variables of the launcher; without any of them this process is the only rank.
    ``enable_cpu_backend`` adds gloo for CPU tensors beside the device's own backend. ``ranks`` are the global
    ranks of this group where it is not the whole job. Raises ValueError when the variables contradict one another.
    """
    if dist.is_initialized():
        logger.warning(
            "the process group was started before; keeping it with its backend and timeouts"
        )
        return dist.get_world_size()
    global _store, _timeout
    _store, _timeout = None, None
    if comm_config.mode in ("fake_backend", "local_tensor"):
        world_size, rank = _simulated_world()
        init_fake_mode(world_size, comm_config.mode, rank=rank)
        return world_size

    torch.autograd.set_multithreading_enabled(False)
    backend = dist.get_default_backend_for_device(device_type)
    _prepare_flight_recorder(comm_config, base_folder, backend)
    if enable_cpu_backend and device_type != "cpu":
        backend = f"{device_type}:{backend},cpu:gloo"
    timeout = timedelta(seconds=comm_config.init_timeout_seconds)
    store, rank, world_size = _meet(timeout)
    if ranks is not None:
        rank, world_size = ranks.index(rank), len(ranks)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("process_groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    _store, _timeout = store, timeout
    return world_size


def job_store() -> dist.Store | None:
    """The key-value store of the job, or None when ``init_distributed`` did not make it.

    Prefix your keys (``torch.distributed.PrefixStore``), and use ``clone()`` in a thread.
    """
    return _store


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    present = [name for name in _LAUNCHER_VARIABLES if os.environ.get(name)]
    missing = [name for name in _LAUNCHER_VARIABLES if not os.environ.get(name)]
    alone = (os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or "0") == ("1", "0")
    if alone and "MASTER_PORT" in missing:
        # Started by hand: the one rank meets nobody, so it needs neither an address nor a port.
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        return dist.HashStore(), 0, 1
    if missing:
        raise ValueError(
            f"asked for several ranks through the environment ({', '.join(present)}), but "
            f"{', '.join(missing)} is not set. Start with torchrun, which sets all four, or unset "
            "them all to train on one rank."
        )
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    # A process that trains twice meets the same server again, where the addresses and the failures
    # of the first run still stand.
    return dist.PrefixStore(f"meeting_{next(_meetings)}", store), rank, world_size


def _prepare_flight_recorder(comm_config: CommConfig, base_folder: str, backend: str) -> None:
    # 3: tear the process down after a failed or overdue collective, without the clean-up that can hang.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(comm_config.trace_buf_size)
    if comm_config.trace_buf_size <= 0:
        return
    folder = os.path.join(base_folder, comm_config.save_traces_folder)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(
        folder, comm_config.save_traces_file_prefix
    )
    if backend == "nccl":
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            logger.warning(f"Traces of collectives cannot be written to {folder}: {error}.")


def _simulated_world() -> tuple[int, int]:
    asked = os.environ.get("NGPU", "")
    if not asked.isdecimal() or int(asked) < 1:
        raise ValueError(
            f"asked to simulate a process group, but NGPU is {asked or 'not set'}. "
            "Set NGPU to the number of ranks to simulate."
        )
    world_size = int(asked)
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or int(rank) >= world_size:
        raise ValueError(
            f"RANK must be in [0, {world_size}), the ranks that NGPU simulates, but it is {rank}. "
            "Unset RANK to be rank 0."
        )
    return world_size, int(rank)


def init_fake_mode(world_size: int, comm_mode: str = "fake_backend", *, rank: int = 0) -> None:
    """Pretend to be ``rank`` of ``world_size`` ranks: collectives return at once and move nothing.

    Shapes, memory and configuration can be tried this way on one process; the numbers mean nothing.
    """
    if comm_mode != "fake_backend":
        raise ValueError(
            f"asked for --comm.mode {comm_mode}, which is not available. Use default, or fake_backend "
            "to simulate ranks."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
    """Give every process group of training ``timeout`` for the collectives from now on. Collective.

    The first step may compile and open connections for minutes; later a collective that takes long is a hang.
    """
    if dist.get_backend() == "fake":
        return  # Simulated ranks are never late, and their groups refuse a timeout.
    global _timeout
    _timeout = timeout
    # A rank still in its first step would have the new timeout sprung on it by the others.
    dist.barrier()
    if device_type != "cpu":
        device_module.synchronize()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    groups = {group.group_name: group for group in (mesh.get_group() for mesh in meshes)}
    if dist.group.WORLD is not None:
        groups[dist.group.WORLD.group_name] = dist.group.WORLD
    for group in groups.values():
        try:
            group.set_timeout(timeout)
        except RuntimeError as error:
            # Not every backend can; a longer wait for a hung rank is no reason to end the run.
            logger.warning(
                "the group %s keeps its timeout of the start: %s", group.group_name, error
            )


@contextmanager
def patience(timeout: timedelta) -> Generator[None]:
    """Let the default group's collectives in the block take up to ``timeout``, not the usual time.

    For waits on disks: ranks finish writing minutes apart, which between two steps would be a hang.
    """
    group, usual = dist.group.WORLD, _timeout
    if group is None or usual is None or usual == timeout or dist.get_backend() == "fake":
        yield
        return
    try:
        group.set_timeout(timeout)
    except RuntimeError:
        yield  # A backend whose timeout is fixed; set_pg_timeouts has said so.
        return
    try:
        yield
    finally:
        group.set_timeout(usual)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
    ep_enabled: bool = False,
) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

    Returns that norm as it was, a plain scalar, the same on every rank. Parameters on different meshes, as experts
    are (``ep_enabled``), are normed mesh by mesh. Raises RuntimeError for a norm that is not finite, if asked to.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_full_norm(group, norm_type, foreach) for group in by_mesh.values()]
    if len(norms) == 1:
        total = norms[0]
    elif norms:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    else:
        total = torch.zeros((), device=device_type)
    if pp_mesh is not None:
        total = _norm_over_stages(total, norm_type, pp_mesh)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, not finite, so they cannot be clipped. "
            "Look at the loss and the learning rate of the steps before."
        )
    for group in by_mesh.values():
        # Mesh by mesh again: a fused operation cannot take tensors of two meshes.
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=foreach)
    return total


def _full_norm(
    parameters: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type, False, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norm_over_stages(norm: torch.Tensor, norm_type: float, pp_mesh: DeviceMesh) -> torch.Tensor:
    if norm_type == float("inf"):
        return _all_reduce(norm, "MAX", pp_mesh, None)
    return _all_reduce(norm**norm_type, "SUM", pp_mesh, None) ** (1 / norm_type)
