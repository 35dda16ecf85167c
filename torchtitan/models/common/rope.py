"""Rotary position embedding: turn pairs of query and key elements by an angle that grows with position.

Which elements form a pair is fixed by a model's checkpoints: neighbours (ComplexRoPE) or elements half
a head apart (CosSinRoPE). The angles are computed in float64 on the CPU and then moved, so the cache
holds the same bits on every device. All layers of a model share one cache.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Literal
from weakref import WeakValueDictionary

import torch

from torchtitan.config.violations import reject
from torchtitan.protocols import Module

# The cache of a 131072-token context takes 64 MiB at head_dim 128: once for a model, not once a layer.
_shared_caches: WeakValueDictionary[tuple, torch.Tensor] = WeakValueDictionary()


class RoPE(Module, ABC):
    """Base of both pairings; owns the non-persistent buffer ``cache``, one row for each position."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        """Elements of one head; even."""

        max_context_length: int
        """Positions that the cache covers, in tokens."""

        theta: float = 10000.0
        """Base of the wavelengths, which grow from 2 pi to about 2 pi theta tokens."""

        scaling: Literal["none", "llama", "yarn"] = "none"
        """How wavelengths are stretched for contexts longer than the pretrained ones."""

        scaling_factor: float = 8.0
        """llama: how much the longest wavelengths are stretched."""

        low_freq_factor: float = 1.0
        """llama: wavelengths above original_max_position_embeddings / this are stretched in full."""

        high_freq_factor: float = 4.0
        """llama: wavelengths below original_max_position_embeddings / this stay as they are."""

        original_max_position_embeddings: int = 8192
        """llama: context of the pretraining, in tokens."""

        rope_factor: float = 1.0
        """yarn: how much the longest wavelengths are stretched."""

        beta_fast: float = 32.0
        """yarn: pairs that turn more often than this within original_seq_len stay as they are."""

        beta_slow: float = 1.0
        """yarn: pairs that turn less often than this within original_seq_len are stretched in full."""

        original_seq_len: int = 4096
        """yarn: context of the pretraining, in tokens."""

        truncate: bool = True
        """yarn: whether the bounds between the two ranges are rounded outwards to whole pairs."""

        def __post_init__(self) -> None:
            if self.dim % 2:
                reject(f"rope.dim must be even to form pairs, got {self.dim}")
            if self.scaling not in ("none", "llama", "yarn"):
                reject(f"rope.scaling must be none, llama or yarn, got {self.scaling!r}")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cache", self._cache_on(torch.get_default_device()), persistent=False)

    def _init_self_buffers(self, *, buffer_device: torch.device | str | None = None) -> None:
        self.cache = self._cache_on(torch.device(buffer_device or self.cache.device))

    def _cache_on(self, device: torch.device) -> torch.Tensor:
        # param_init says nothing about angles, and a dict cannot be part of a key.
        names = [field.name for field in fields(self.config) if field.name != "param_init"]
        key = (type(self), device, *(getattr(self.config, name) for name in names))
        cache = _shared_caches.get(key)
        if cache is None:
            if device.type == "meta":
                return self._cache_of(torch.empty(self._angles_shape(), device=device))
            with torch.device("cpu"):
                cache = self._cache_of(self._angles())
            cache = cache.to(device)
            # Under a tensor mode, such as fake tensors, the value is of use to that mode alone.
            if type(cache) is torch.Tensor:
                _shared_caches[key] = cache
        return cache

    def _angles_shape(self) -> tuple[int, int]:
        return self.config.max_context_length, self.config.dim // 2

    def _angles(self) -> torch.Tensor:
        positions = torch.arange(self.config.max_context_length, dtype=torch.float64)
        return torch.outer(positions, inverse_frequencies(self.config))

    @staticmethod
    @abstractmethod
    def _cache_of(angles: torch.Tensor) -> torch.Tensor:
        """What ``forward`` looks up: one row for each row of ``angles``."""

    @staticmethod
    @abstractmethod
    def _rotate(x_THD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Turn every head of every token by the row of its position."""

    def forward(
        self, xq_THD: torch.Tensor, xk_THD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, turned; computed in float32 and returned in their own dtypes."""
        rows = self.cache[positions_T]
        return (
            self._rotate(xq_THD, rows).type_as(xq_THD),
            self._rotate(xk_THD, rows).type_as(xk_THD),
        )


class ComplexRoPE(RoPE):
    """Pairs are neighbours, taken as one complex number; the cache is complex64 (positions, dim / 2)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    @staticmethod
    def _cache_of(angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    @staticmethod
    def _rotate(x_THD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x_THD.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rows.unsqueeze(1)).flatten(-2)


class CosSinRoPE(RoPE):
    """Pairs are half a head apart; the cache is float32 (positions, dim): all cosines, all sines."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    @staticmethod
    def _cache_of(angles: torch.Tensor) -> torch.Tensor:
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.float32)

    @staticmethod
    def _rotate(x_THD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
        first, second = x_THD.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: RoPE.Config) -> torch.Tensor:
    """Radians per token of each pair, float64, fastest first."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim
    plain = config.theta**-exponents
    if config.scaling == "llama":
        turns = config.original_max_position_embeddings * plain / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
        return plain * (keep + (1 - keep) / config.scaling_factor)
    if config.scaling == "yarn":
        keep = _yarn_share_kept(config)
        return plain * (keep + (1 - keep) / config.rope_factor)
    return plain


def _yarn_share_kept(config: RoPE.Config) -> torch.Tensor:
    """For each pair, 1 where its wavelength stays, 0 where it is stretched, a ramp in between."""

    def pair_that_turns(times: float) -> float:
        wavelength = config.original_seq_len / (2 * math.pi * times)
        return config.dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    pairs = torch.arange(config.dim // 2, dtype=torch.float64)
    # 0.001 keeps the division defined where both bounds fall on one pair.
    return 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
