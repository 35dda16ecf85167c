"""Llama 3's public facts: names and shapes in checkpoints, sizes, initial weights."""

from dataclasses import dataclass

import pytest
import torch
import torchtitan.models
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.config import Configurable
from torchtitan.models.common import FlexAttention, GQAttention, Linear, VarlenAttention
from torchtitan.models.llama3 import (
    llama3_configs,
    Llama3Model,
    Llama3StateDictAdapter,
    model_registry,
    parallelize_llama,
)
from torchtitan.protocols.model import ModelConfigConverter

from tests.unit_tests.models.small import config_of

PARAMETERS = {
    "debugmodel": 6_163_712,
    "jargon": 4_196_608,
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
# dim, layers, heads, vocabulary, tied
SIZES = {
    "debugmodel": (256, 6, 16, 2048, False),
    "jargon": (256, 4, 8, 2048, False),
    "1B": (2048, 16, 32, 128256, True),
    "3B": (3072, 28, 24, 128256, True),
    "8B": (4096, 32, 32, 128256, False),
    "70B": (8192, 80, 64, 128256, False),
    "405B": (16384, 126, 128, 128256, False),
}
BLOCK = {
    "attention.qkv_linear.wq.weight": (256, 256),
    "attention.qkv_linear.wk.weight": (256, 256),
    "attention.qkv_linear.wv.weight": (256, 256),
    "attention.wo.weight": (256, 256),
    "feed_forward.w1.weight": (768, 256),
    "feed_forward.w2.weight": (256, 768),
    "feed_forward.w3.weight": (768, 256),
    "attention_norm.weight": (256,),
    "ffn_norm.weight": (256,),
}


@pytest.fixture(scope="module")
def model() -> Llama3Model:
    config = llama3_configs["debugmodel"](attn_backend="flex")
    torch.manual_seed(0)
    model = Llama3Model(config)
    model.init_states()
    return model


def checkpoint_shapes() -> dict[str, tuple[int, ...]]:
    blocks = {f"layers.{i}.{key}": shape for i in range(6) for key, shape in BLOCK.items()}
    return {
        "tok_embeddings.weight": (2048, 256),
        **blocks,
        "norm.weight": (256,),
        "lm_head.weight": (2048, 256),
    }


def test_checkpoint_keys_come_in_order_with_their_shapes(model: Llama3Model) -> None:
    found = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert list(found.items()) == list(checkpoint_shapes().items())


def test_optimizer_sees_the_fused_weight(model: Llama3Model) -> None:
    keys = [key for key in checkpoint_shapes() if ".wk." not in key and ".wv." not in key]
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert list(shapes) == [key.replace(".wq.", ".wqkv.") for key in keys]
    assert shapes["layers.5.attention.qkv_linear.wqkv.weight"] == (768, 256)


def test_wrapping_the_blocks_leaves_the_checkpoint_keys_alone() -> None:
    model = Llama3Model(llama3_configs["jargon"]())
    keys = list(model.state_dict())
    layers = model.get_submodule("layers")
    for name, block in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(block))
    assert list(model.state_dict()) == keys
    model.init_states()
    saved = {key: value + 1 for key, value in model.state_dict().items()}
    model.load_state_dict(saved)
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key


@pytest.mark.parametrize("flavor", llama3_configs)
def test_sizes_are_those_of_the_published_models(flavor: str) -> None:
    config = config_of(flavor)
    with torch.device("meta"):
        model = config.build()
    dim, layers, heads, vocab, tied = SIZES[flavor]
    num_params, flops = config.get_nparams_and_flops(model, 4096)
    assert num_params == PARAMETERS[flavor]
    multiplied = num_params - (0 if tied else vocab * dim)
    assert flops == 6 * multiplied + 6 * layers * heads * 2 * (dim // heads) * 4096
    assert config.max_context_length == 131072
    assert config.enable_weight_tying is tied


def test_initial_weights_have_the_scales_of_the_recipe(model: Llama3Model) -> None:
    def std(fqn: str) -> float:
        return model.get_parameter(fqn).std().item()

    assert std("tok_embeddings.weight") == pytest.approx(1, rel=0.02)
    for depth in (0, 5):
        outward = 0.02 / (2 * (depth + 1)) ** 0.5
        block = f"layers.{depth}"
        assert std(f"{block}.attention.qkv_linear.wqkv.weight") == pytest.approx(0.02, rel=0.02)
        assert std(f"{block}.feed_forward.w1.weight") == pytest.approx(0.02, rel=0.02)
        for name in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
            assert std(f"{block}.{name}.weight") == pytest.approx(outward, rel=0.02)
        assert (model.get_parameter(f"{block}.ffn_norm.weight") == 1).all()
    head = model.get_parameter("lm_head.weight")
    # A normal distribution cut at 3 of its deviations has 0.987 of its spread.
    assert head.std().item() == pytest.approx(0.987 / 16, rel=0.02)
    assert head.abs().max().item() <= 3 / 16 < head.abs().max().item() * 1.05


def test_registry_gives_a_fresh_spec_each_time() -> None:
    spec = model_registry("debugmodel")
    assert (spec.name, spec.flavor) == ("llama3", "debugmodel")
    assert spec.parallelize_fn is parallelize_llama
    assert spec.state_dict_adapter is Llama3StateDictAdapter
    assert spec.pipelining_fn is None and spec.post_optimizer_build_fn is None
    assert isinstance(spec.model, Llama3Model.Config)
    spec.model.layers[0].attention.rope.max_context_length = 1
    assert config_of("debugmodel").max_context_length == 131072
    assert "llama3" in torchtitan.models._supported_models


def test_an_unknown_flavor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as error:
        model_registry("7B")
    assert "'7B'" in str(error.value)
    assert all(flavor in str(error.value) for flavor in llama3_configs)


def test_back_ends_keep_their_names() -> None:
    def inner(backend: str) -> Configurable.Config:
        return config_of("debugmodel", backend).first_attention.inner_attention

    assert inner("flex") == FlexAttention.Config()
    assert inner("flex_flash") == FlexAttention.Config(backend="flex_flash")
    assert inner("varlen") == VarlenAttention.Config()
    with pytest.raises(ValueError, match="sdpa"):
        inner("sdpa")


class AddBias(ModelConfigConverter):
    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        pass

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Configurable.Config) -> None:
        for _, linear, _, _ in model_config.traverse(Linear.Config):
            linear.bias = True


def test_converters_change_the_config_before_the_model_is_built() -> None:
    spec = model_registry("debugmodel", converters=[AddBias.Config()])
    assert isinstance(spec.model, Llama3Model.Config)
    assert spec.model.lm_head.bias and spec.model.layers[0].attention.wo.bias


def test_the_spec_leads_to_every_config_of_the_model() -> None:
    spec = model_registry("jargon")
    found = list(spec.traverse(GQAttention.Config))
    assert [fqn for fqn, *_ in found] == [f"model.layers.{i}.attention" for i in range(4)]
    assert isinstance(spec.model, Llama3Model.Config)
    assert found[2][2] is spec.model.layers[2] and found[2][3] == "attention"
    (fqn, config, parent, field), *_ = spec.traverse(Llama3Model.Config, _prefix="model_spec")
    assert (fqn, config, parent, field) == ("model_spec.model", spec.model, spec, "model")
