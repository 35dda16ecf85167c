"""What a back end's name means here, and that the fallback computes attention."""

import logging
from typing import Any

import pytest
import torch
from torchtitan.models.common import attention_kernels
from torchtitan.models.common.attention import (
    BaseAttention,
    build_attention_mask,
    FlexAttention,
    VarlenAttention,
)
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.masks import DenseMask
from torchtitan.models.common.rope import ComplexRoPE

CPU = torch.device("cpu")
DOCUMENTS = (5, 3, 8, 1, 15)  # two rows of 16 tokens


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    num_tokens = sum(DOCUMENTS)
    return [
        torch.randn(num_tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax of one document's one query head at a time."""
    outputs = []
    for q_doc, k_doc, v_doc in zip(*(x.split(DOCUMENTS) for x in (q, k, v)), strict=True):
        heads = []
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            scores = q_doc[:, head] @ k_doc[:, shared].T / q.shape[2] ** 0.5
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            heads.append(weights @ v_doc[:, shared])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", ["flex", "flex_flash", "varlen"])
@pytest.mark.parametrize("row_length", [16, 1000], ids=["rows", "one block"])
def test_the_fallback_gives_outputs_and_gradients_of_plain_attention(
    backend: str, row_length: int, qkv: list[torch.Tensor]
) -> None:
    config = get_attention_config(backend)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])
    mask = build_attention_mask(config, positions, row_length)
    assert isinstance(mask, DenseMask)
    out = config.build()(*qkv, mask)
    expected = naive_attention(*qkv)
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad(out, qkv, grad_out),
        torch.autograd.grad(expected, qkv, grad_out),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_the_fallback_is_said_in_one_line_a_process(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    attention_kernels.choose.cache_clear()
    config = get_attention_config(backend)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            build_attention_mask(config, torch.arange(16), 16)
    lines = [record.getMessage() for record in caplog.records if "back end" in record.getMessage()]
    assert len(lines) == 1
    assert backend in lines[0] and "cpu" in lines[0] and "scaled_dot_product" in lines[0]


@pytest.mark.parametrize(
    ("capability", "packages", "expected"),
    [
        ((7, 0), {"triton"}, {"flex": "flex", "flex_flash": "flex", "varlen": "dense"}),
        ((8, 0), {"triton"}, {"flex": "flex", "flex_flash": "flex", "varlen": "varlen"}),
        ((9, 0), set(), {"flex": "dense", "flex_flash": "dense", "varlen": "varlen"}),
        ((9, 0), {"triton"}, {"flex": "flex", "flex_flash": "flex", "varlen": "varlen"}),
        (
            (9, 0),
            {"triton", "flash_attn.cute"},
            {"flex": "flex", "flex_flash": "flex_flash", "varlen": "varlen"},
        ),
    ],
)
def test_a_gpu_runs_what_its_capability_and_packages_allow(
    capability: tuple[int, int],
    packages: set[str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There is no GPU here to ask.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention_kernels, "_has", packages.__contains__)
    choose = attention_kernels.choose.__wrapped__
    assert {name: choose(name, torch.device("cuda", 0)) for name in expected} == expected


def test_sdpa_is_refused_for_language_models() -> None:
    with pytest.raises(ValueError, match="sdpa.*flex, flex_flash or varlen"):
        get_attention_config("sdpa")


def test_an_unknown_back_end_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'flux'.*flex, flex_flash or varlen"):
        get_attention_config("flux")


def test_an_inner_attention_without_document_mask_is_a_type_error() -> None:
    other: Any = ComplexRoPE.Config(dim=8, max_context_length=4)
    with pytest.raises(TypeError, match="no document mask for ComplexRoPE.Config"):
        build_attention_mask(other, torch.arange(4), 4)


def test_a_block_mask_can_be_made_without_a_built_model() -> None:
    decoder = Decoder.__new__(Decoder)
    config = BaseAttention.Config(n_heads=2, inner_attention=FlexAttention.Config())
    mask = decoder._create_flex_attention_mask_for_document(torch.arange(256), config)
    assert mask.shape == (1, 1, 256, 256)
    config = BaseAttention.Config(n_heads=2, inner_attention=VarlenAttention.Config())
    with pytest.raises(TypeError, match="VarlenAttention"):
        decoder._create_flex_attention_mask_for_document(torch.arange(256), config)


def test_varlen_refuses_a_dtype_that_its_kernel_does_not_have(qkv: list[torch.Tensor]) -> None:
    metadata = attention_kernels.VarlenMetadata(torch.tensor([0, 32], dtype=torch.int32), 32)
    with pytest.raises(ValueError, match="float64.*mixed_precision_param"):
        VarlenAttention.Config().build()(*qkv, metadata)
