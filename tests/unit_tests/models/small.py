"""A Llama small enough to compare outputs, gradients and weights bit by bit in a blink."""

from torchtitan.models.common.config_utils import make_gqa_config, trunc_normal
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.model import Flavor

ROW_LENGTH = 16
SMALL = Flavor(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64)
SMALL_TIED = Flavor(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, tied=True
)
# Three key-value heads and odd widths: no cut over two ranks falls between heads.
UNEVEN = Flavor(dim=30, n_layers=2, n_heads=3, n_kv_heads=3, ffn_dim=49, vocab_size=63)


def config_of(flavor: str, attn_backend: str = "flex") -> Llama3Model.Config:
    """A fresh Config of the flavor that recipes know by this name."""
    config = model_registry(flavor, attn_backend=attn_backend).model
    assert isinstance(config, Llama3Model.Config)
    return config


def small_config(
    flavor: Flavor = SMALL, *, row_length: int = ROW_LENGTH, fuse_qkv: bool = True
) -> Llama3Model.Config:
    """``flavor`` with rows of ``row_length`` tokens."""
    config = flavor.build_config()
    for layer in config.layers:
        rope = layer.attention.rope
        rope.max_context_length = row_length
        if not fuse_qkv:
            layer.attention = make_gqa_config(
                dim=flavor.dim,
                n_heads=flavor.n_heads,
                n_kv_heads=flavor.n_kv_heads,
                rope=rope,
                inner_attention=layer.attention.inner_attention,
                qkv_init=trunc_normal(0.02),
                wo_init=layer.attention.wo.param_init or {},
            )
    return config
