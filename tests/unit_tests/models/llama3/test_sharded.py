"""What must not change when a model is cut into shards: its weights, its outputs, its checkpoints."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, parallelize_llama
from torchtitan.models.llama3.model import Flavor
from torchtitan.protocols import Module

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.models.small import SMALL, small_config, SMALL_TIED, UNEVEN

pytestmark = pytest.mark.ranks

FLAVORS = {"even": SMALL, "tied": SMALL_TIED, "uneven": UNEVEN}


def _whole(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def _sharded(flavor: Flavor, world_size: int) -> Llama3Model:
    """As the trainer makes it: on meta, sharded, given memory, filled from a fixed seed."""
    with torch.device("meta"):
        model = small_config(flavor).build()
    parallelize_llama(
        model,
        parallel_dims=ParallelDims(
            dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, world_size=world_size
        ),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    wrapped = [name for name, _ in model.named_modules() if name.endswith("_wrapped_module")]
    assert wrapped == [f"layers.{i}._checkpoint_wrapped_module" for i in range(flavor.n_layers)]
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    return model


def _whole_weights(flavors: dict[str, Flavor], world_size: int) -> dict[str, dict]:
    """By flavor and key."""
    found = {}
    for name, flavor in flavors.items():
        model = _sharded(flavor, world_size)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        found[name] = {key: _whole(value) for key, value in model.state_dict().items()}
    return found


def _plain(flavor: Flavor, seed: int = 7) -> Llama3Model:
    model = small_config(flavor).build()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)


# One start of ranks for several cases: it costs more than all of them.
@pytest.mark.parametrize("world_size", [1, 2])
def test_initial_weights_do_not_depend_on_the_layout(world_size: int) -> None:
    expected = {name: dict(_plain(flavor).state_dict()) for name, flavor in FLAVORS.items()}
    for found in run_on_ranks(world_size, _whole_weights, FLAVORS, world_size):
        for name in FLAVORS:
            _assert_same(found[name], expected[name])


def _load_and_report(flavor: Flavor, weights: dict[str, torch.Tensor], as_dtensor: bool) -> dict:
    model = _sharded(flavor, 2)
    saved = model.state_dict()
    for key, value in saved.items():
        is_qkv = ".qkv_linear." in key
        assert isinstance(value, DTensor), key
        assert not is_qkv or value.placements == (Replicate(),), key
        whole = weights[key]
        if is_qkv and not as_dtensor:
            saved[key] = whole
        else:
            # Into the state dict's own tensors, as torch.distributed.checkpoint does it.
            mesh, placements = value.device_mesh, value.placements
            value.copy_(
                DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=placements)
            )
    result = model.load_state_dict(saved)
    assert not result.missing_keys and not result.unexpected_keys
    return {key: _whole(value) for key, value in model.state_dict().items()}


def _load_both_ways(weights: dict[str, dict[str, torch.Tensor]]) -> list[tuple[str, dict]]:
    return [
        (name, _load_and_report(FLAVORS[name], whole, as_dtensor))
        for name, whole in weights.items()
        for as_dtensor in (True, False)
    ]


def test_a_checkpoint_lands_in_the_shards_of_the_fused_matrix() -> None:
    names = ("even", "uneven")
    weights = {name: dict(_plain(FLAVORS[name], seed=8).state_dict()) for name in names}
    for reports in run_on_ranks(2, _load_both_ways, weights):
        assert [name for name, _ in reports] == ["even", "even", "uneven", "uneven"]
        for name, found in reports:
            _assert_same(found, weights[name])


def _hf_round_trip(flavor: Flavor) -> dict[str, dict[str, torch.Tensor]]:
    model = _sharded(flavor, 2)
    adapter = Llama3StateDictAdapter(model.config, None)
    native = dict(model.state_dict())
    # As unfused projections would be: shards that need not end where heads do.
    for key, value in native.items():
        if ".qkv_linear." in key:
            native[key] = value.redistribute(placements=model.norm.weight.placements)
    exported = adapter.to_hf(native)
    returned = adapter.from_hf(exported)
    assert all(returned[key].placements == native[key].placements for key in native)
    return {
        "exported": {key: _whole(value) for key, value in exported.items()},
        "returned": {key: _whole(value) for key, value in returned.items()},
    }


def test_sharded_weights_are_exported_like_whole_ones() -> None:
    native = dict(_plain(UNEVEN).state_dict())
    expected = Llama3StateDictAdapter(small_config(UNEVEN), None).to_hf(native)
    for found in run_on_ranks(2, _hf_round_trip, UNEVEN):
        _assert_same(found["exported"], expected)
        _assert_same(found["returned"], native)


def _step_of_loss(flavor: Flavor, tokens: torch.Tensor, positions: torch.Tensor) -> dict:
    rank = torch.distributed.get_rank()
    model = _sharded(flavor, 2)
    half = tokens.numel() // 2
    mine = slice(rank * half, (rank + 1) * half)
    logits = model(tokens[mine], positions[mine])
    logits.square().sum().backward()
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): _whole(param.grad)
        for name, param in model.named_parameters()
    }
    return {"logits": logits.detach(), "grads": grads}


def _steps_of_loss(names: tuple[str, ...], *batch: torch.Tensor) -> dict[str, dict]:
    return {name: _step_of_loss(FLAVORS[name], *batch) for name in names}


def test_two_ranks_compute_the_outputs_and_summed_gradients_of_one() -> None:
    names = ("even", "tied")
    tokens = torch.randint(0, 63, (64,), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([*range(10), *range(6), *range(16)] * 2)
    found = run_on_ranks(2, _steps_of_loss, names, tokens, positions)
    for name in names:
        plain = _plain(FLAVORS[name])
        logits = plain(tokens, positions)
        logits.square().sum().backward()
        of_ranks = torch.cat([each[name]["logits"] for each in found])
        torch.testing.assert_close(of_ranks, logits.detach())
        for fqn, param in plain.named_parameters():
            grad = found[0][name]["grads"][fqn]
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-4, msg=fqn)


class ResetOnly(torch.nn.Linear, Module):
    """Nothing but reset_parameters says how to fill it."""


def _reset_on_shards() -> torch.Tensor:
    module = ResetOnly(6, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(3)
    module.init_states()
    return torch.cat([_whole(module.weight), _whole(module.bias).unsqueeze(1)], dim=1)


def test_reset_parameters_draws_the_same_weights_on_shards() -> None:
    plain = torch.nn.Linear(6, 5)
    torch.manual_seed(3)
    plain.reset_parameters()
    expected = torch.cat([plain.weight, plain.bias.unsqueeze(1)], dim=1).detach()
    for found in run_on_ranks(2, _reset_on_shards):
        assert torch.equal(found, expected)


def test_without_activation_checkpointing_blocks_stay_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = []
    monkeypatch.setattr(
        "torchtitan.models.llama3.parallelize.apply_fsdp_to_decoder",
        lambda model, mesh, **kwargs: sharded.append((model, mesh, kwargs)),
    )
    monkeypatch.setattr("torchtitan.models.llama3.parallelize.resolve_fsdp_mesh", lambda dims: dims)
    model = small_config().build()
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    returned = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(enable_cpu_offload=True),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward="never"),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    assert returned is model
    assert sharded == [
        (
            model,
            dims,
            {
                "param_dtype": torch.bfloat16,
                "reduce_dtype": torch.float32,
                "pp_enabled": False,
                "cpu_offload": True,
                "reshard_after_forward_policy": "never",
                "enable_symm_mem": False,
            },
        )
    ]
    assert not any("_checkpoint_wrapped" in name for name, _ in model.named_modules())
