"""Decide the global order of rows and which of them a rank takes. Pure arithmetic.

Each epoch is a permutation of the corpus' rows that depends on the seed and the epoch alone. It is
computed row by row, so any position is reached at once and nothing is kept in memory. The one
fact to know: neither the number of ranks nor the microbatch changes the order, only the shares.

    position -> (epoch, index) -> row of the corpus
    microbatch: positions [P, P + k*W), rank r takes [P + r*k, P + (r+1)*k)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchtitan.components.data.engine import index_shuffle

# index_shuffle computes with 32 bits.
_MAX_SHUFFLED_ROWS = 2**32 - 1
# More rounds mix better and cost more; 4 is what the library uses itself.
_ROUNDS = 4


@lru_cache(maxsize=16)
def _epoch_seed(seed: int, epoch: int) -> int:
    # Hashed, not added: epoch 1 of seed 42 must not be epoch 0 of seed 43.
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which row of the corpus comes at which global position."""

    num_rows: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.shuffle and self.num_rows > _MAX_SHUFFLED_ROWS:
            raise ValueError(
                f"{self.num_rows} rows cannot be shuffled, at most {_MAX_SHUFFLED_ROWS}. Use a "
                "larger training.max_context_length or --dataloader.no-shuffle."
            )

    def row_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_rows)
        if not self.shuffle:
            return index
        return index_shuffle(
            index,
            max_index=self.num_rows - 1,
            seed=_epoch_seed(self.seed, epoch),
            rounds=_ROUNDS,
        )

    def describe(self) -> str:
        return f"shuffled with seed {self.seed}" if self.shuffle else "in the order of the corpus"


@dataclass(frozen=True, slots=True)
class Share:
    """The part that one rank takes of the rows of each microbatch."""

    rows_per_microbatch: int
    dp_rank: int
    dp_world_size: int

    @property
    def global_rows(self) -> int:
        """Rows that one microbatch takes over all ranks."""
        return self.rows_per_microbatch * self.dp_world_size

    def position_of(self, start: int, item: int) -> int:
        """The position of this rank's row number ``item``, counted from position ``start``."""
        microbatch, row = divmod(item, self.rows_per_microbatch)
        first = start + microbatch * self.global_rows + self.dp_rank * self.rows_per_microbatch
        return first + row
