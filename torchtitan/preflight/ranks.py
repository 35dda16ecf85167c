"""How many ranks a run has, and whether its settings can be divided among them."""

import os

from torchtitan import assembly
from torchtitan.distributed.parallel_dims import problems as parallel_problems
from torchtitan.trainer import Trainer


def num_ranks(*, simulated: bool = False) -> int:
    """Ranks of the run: WORLD_SIZE under a launcher, else NGPU (default 1) on each of NNODES machines.

    A ``simulated`` run has the NGPU ranks that one process pretends to be part of.

    Raises:
        ValueError: a variable that counts is not set or is no positive number.
    """
    if simulated:
        if not os.environ.get("NGPU"):
            raise ValueError(
                "--comm.mode fake_backend plays one of NGPU ranks, but NGPU is not set; set it to "
                "the number of ranks."
            )
        world_size = _count("NGPU", "ranks")
        rank = os.environ.get("RANK", "0")
        if not rank.isdecimal() or int(rank) >= world_size:
            raise ValueError(
                f"RANK={rank!r} is none of the {world_size} ranks that NGPU simulates; set it to "
                f"0 to {world_size - 1}, or unset it to be rank 0."
            )
        return world_size
    if os.environ.get("WORLD_SIZE"):
        return _count("WORLD_SIZE", "ranks")
    return _count("NGPU", "ranks") * _count("NNODES", "machines")


def _count(name: str, what: str) -> int:
    text = os.environ.get(name) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} is not a number of {what}; set it to 1 or more.")
    return int(text)


def layout_problems(config: Trainer.Config, world_size: int) -> list[str]:
    """Degrees of parallelism that do not fit ``world_size`` ranks."""
    parallelism = config.parallelism
    degrees = {
        name: getattr(parallelism, name)
        for name in parallelism.__dataclass_fields__
        if name.endswith("_degree")
    }
    if degrees["data_parallel_shard_degree"] == -1:
        del degrees["data_parallel_shard_degree"]  # the one that may be left to the others
    if any(degree < 1 for degree in degrees.values()):
        return []  # reported as a violation of that field already
    return parallel_problems(parallelism, world_size)


def batch_problems(config: Trainer.Config, world_size: int) -> list[str]:
    """A batch that does not divide among those of the ``world_size`` ranks that read other rows."""
    training, parallelism = config.training, config.parallelism
    wanted = training.num_tokens_per_train_step
    if training.num_tokens_per_microbatch_per_dp_rank <= 0 or (wanted != -1 and wanted <= 0):
        return []  # reported as a violation of that field already
    # Ranks that share matrices, rows or layers work on the same rows.
    sharing = (
        parallelism.tensor_parallel_degree
        * parallelism.context_parallel_degree
        * parallelism.pipeline_parallel_degree
    )
    if sharing < 1 or world_size % sharing:
        return []  # reported as a layout that does not fit
    try:
        assembly.batch_sizes(training, world_size // sharing)
    except ValueError as error:
        return [str(error)]
    return []
