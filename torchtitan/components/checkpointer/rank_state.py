"""State that each rank keeps for itself: its random number generators, and what is registered.

Everything else in a checkpoint is the same for all ranks or in shards that fit together. What differs
per rank lies under the number of the rank, as plain text and bytes:

    rank_state.world_size                     how many ranks saved
    rank_state.layout.<degrees>               how they divided the work; a key, so that the index tells
    rank_state.rank_<r>.python                random.getstate() as JSON
    rank_state.rank_<r>.numpy                 the state of numpy's global generator as JSON
    rank_state.rank_<r>.torch, .cuda, ...     bytes of torch's generators: CPU, the rank's accelerator
    rank_state.rank_<r>.<name>                what was registered under that name

The one fact to know: loading itself and everything built before it draws random numbers, so the
generators are set last, by ``restore_last``, when nothing of the load is left to do.

A checkpoint of another number of ranks, or of as many in another layout, has no generators for these
ranks: two that saw different rows may now share a tensor, and must draw alike. They are seeded from it:

    seed = first 8 bytes of SHA-256(generator, rank 0's saved generators, step, number of ranks, leader)

where the leader of a rank is the lowest rank whose generator was in the same state before the load.
Ranks that were meant to draw the same numbers (tensor parallelism) so go on doing it, and ranks that
were seeded apart stay apart.
"""

import hashlib
import json
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.nesting import decode, encode
from torchtitan.components.checkpointer.templates import Outline, template_of
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module

_WORLD_SIZE = "world_size"
_LAYOUT = "layout"


