"""The decoder: packed rows, tied weights, and how its Config meets the job's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common import compute_ffn_hidden_dim, RMSNorm
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.model import Flavor

from tests.unit_tests.models.small import config_of, ROW_LENGTH, SMALL, small_config, SMALL_TIED


def built(config: Llama3Model.Config | None = None) -> Llama3Model:
    model = (config or small_config()).build()
    torch.manual_seed(0)
    model.init_states()
    return model


def job(**degrees: Any) -> SimpleNamespace:
    return SimpleNamespace(parallelism=ParallelismConfig(**degrees))


def test_packed_documents_compute_what_each_does_alone() -> None:
    model = built()
    lengths = (10, 6, 1, 15, 16)
    documents = [torch.randint(0, 64, (length,)) for length in lengths]
    tokens = torch.cat(documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = model(tokens, positions)
    assert packed.shape == (3 * ROW_LENGTH, 64)
    alone = torch.cat([model(document) for document in documents])
    torch.testing.assert_close(packed, alone)
    shared = model(tokens, positions, model.get_attention_masks(positions))
    assert torch.equal(packed, shared)


def test_a_token_sees_no_later_one_and_no_other_document() -> None:
    model = built()
    positions = torch.cat([torch.arange(6), torch.arange(10)])
    tokens = torch.arange(16)
    changed = tokens.clone()
    changed[9] = 63
    same = (model(tokens, positions) == model(changed, positions)).all(1)
    assert same.tolist() == [index < 9 for index in range(16)]


def test_more_tokens_than_the_context_need_positions() -> None:
    model = built()
    tokens = torch.zeros(ROW_LENGTH + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="17 tokens without positions.*16.*Pass positions"):
        model(tokens)
    model(tokens[:ROW_LENGTH])


def test_hidden_states_come_out_when_the_head_is_skipped() -> None:
    model = built()
    tokens = torch.arange(8)
    logits = model(tokens)
    model._skip_lm_head = True
    hidden = model(tokens)
    assert hidden.shape == (8, 32)
    assert torch.equal(model.lm_head(hidden), logits)


def test_tied_weights_are_one_parameter_through_the_whole_life() -> None:
    with torch.device("meta"):
        model = small_config(SMALL_TIED).build()
    assert model.tok_embeddings.weight is model.lm_head.weight
    model.to_empty(device="cpu")
    model.init_states()
    assert model.tok_embeddings.weight is model.lm_head.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tok_embeddings.weight" in names and "lm_head.weight" not in names
    state = model.state_dict()
    assert state["tok_embeddings.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    # Logits of a fresh model stay small: lm_head's init fills the shared weight.
    assert model.lm_head.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_untied_weights_are_two_parameters() -> None:
    model = built()
    assert model.tok_embeddings.weight is not model.lm_head.weight
    assert model.tok_embeddings.weight.std().item() == pytest.approx(1, rel=0.1)


def test_tied_weights_cannot_live_on_two_stages() -> None:
    with pytest.raises(NotImplementedError, match="pipeline_parallel_degree"):
        small_config(SMALL_TIED).update_from_config(config=job(pipeline_parallel_degree=2))
    small_config().update_from_config(config=job(pipeline_parallel_degree=2))
    small_config(SMALL_TIED).update_from_config(config=SimpleNamespace(parallelism=object()))


def test_tensor_degree_must_divide_the_heads() -> None:
    small_config().update_from_config(config=job(tensor_parallel_degree=2))
    with pytest.raises(ValueError, match=r"\(4\) must divide n_kv_heads \(2\)"):
        small_config().update_from_config(config=job(tensor_parallel_degree=4))
    with pytest.raises(ValueError, match=r"\(3\) must divide n_heads \(4\) and n_kv_heads \(2\)"):
        small_config().update_from_config(config=job(tensor_parallel_degree=3))


@pytest.mark.parametrize(
    "flavor",
    [replace(SMALL, n_kv_heads=4, vocab_size=9), replace(SMALL, n_kv_heads=4, ffn_dim=9)],
)
def test_tensor_degree_must_leave_something_for_every_rank(flavor: Flavor) -> None:
    small_config(flavor).update_from_config(config=job(tensor_parallel_degree=2))
    # Four ranks take 3 each, and the last one nothing.
    with pytest.raises(ValueError, match=r"degree \(4\) leaves some ranks no part of .* \(9\)"):
        small_config(flavor).update_from_config(config=job(tensor_parallel_degree=4))


def test_sequence_parallelism_splits_the_tokens_evenly() -> None:
    training = TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=3 * 5, max_context_length=ROW_LENGTH - 1
    )
    for degree, is_on, fits in ((2, True, False), (2, False, True), (1, True, True)):
        parallelism = ParallelismConfig(
            tensor_parallel_degree=degree, enable_sequence_parallel=is_on
        )
        config = SimpleNamespace(parallelism=parallelism, training=training)
        if fits:
            small_config().update_from_config(config=config)
            continue
        with pytest.raises(ValueError, match="15 tokens of a microbatch over 2"):
            small_config().update_from_config(config=config)


def test_context_parallelism_needs_flex() -> None:
    config = config_of("debugmodel", "varlen")
    with pytest.raises(ValueError, match="needs the flex attention back end.*varlen"):
        config.update_from_config(config=job(context_parallel_degree=2))
    assert config.first_full_attention_backend == "varlen"


def test_rope_caches_are_cut_to_the_jobs_context() -> None:
    config = config_of("debugmodel")
    training = TrainingConfig(max_context_length=64)
    config.update_from_config(
        config=SimpleNamespace(parallelism=ParallelismConfig(), training=training)
    )
    assert config.max_context_length == 64
    assert {
        tuple(block.attention.rope.cache.shape) for block in config.build().layers.values()
    } == {(64, 8)}


def test_a_longer_context_than_the_models_is_refused() -> None:
    training = TrainingConfig(max_context_length=ROW_LENGTH + 1)
    with pytest.raises(ValueError, match="is 17 tokens.*at most 16"):
        small_config().update_from_config(
            config=SimpleNamespace(parallelism=ParallelismConfig(), training=training)
        )


def test_a_decoder_without_layers_is_refused() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="at least one layer"):
        Llama3Model.Config(
            dim=32,
            vocab_size=64,
            tok_embeddings=config.tok_embeddings,
            layers=[],
            norm=config.norm,
            lm_head=config.lm_head,
        )


def test_query_and_key_norms_are_applied_where_they_are_asked_for() -> None:
    config = small_config()
    for layer in config.layers:
        layer.attention.q_norm = RMSNorm.Config(normalized_shape=8)
        layer.attention.k_norm = RMSNorm.Config(normalized_shape=8)
    model = built(config)
    assert "layers.0.attention.q_norm.weight" in model.state_dict()
    tokens = torch.arange(8)
    before = model(tokens)
    with torch.no_grad():
        model.get_parameter("layers.0.attention.q_norm.weight").mul_(2)
    assert not torch.equal(model(tokens), before)


def test_ffn_width_of_published_models() -> None:
    assert compute_ffn_hidden_dim(256, multiple_of=256) == 768
    assert compute_ffn_hidden_dim(4096, multiple_of=1024, ffn_dim_multiplier=1.3) == 14336
    assert compute_ffn_hidden_dim(16384, multiple_of=4096, ffn_dim_multiplier=1.2) == 53248
    assert compute_ffn_hidden_dim(256) == 682


def test_vocabulary_is_read_from_the_spec() -> None:
    assert decoder_vocab_size(model_registry("8B")) == 128256
