"""Llama 3 checkpoints under the names and in the row order of Hugging Face."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.llama3 import Llama3StateDictAdapter, model_registry
from torchtitan.models.llama3.model import Flavor

from tests.unit_tests.models.small import SMALL, small_config, SMALL_TIED

HF_BLOCK = [
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.down_proj.weight",
    "mlp.up_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]


def weights(flavor: Flavor = SMALL) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = small_config(flavor).build()
    model.init_states()
    return model.state_dict()


def adapter(flavor: Flavor = SMALL, path: str | None = None) -> Llama3StateDictAdapter:
    return Llama3StateDictAdapter(small_config(flavor), path)


def test_every_key_has_its_name_there() -> None:
    exported = adapter().to_hf(weights())
    blocks = [f"model.layers.{i}.{key}" for i in range(2) for key in HF_BLOCK]
    assert list(exported) == [
        "model.embed_tokens.weight",
        *blocks,
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("flavor", [SMALL, SMALL_TIED], ids=["untied", "tied"])
def test_a_round_trip_gives_the_same_weights(flavor: Flavor) -> None:
    native = weights(flavor)
    returned = adapter(flavor).from_hf(adapter(flavor).to_hf(native))
    assert returned.keys() == native.keys()
    for key, value in native.items():
        assert torch.equal(returned[key], value), key


def test_rows_of_a_head_go_even_first_then_odd() -> None:
    rows = torch.arange(16.0).unsqueeze(1).expand(16, 3)
    permuted = adapter()._permute(rows, 2)
    assert permuted[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(adapter()._reverse_permute(permuted, 2), rows)
    assert torch.equal(adapter()._permute(rows, 2, 16, 3), permuted)


def test_only_queries_and_keys_change_their_rows() -> None:
    native = weights()
    exported = adapter().to_hf(native)
    prefix, hf_prefix = "layers.1.attention.qkv_linear", "model.layers.1.self_attn"
    wq, wk = native[f"{prefix}.wq.weight"], native[f"{prefix}.wk.weight"]
    assert torch.equal(exported[f"{hf_prefix}.q_proj.weight"], adapter()._permute(wq, 4))
    assert torch.equal(exported[f"{hf_prefix}.k_proj.weight"], adapter()._permute(wk, 2))
    assert torch.equal(exported[f"{hf_prefix}.v_proj.weight"], native[f"{prefix}.wv.weight"])
    assert torch.equal(
        exported[f"{hf_prefix}.o_proj.weight"], native["layers.1.attention.wo.weight"]
    )


def test_permuted_rows_give_the_scores_of_the_other_rotary_embedding() -> None:
    """The reason for the permutation: neighbours become elements half a head apart."""
    native, head_dim = weights(), SMALL.dim // SMALL.n_heads
    exported = adapter().to_hf(native)
    x = torch.randn(6, SMALL.dim)

    def scores(kind, wq: torch.Tensor, wk: torch.Tensor) -> torch.Tensor:
        rope = kind.Config(dim=head_dim, max_context_length=6).build()
        q, k = ((x @ w.T).unflatten(1, (-1, head_dim)) for w in (wq, wk))
        q, k = rope(q, k, torch.arange(6))
        return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1))

    ours = [native[f"layers.0.attention.qkv_linear.{name}.weight"] for name in ("wq", "wk")]
    theirs = [exported[f"model.layers.0.self_attn.{name}_proj.weight"] for name in ("q", "k")]
    torch.testing.assert_close(scores(ComplexRoPE, *ours), scores(CosSinRoPE, *theirs))


def test_a_tied_model_writes_no_head_and_fills_it_on_reading() -> None:
    native = weights(SMALL_TIED)
    exported = adapter(SMALL_TIED).to_hf(native)
    assert "lm_head.weight" not in exported
    returned = adapter(SMALL_TIED).from_hf(exported)
    assert torch.equal(returned["lm_head.weight"], native["tok_embeddings.weight"])
    head = torch.ones(64, 32)
    kept = adapter(SMALL_TIED).from_hf({**exported, "lm_head.weight": head})
    assert kept["lm_head.weight"] is head
    assert "lm_head.weight" not in adapter().from_hf(exported)


def test_keys_without_a_counterpart() -> None:
    one = torch.ones(1)
    assert adapter().from_hf({"model.layers.0.self_attn.rotary_emb.inv_freq": one}) == {}
    assert adapter().to_hf({"layers.0.attention.something.weight": one}) == {}
    with pytest.raises(KeyError, match=r"model\.layers\.\{\}\.mlp\.other"):
        adapter().from_hf({"model.layers.0.mlp.other": one})
    with pytest.raises(KeyError, match="foreign"):
        adapter().to_hf({"foreign": one})


def test_a_model_with_other_pairs_is_refused() -> None:
    config = small_config()
    config.layers[1].attention.rope = CosSinRoPE.Config(dim=8, max_context_length=16)
    other = Llama3StateDictAdapter(config, None)
    for translate in (other.to_hf, other.from_hf):
        with pytest.raises(
            ValueError, match="ComplexRoPE.Config, but the model has CosSinRoPE.Config"
        ):
            translate({})


@pytest.mark.parametrize("flavor", [SMALL, SMALL_TIED], ids=["untied", "tied"])
def test_file_numbers_come_from_the_index(flavor: Flavor, tmp_path: Path) -> None:
    weight_map = {
        "model.norm.weight": "model-00003-of-00030.safetensors",
        "lm_head.weight": "model-00030-of-00030.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = {"model.norm.weight": 3, "lm_head.weight": 30}
    if flavor.tied:
        del expected["lm_head.weight"]
    assert adapter(flavor, str(tmp_path)).fqn_to_index_mapping == expected


def test_no_index_is_a_warning_and_no_folder_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert adapter(path=None).fqn_to_index_mapping is None
    assert not caplog.records
    assert adapter(path=str(tmp_path)).fqn_to_index_mapping is None
    assert str(tmp_path) in caplog.text


def test_quantized_files_are_read_as_they_are_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = adapter().get_hf_storage_reader(str(tmp_path))
    assert isinstance(reader, HuggingFaceStorageReader) and Path(reader.path) == tmp_path
    assert not caplog.records
    adapter().get_hf_storage_reader(str(tmp_path), from_quantized=True)
    assert "dequantize" in caplog.text


def test_the_debug_flavor_round_trips() -> None:
    spec = model_registry("debugmodel")
    model = spec.model.build()
    native = model.state_dict()
    assert spec.state_dict_adapter is not None
    translate = spec.state_dict_adapter(spec.model, None)
    returned = translate.from_hf(translate.to_hf(native))
    assert all(torch.equal(returned[key], value) for key, value in native.items())
