"""How a decoder is cut over the tensor-parallel ranks: which weight by rows, which by columns.

Inside a block each rank has some heads and some of the hidden width; what it adds to the residual stream is
a part of a sum. So a block costs one gathering and one sum for attention, and the same for feed-forward. With
sequence parallelism each rank holds T / ranks tokens of the stream, norms included; without it all of them.

                          weight       in                      out
    tok_embeddings        token ids    tokens                  stream
    norms                 whole        stream                  stream
    attention             -            stream -> all tokens    (that of wo)
      wqkv | wq, wk, wv   heads        all tokens              own heads
      q_norm, k_norm      whole        own heads               own heads
      wo                  columns      own heads               sum -> stream
    feed_forward          -            stream -> all tokens    (that of w2)
      w1, w3              rows         all tokens              own hidden width
      w2                  columns      own hidden width        sum -> stream
    norm (the last)       whole        stream                  all tokens
    lm_head               token ids    all tokens              logits of own token ids (a DTensor)

Positions, masks and labels are whole on every rank.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from torchtitan.distributed.tensor_parallel import (
    apply_tensor_parallel,
    TensorParallel,
    VocabParallel,
)
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.fused_qkv import FusedQKVLinear

Plan = dict[str, ParallelStyle]

_WHOLE = Replicate()
_TOKENS, _HEADS, _LAST = Shard(0), Shard(1), Shard(-1)


def shard_decoder(model: Decoder, tp_mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut ``model`` in place over ``tp_mesh``; its parameters become DTensors under the same names."""
    apply_tensor_parallel(
        model, tp_mesh, decoder_plan(model.config, sequence_parallel=sequence_parallel)
    )
    # Embedding and head got a tensor each.
    model.tie_weights()


def decoder_plan(config: Decoder.Config, *, sequence_parallel: bool) -> Plan:
    """The style of every module that is cut or converts, by its name in the model."""
    stream: Placement = _TOKENS if sequence_parallel else _WHOLE
    plan: Plan = {
        "tok_embeddings": VocabParallel(output_layout=stream),
        # The head's part of this gradient is added up here, once, however many chunks the loss makes.
        "norm": TensorParallel(
            input_layout=stream,
            output_layout=_WHOLE,
            partial_output_grad=True,
            fresh_output=True,
        ),
        "lm_head": TensorParallel(
            input_layout=_WHOLE,
            partial_input_grad=True,
            output_layout=_LAST,
            use_local_output=False,
            param_layouts=_BY_ROWS,
        ),
    }
    for index, layer in enumerate(config.layers):
        for name, style in _block_plan(layer, stream).items():
            plan[f"layers.{index}.{name}"] = style
    return plan


def _block_plan(config: TransformerBlock.Config, stream: Placement) -> Plan:
    feed_forward = {
        "w1": _rows(),
        "w3": _rows(),
        "w2": _columns(stream, config.feed_forward.w2.in_features),
    }
    return {
        "attention_norm": _norm(stream),
        "attention": _all_tokens(stream),
        **{f"attention.{k}": v for k, v in _attention_plan(config.attention, stream).items()},
        "ffn_norm": _norm(stream),
        "feed_forward": _all_tokens(stream),
        **{f"feed_forward.{name}": style for name, style in feed_forward.items()},
    }


def _attention_plan(config: GQAttention.Config, stream: Placement) -> Plan:
    fused = isinstance(config.qkv_linear, FusedQKVLinear.Config)
    plan: Plan = {
        f"qkv_linear.{name}": _rows() for name in (["wqkv"] if fused else ["wq", "wk", "wv"])
    }
    if config.q_norm is not None:
        plan["q_norm"] = _norm(_HEADS)
    if config.k_norm is not None:
        plan["k_norm"] = _norm(_HEADS)
    plan["wo"] = _columns(stream, config.wo.in_features)
    return plan


# A bias goes with the rows of its matrix; where those are whole, so is the bias.
_BY_ROWS: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}


def _rows() -> ParallelStyle:
    return TensorParallel(input_layout=_WHOLE, output_layout=_LAST, param_layouts=_BY_ROWS)


def _columns(stream: Placement, in_features: int) -> ParallelStyle:
    return TensorParallel(
        input_layout=_LAST,
        input_width=in_features,
        output_layout=stream,
        param_layouts={"weight": Shard(1)},
    )


def _norm(layout: Placement) -> ParallelStyle:
    return TensorParallel(input_layout=layout, output_layout=layout)


def _all_tokens(stream: Placement) -> ParallelStyle:
    return TensorParallel(input_layout=stream, compute_layout=_WHOLE)