@runtime_checkable
class Resplittable(Protocol):
    """Registered state that can be divided among another number of ranks."""

    def load_state_dicts(self, state_dicts: list[Any], *, rank: int, world_size: int) -> None:
        """Take this rank's share of ``state_dicts``, those of all ranks that saved, in order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomSource:
    """One random number generator of this process."""

    look: Callable[[], Any]
    """Its state as it is now; what that is nobody changes any more."""

    render: Callable[[Any], str | bytes]
    """The text or the bytes that are saved of such a state. May run in any thread."""

    write: Callable[[Any], None]
    """Raises for a state that it cannot take."""

    seed: Callable[[int], Any]
    """Start anew from 64 bits."""

    def read(self) -> str | bytes:
        """What is saved of its state as it is now."""
        return self.render(self.look())


def generators_of(device: torch.device) -> dict[str, RandomSource]:
    """The global generators of a rank that computes on ``device``, by name."""
    found = {
        "python": RandomSource(
            look=random.getstate, render=json.dumps, write=_write_python, seed=random.seed
        ),
        "numpy": RandomSource(
            look=lambda: np.random.get_state(legacy=False),
            render=_render_numpy,
            write=_write_numpy,
            seed=_seed_numpy,
        ),
        "torch": RandomSource(
            look=torch.get_rng_state,
            render=_as_bytes,
            write=lambda state: torch.set_rng_state(_as_tensor(state)),
            # Not torch.manual_seed: that seeds the accelerators as well.
            seed=torch.default_generator.manual_seed,
        ),
    }
    if device.type != "cpu":
        # DTensor draws from this generator as well; it has none of its own.
        found[device.type] = RandomSource(
            look=lambda: device_module.get_rng_state(device),
            render=_as_bytes,
            write=lambda state: device_module.set_rng_state(_as_tensor(state), device),
            seed=device_module.manual_seed,
        )
    return found


@contextmanager
def preserved_generators(device: torch.device) -> Generator[None]:
    """Whatever is drawn inside, the generators are afterwards as they were before."""
    generators = generators_of(device)
    states = {name: generator.read() for name, generator in generators.items()}
    try:
        yield
    finally:
        for name, generator in generators.items():
            generator.write(states[name])


def _write_python(state: str) -> None:
    version, words, gauss = json.loads(state)
    random.setstate((version, tuple(words), gauss))


def _render_numpy(state: Any) -> str:
    return json.dumps(state, default=lambda array: array.tolist())  # arrays and numpy's numbers


def _write_numpy(state: str) -> None:
    # Asked for as it is now, because only it knows the dtypes of its arrays.
    live: Any = np.random.get_state(legacy=False)
    saved = json.loads(state)
    if saved["bit_generator"] != live["bit_generator"]:
        raise ValueError(f"numpy uses {live['bit_generator']}, saved was {saved['bit_generator']}")
    saved["state"] = {
        name: np.asarray(value, dtype=live["state"][name].dtype) if type(value) is list else value
        for name, value in saved["state"].items()
    }
    np.random.set_state(saved)


def _seed_numpy(seed: int) -> None:
    fresh = type(np.random.get_bit_generator())(seed)
    np.random.set_state({**fresh.state, "has_gauss": 0, "gauss": 0.0})


def _as_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class RankState(Stateful):
    """The random number generators of this rank, and further state that belongs to it alone."""

    def __init__(self, *, rank: int, world_size: int, layout: str, device: torch.device) -> None:
        """``layout`` says how the ranks divide the work; only equal ones are the same layout."""
        self._rank = rank
        self._world_size = world_size
        self._layout = self._saved_layout = layout
        self._generators = generators_of(device)
        self._registered: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] | None = None
        self._passed_over: list[str] = []

    def register(self, name: str, state: Stateful) -> None:
        """Save and restore ``state`` per rank; call it before the checkpoint is loaded.

        With another number of ranks or another layout it is given the states of all ranks if it is
        ``Resplittable``; otherwise it stays as it was built, and a line in the log says so.

        Raises:
            ValueError: the name is taken or no single word, or ``state`` cannot be saved.
        """
        taken = [*self._generators, *self._registered]
        if not name.isidentifier() or name in taken:
            raise ValueError(
                f"rank-local state was registered as {name!r}; the name must be a single word and "
                f"none of {sorted(taken)}. Choose another one."
            )
        if not isinstance(state, Stateful):
            raise ValueError(
                f"{name!r} is to be saved per rank, but {type(state).__name__} lacks state_dict or "
                "load_state_dict; add them."
            )
        self._registered[name] = state

    def state_dict(self) -> dict[str, Any]:
        """The generators and the registered states as they are now."""
        registered = {name: state.state_dict() for name, state in self._registered.items()}
        return self._put_together(self._seen(), registered)

    def state_dict_later(self) -> Callable[[], dict[str, Any]] | None:
        """What ``state_dict`` would give now, to be put together by another thread.

        None where something is registered, which is to be asked at once.
        """
        seen = self._seen()
        return None if self._registered else lambda: self._put_together(seen, {})

    def _seen(self) -> dict[str, Any]:
        return {name: source.look() for name, source in self._generators.items()}

    def _put_together(
        self, seen: Mapping[str, Any], registered: Mapping[str, Any]
    ) -> dict[str, Any]:
        own: dict[str, Any] = {
            name: self._generators[name].render(state) for name, state in seen.items()
        }
        return {
            _WORLD_SIZE: self._world_size,
            _LAYOUT: {self._layout: 1},
            _key(self._rank): {**own, **registered},
        }

    def load_template(self, saved: Outline) -> dict[str, Any]:
        """Places for what this rank restores or derives from; most of the other ranks' stays unread."""
        nested = {
            (str(entry.path[0]), str(entry.path[1]))
            for entry in saved.values()
            if len(entry.path) > 1
        }
        self._saved_layout = next(
            (name for owner, name in nested if owner == _LAYOUT), self._layout
        )
        ranks = {owner for owner, _ in nested if owner != _LAYOUT}
        names = {name for owner, name in nested if owner != _LAYOUT}
        self._passed_over = sorted(names - set(self._generators) - set(self._registered))
        is_same = (len(ranks), self._saved_layout) == (self._world_size, self._layout)

        def is_needed(path: tuple[str | int, ...]) -> bool:
            if len(path) == 1 or path[0] == _LAYOUT:
                return path[0] == _WORLD_SIZE
            rank, name = str(path[0]), str(path[1])
            is_own = rank == _key(self._rank) and is_same
            if name in self._generators:
                return rank == _key(0) or is_own
            state = self._registered.get(name)
            return state is not None and (
                is_own or (isinstance(state, Resplittable) and not is_same)
            )

        needed = {name: entry for name, entry in saved.items() if is_needed(entry.path)}
        # What may be divided anew gets tensors of its own: its object may write while it still reads.
        live = {
            name: state.state_dict()
            for name, state in self._registered.items()
            if not isinstance(state, Resplittable)
        }
        return template_of(needed, encode({_key(self._rank): live}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was loaded until ``restore_last``."""
        self._loaded = decode(state_dict)

    def restore_last(self, step: int) -> None:
        """Carry out what was loaded, if anything was, and say in one line what could not be.

        A collective over all ranks.
        """
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        leaders = self._leaders()
        saved_ranks = loaded.get(_WORLD_SIZE, 0)
        if not saved_ranks:
            self._say(
                "The checkpoint is older than the state of single ranks: the random number "
                "generators go on as this start has seeded them"
            )
            return
        is_same = (saved_ranks, self._saved_layout) == (self._world_size, self._layout)
        own = loaded.get(_key(self._rank), {}) if is_same else {}
        fresh = self._restore_registered(loaded, own, saved_ranks, is_same=is_same)
        origin = {name: loaded.get(_key(0), {}).get(name) for name in self._generators}
        seeded = []
        for name, generator in self._generators.items():
            if not _restored(generator, own.get(name)):
                generator.seed(_seed(name, origin, step, self._world_size, leaders[name]))
                seeded.append(name)
        if saved_ranks != self._world_size:
            reason = f"The checkpoint was saved on {saved_ranks} ranks and this run has {self._world_size}"
        elif not is_same:
            reason = f"The checkpoint was saved with {self._saved_layout} and this run has {self._layout}"
        else:
            reason = "Not everything that the checkpoint holds per rank could be restored"
        if seeded or fresh or self._passed_over:
            self._say(reason, seeded=seeded, fresh=fresh)

    def _leaders(self) -> dict[str, int]:
        """By generator: the lowest rank on which it is in the same state as here."""
        own = {name: _digest(item.read()) for name, item in self._generators.items()}
        everywhere = gather(own)
        return {
            name: next(rank for rank, other in enumerate(everywhere) if other.get(name) == digest)
            for name, digest in own.items()
        }

    def _restore_registered(
        self,
        loaded: Mapping[str, Any],
        own: Mapping[str, Any],
        saved_ranks: int,
        *,
        is_same: bool,
    ) -> list[str]:
        """Restore what can be; returns the names of what stays as it was built."""
        fresh = []
        for name, state in self._registered.items():
            everywhere = [loaded.get(_key(rank), {}) for rank in range(saved_ranks)]
            if name in own:
                state.load_state_dict(own[name])
            elif (
                not is_same
                and isinstance(state, Resplittable)
                and all(name in part for part in everywhere)
            ):
                state.load_state_dicts(
                    [part[name] for part in everywhere],
                    rank=self._rank,
                    world_size=self._world_size,
                )
            else:
                fresh.append(name)
        return sorted(fresh)

    def _say(self, reason: str, *, seeded: Sequence[str] = (), fresh: Sequence[str] = ()) -> None:
        # The registered states are the same on all ranks, so one of them speaks for all.
        if self._rank != 0:
            return
        parts = [
            f"random number generators seeded anew from it: {', '.join(seeded)}" if seeded else "",
            f"as this start has built it: {', '.join(fresh)}" if fresh else "",
            f"not taken over: {', '.join(self._passed_over)}" if self._passed_over else "",
        ]
        details = "; ".join(part for part in parts if part)
        logger.info(f"{reason}: {details}." if details else f"{reason}.")


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _restored(generator: RandomSource, state: Any) -> bool:
    if state is None:
        return False
    try:
        generator.write(state)
    except (RuntimeError, TypeError, ValueError, KeyError):
        return False  # of another version of Python, numpy or torch
    return True


def _digest(state: str | bytes) -> str:
    return hashlib.sha256(state if isinstance(state, bytes) else state.encode()).hexdigest()


def _seed(name: str, origin: Mapping[str, Any], step: int, world_size: int, leader: int) -> int:
    """Where a generator begins that was not saved; see the top of the file."""
    states = {key: _digest(state) for key, state in sorted(origin.items()) if state is not None}
    text = json.dumps([name, states, step, world_size, leader])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
