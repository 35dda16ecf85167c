"""A vocabulary that ranks share gives the rows and the loss of a whole one, and refuses foreign ids."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torchtitan.components.loss import cross_entropy_loss, IGNORE_INDEX
from torchtitan.distributed.vocab_parallel import look_up

from tests.ranks.pool import run_on_ranks

pytestmark = pytest.mark.ranks

# Over three ranks: 3, 3 and 1.
NUM_IDS, WIDTH, NUM_TOKENS = 7, 4, 6
LABELS = torch.tensor([0, IGNORE_INDEX, 6, 3, 2, IGNORE_INDEX])


def _logits() -> torch.Tensor:
    # Far from zero, where exp() without the largest logit of all ranks would overflow.
    scale = torch.tensor([1.0, 1.0, 200.0, 200.0, 1.0, 1.0]).unsqueeze(1)
    return torch.randn(NUM_TOKENS, NUM_IDS, generator=torch.Generator().manual_seed(3)) * scale


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _shared(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    shared = distribute_tensor(whole, mesh, [Shard(dim)])
    shared.requires_grad_()
    return shared


def _message(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def _check_loss(mesh: DeviceMesh) -> None:
    whole = _logits().requires_grad_()
    expected = F.cross_entropy(whole, LABELS, reduction="sum", ignore_index=IGNORE_INDEX)
    (expected * 0.5).backward()
    for dtype in (torch.float32, torch.bfloat16):
        shared = _shared(_logits().to(dtype), mesh, 1)
        loss = cross_entropy_loss(shared, LABELS, global_vocab_size=NUM_IDS)
        assert loss.dtype == torch.float32 and not isinstance(loss, DTensor)
        (loss * 0.5).backward()
        assert isinstance(shared.grad, DTensor) and shared.grad.dtype == dtype
        assert whole.grad is not None
        exact = dtype == torch.float32
        rtol, atol = (1e-6, 1e-6) if exact else (0.02, 0.01)
        grad = shared.grad.full_tensor().float()
        torch.testing.assert_close(loss, expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(grad, whole.grad, rtol=rtol, atol=atol)
    nothing = cross_entropy_loss(_shared(_logits(), mesh, 1), torch.full_like(LABELS, IGNORE_INDEX))
    assert nothing.item() == 0


def _check_embedding(mesh: DeviceMesh) -> None:
    table = torch.randn(NUM_IDS, WIDTH, generator=torch.Generator().manual_seed(5))
    tokens = torch.tensor([6, 0, 3, 3, 2, 5])
    upstream = torch.arange(NUM_TOKENS * WIDTH).float().view(NUM_TOKENS, WIDTH)
    whole = table.clone().requires_grad_()
    rows = F.embedding(tokens, whole)
    rows.backward(upstream)
    size, rank = mesh.size(), mesh.get_local_rank()
    share = slice(rank * NUM_TOKENS // size, (rank + 1) * NUM_TOKENS // size)
    for layout, mine in ((Replicate(), slice(None)), (Shard(0), share)):
        shared = _shared(table, mesh, 0)
        found = look_up(tokens, shared, layout)
        # What the others add is zero, which changes no bit.
        assert torch.equal(found, rows[mine])
        found.backward(upstream[mine])
        assert isinstance(shared.grad, DTensor) and whole.grad is not None
        assert torch.equal(shared.grad.full_tensor(), whole.grad)


def _check_ids(mesh: DeviceMesh) -> None:
    table, logits = _shared(torch.ones(NUM_IDS, WIDTH), mesh, 0), _shared(_logits(), mesh, 1)
    for foreign in (-1, NUM_IDS):
        ids = torch.tensor([0, foreign, 1, 2, 3, 4])
        for message in (
            _message(look_up, ids, table, Replicate()),
            _message(cross_entropy_loss, logits, ids),
        ):
            assert "not among the 7 of the vocabulary" in message
    message = _message(cross_entropy_loss, logits, LABELS, global_vocab_size=8)
    assert "vocabulary of 8 tokens, but the model predicts 7" in message


def _check_everything() -> None:
    mesh = _mesh()
    for check in (_check_loss, _check_embedding, _check_ids):
        check(mesh)


def test_a_shared_vocabulary_computes_what_a_whole_one_does() -> None:
    run_on_ranks(3, _check_everything)
