"""The ways in which the tests divide a model and its data among ranks."""

from dataclasses import dataclass

from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.ranks.tiny_run import CONTEXT, Recorded, Trace


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, and whether the blocks are wrapped."""

    name: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share the tokens between blocks, too."""

    wrapped: bool = False
    """Activation checkpointing, and torch.compile without a compiler."""

    def __str__(self) -> str:
        return self.name

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read other rows."""
        return self.replicate * self.shard

    def divide(
        self, config: Recorded.Config, *, rows_per_step: int, accumulation: int = 1
    ) -> Recorded.Config:
        """Make ``config`` a run in this layout, in place, and return it.

        A step takes ``rows_per_step`` over all ranks, each of which makes ``accumulation``
        microbatches of its share.
        """
        parallelism, training = config.parallelism, config.training
        parallelism.data_parallel_replicate_degree = self.replicate
        parallelism.data_parallel_shard_degree = self.shard
        parallelism.tensor_parallel_degree = self.tensor
        parallelism.enable_sequence_parallel = self.sequence_parallel
        rows_per_microbatch, rest = divmod(rows_per_step, self.num_data_ranks * accumulation)
        assert rest == 0, "the rows must divide among ranks and microbatches"
        training.num_tokens_per_train_step = rows_per_step * CONTEXT
        training.num_tokens_per_microbatch_per_dp_rank = rows_per_microbatch * CONTEXT
        if self.wrapped:
            config.activation_checkpoint = FullAC.Config()
            config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
        return config


ONE = Layout(name="1 rank")
FSDP_2 = Layout(name="FSDP 2", shard=2)
FSDP_4 = Layout(name="FSDP 4", shard=4)
REPLICATE_2 = Layout(name="replicate 2", replicate=2)
HSDP_4 = Layout(name="HSDP 2x2", replicate=2, shard=2)
TP_2 = Layout(name="TP 2", tensor=2)
TP_2_NO_SP = Layout(name="TP 2, no SP", tensor=2, sequence_parallel=False)
TP_4 = Layout(name="TP 4", tensor=4)
FSDP_TP_4 = Layout(name="FSDP 2 x TP 2", shard=2, tensor=2)
REPLICATE_TP_4 = Layout(name="replicate 2 x TP 2", replicate=2, tensor=2)
HSDP_TP_8 = Layout(name="HSDP 2x2 x TP 2", replicate=2, shard=2, tensor=2)


def samples_in_order(ranks: list[Trace], step: int, layout: Layout) -> list[str]:
    """Digests of the rows of a step, in their global order; ``ranks`` are all of ``layout``."""
    peers = [ranks[first : first + layout.tensor] for first in range(0, len(ranks), layout.tensor)]
    for group in peers:
        assert all(rank.samples[step] == group[0].samples[step] for rank in group)
    per_rank = [group[0].samples[step] for group in peers]
    together = zip(*per_rank, strict=True)
    return [row for microbatches in together for microbatch in microbatches for row in microbatch]
