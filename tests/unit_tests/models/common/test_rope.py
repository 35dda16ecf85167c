"""Rotary embedding: relative by construction, scaled as the settings say, one cache for all layers."""

import math
from typing import Any

import pytest
import torch
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.common.rope import inverse_frequencies

KINDS = [ComplexRoPE, CosSinRoPE]


def rope(kind: type[RoPE] = ComplexRoPE, **settings: Any) -> RoPE:
    settings = {"dim": 8, "max_context_length": 32, **settings}
    return kind.Config(**settings).build()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_the_distance_alone(kind) -> None:
    module = rope(kind)
    q, k = torch.randn(2, 1, 1, 8).expand(2, 20, 1, 8)
    q, k = module(q, k, torch.arange(20))
    scores = q[:, 0] @ k[:, 0].T
    for distance in range(3):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))


@pytest.mark.parametrize(
    ("kind", "partner"), [(ComplexRoPE, 3), (CosSinRoPE, 6)], ids=["neighbours", "half a head"]
)
def test_an_element_turns_towards_its_partner(kind, partner: int) -> None:
    x = torch.zeros(1, 1, 8)
    x[..., 2] = 1
    angle = 5 * 100.0 ** (-(1 if kind is ComplexRoPE else 2) * 2 / 8)
    turned, _ = rope(kind, theta=100.0)(x, x, torch.tensor([5]))
    expected = torch.zeros(8)
    expected[2], expected[partner] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(turned.flatten(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_and_dtypes_are_kept(kind) -> None:
    q, k = torch.randn(9, 4, 8, dtype=torch.bfloat16), torch.randn(9, 2, 8)
    turned_q, turned_k = rope(kind)(q, k, torch.arange(9))
    assert turned_q.dtype == torch.bfloat16 and turned_k.dtype == torch.float32
    assert turned_q.shape == q.shape and turned_k.shape == k.shape
    torch.testing.assert_close(turned_k.norm(dim=-1), k.norm(dim=-1))


def test_llama_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(rope(dim=64, theta=5e5).config)
    scaled = inverse_frequencies(rope(dim=64, theta=5e5, scaling="llama").config)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    between = ~(short | long)
    assert short.any() and long.any() and between.any()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(truncate: bool) -> None:
    settings = {"dim": 64, "scaling": "yarn", "rope_factor": 40.0, "truncate": truncate}
    plain = inverse_frequencies(rope(dim=64).config)
    scaled = inverse_frequencies(rope(**settings).config)
    turns = 4096 * plain / (2 * math.pi)
    ratio = plain / scaled
    # Rounding outwards to whole pairs may move each bound by one pair.
    assert (ratio[turns > 32 * 1.4] == 1).all()
    torch.testing.assert_close(
        ratio[turns < 1 / 1.4], torch.full_like(ratio[turns < 1 / 1.4], 40.0)
    )
    assert (ratio.diff() > -1e-9).all()


def test_layers_share_one_cache_that_no_checkpoint_holds() -> None:
    first, second, other = rope(), rope(), rope(max_context_length=33)
    assert first.cache.data_ptr() == second.cache.data_ptr() != other.cache.data_ptr()
    assert first.cache.dtype == torch.complex64 and first.cache.shape == (32, 4)
    assert not first.state_dict()
    assert rope(CosSinRoPE).cache.dtype == torch.float32


def test_init_states_computes_what_to_empty_left_undefined() -> None:
    expected = rope().cache.clone()
    with torch.device("meta"):
        module = rope()
    assert module.cache.is_meta
    module.to_empty(device="cpu")
    module.cache.zero_()
    module.init_states()
    assert torch.equal(module.cache, expected)
    with torch.device("meta"):
        module = rope()
        module.init_states(buffer_device="cpu")
    assert torch.equal(module.cache, expected)


def test_angles_stay_exact_far_from_the_start() -> None:
    cache = rope(max_context_length=131072).cache
    # The fastest pair turns by one radian a token; float32 angles would be off by 0.004 here.
    assert abs(cache[131071, 0].imag.item() - math.sin(131071)) < 1e-6


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(ValueError, match="rope.dim must be even to form pairs, got 7"):
        rope(dim=7)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="none, llama or yarn, got 'ntk'"):
        rope(scaling="ntk")
