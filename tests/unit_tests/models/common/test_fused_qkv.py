"""The fused projection is the three projections: same weights, same outputs, same checkpoints."""

import copy
from functools import partial

import pytest
import torch
from torchtitan.models.common import FusedQKVLinear, Linear, QKVLinear
from torchtitan.models.common.config_utils import trunc_normal

from tests.unit_tests.models.small import small_config

N_HEADS, N_KV_HEADS, HEAD_DIM, DIM = 6, 2, 4, 10


def fused(n_heads: int = N_HEADS, n_kv_heads: int = N_KV_HEADS, bias: bool = False):
    init = trunc_normal(0.02) | {"bias": partial(torch.nn.init.normal_, std=0.5)}
    rows = (n_heads + 2 * n_kv_heads) * HEAD_DIM
    return FusedQKVLinear.Config(
        head_dim=HEAD_DIM,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        wqkv=Linear.Config(in_features=DIM, out_features=rows, bias=bias, param_init=init),
    ).build()


def unfused(n_heads: int = N_HEADS, n_kv_heads: int = N_KV_HEADS) -> QKVLinear:
    wq, wkv = (
        Linear.Config(in_features=DIM, out_features=heads * HEAD_DIM, param_init=trunc_normal(0.02))
        for heads in (n_heads, n_kv_heads)
    )
    return QKVLinear.Config(head_dim=HEAD_DIM, wq=wq, wkv=wkv).build()


def initialised(module, seed: int = 5):
    torch.manual_seed(seed)
    module.init_states()
    return module


def assert_same(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 2), (4, 4), (4, 1)])
def test_fusing_changes_neither_weights_nor_outputs(n_heads: int, n_kv_heads: int) -> None:
    one, three = initialised(fused(n_heads, n_kv_heads)), initialised(unfused(n_heads, n_kv_heads))
    assert_same(one.state_dict(), three.state_dict())
    x = torch.randn(7, DIM)
    for found, expected in zip(one(x), three(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


def test_a_fused_model_computes_what_the_unfused_one_does() -> None:
    one = initialised(small_config(fuse_qkv=True).build())
    three = initialised(small_config(fuse_qkv=False).build())
    assert_same(one.state_dict(), three.state_dict())
    tokens = torch.arange(16)
    torch.testing.assert_close(one(tokens), three(tokens))


def test_rows_go_by_key_value_head() -> None:
    module = fused()
    with torch.no_grad():
        rows = torch.arange(module.wqkv.weight.shape[0]).float()
        module.wqkv.weight.copy_(rows.unsqueeze(1).expand_as(module.wqkv.weight))
    state = module.state_dict()
    starts = {name: state[f"{name}.weight"][::HEAD_DIM, 0].tolist() for name in ("wq", "wk", "wv")}
    # Heads of 4 rows in the order q0 q1 q2 k0 v0 q3 q4 q5 k1 v1.
    assert starts == {"wq": [0, 4, 8, 20, 24, 28], "wk": [12, 32], "wv": [16, 36]}


def test_state_dict_round_trips_with_a_bias() -> None:
    source, target = initialised(fused(bias=True)), initialised(fused(bias=True), seed=6)
    assert list(source.state_dict()) == [
        f"{projection}.{kind}" for kind in ("weight", "bias") for projection in ("wq", "wk", "wv")
    ]
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.wqkv.weight, source.wqkv.weight)
    assert torch.equal(target.wqkv.bias, source.wqkv.bias)


def test_checkpoints_of_fused_and_unfused_models_are_exchangeable() -> None:
    one, three = initialised(fused()), initialised(unfused(), seed=6)
    expected = {key: value.clone() for key, value in three.state_dict().items()}
    one.load_state_dict(three.state_dict())
    assert_same(one.state_dict(), expected)
    three.load_state_dict(initialised(fused(), seed=7).state_dict())
    assert_same(three.state_dict(), initialised(unfused(), seed=7).state_dict())


def test_loading_does_not_change_the_given_dict() -> None:
    state = initialised(fused()).state_dict()
    keys = list(state)
    fused().load_state_dict(state)
    assert list(state) == keys


def test_a_dict_with_the_fused_weight_loads_as_it_is() -> None:
    source, target = initialised(fused()), fused()
    target.load_state_dict({"wqkv.weight": source.wqkv.weight.detach()})
    assert torch.equal(target.wqkv.weight, source.wqkv.weight)


def test_a_lone_projection_is_reported_not_guessed() -> None:
    state = initialised(fused()).state_dict()
    del state["wv.weight"]
    with pytest.raises(RuntimeError, match="Missing.*wqkv.weight") as error:
        fused().load_state_dict(state)
    assert '"wq.weight", "wk.weight"' in str(error.value)
    result = fused().load_state_dict(state, strict=False)
    assert result.missing_keys == ["wqkv.weight"]


def test_projections_of_another_size_are_all_named() -> None:
    module = initialised(fused())
    before = module.wqkv.weight.clone()
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(unfused(4, 4).state_dict())
    message = str(error.value)
    assert "wq.weight: the checkpoint has (16, 10), the model (24, 10)" in message
    assert "wk.weight: the checkpoint has (16, 10), the model (8, 10)" in message
    assert "Missing" not in message and "Unexpected" not in message
    assert torch.equal(module.wqkv.weight, before)


def test_a_copied_module_splits_and_fuses_its_own_weights() -> None:
    source = initialised(fused())
    copied = copy.deepcopy(source)
    with torch.no_grad():
        copied.wqkv.weight.zero_()
    assert copied.state_dict()["wq.weight"].abs().sum() == 0
    assert source.state_dict()["wq.weight"].abs().sum() > 0


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="n_heads to be a multiple of n_kv_heads, got 6 and 4"):
        fused(6, 4)


def test_the_configs_own_init_stays_that_of_one_projection() -> None:
    init = trunc_normal(0.02)
    config = small_config().layers[0].attention.qkv_linear
    assert isinstance(config, FusedQKVLinear.Config)
    config.wqkv.param_init = init
    config.build()
    assert config.wqkv.param_init is init
