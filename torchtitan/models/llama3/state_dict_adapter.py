"""Llama 3 checkpoints, from and to the names and the row order of Hugging Face.

Names map one to one. Rows do not: our rotary embedding pairs neighbouring rows of a head, theirs rows
half a head apart, so the rows of wq and wk change places. Values and outputs have no such order.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.protocols import StateDictAdapter

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
QUERY = "layers.{}.attention.qkv_linear.wq.weight"
KEY = "layers.{}.attention.qkv_linear.wk.weight"

_IN_A_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


class Llama3StateDictAdapter(StateDictAdapter):
    """Raises ``ValueError`` in use when the model does not pair neighbouring rows."""

    from_hf_map: dict[str, str | None] = {
        "model.embed_tokens.weight": EMBEDDING,
        **{
            f"model.layers.{{}}.{theirs}.weight": f"layers.{{}}.{ours}.weight"
            for theirs, ours in _IN_A_LAYER.items()
        },
        # Computed from the config, here as there.
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
        "model.norm.weight": "norm.weight",
        "lm_head.weight": HEAD,
    }
    """Their name -> ours, with ``{}`` for the number of a layer; None for what we do not keep."""

    def __init__(self, model_config: Decoder.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.tied = model_config.enable_weight_tying
        attention = model_config.first_attention
        self.heads_of = {QUERY: attention.n_heads, KEY: attention.n_kv_heads}
        if self.tied and self.fqn_to_index_mapping:
            # A file planned for a key that is never written would be left without an end.
            self.fqn_to_index_mapping.pop("lm_head.weight", None)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Skips layer keys that have no name there; raises ``KeyError`` for other unknown keys."""
        self._validate_hf_rope_config(ComplexRoPE.Config)
        to_hf_map = {ours: theirs for theirs, ours in self.from_hf_map.items() if ours is not None}
        hf_state_dict = {}
        for key, value in state_dict.items():
            pattern, layer = _generalise(key)
            if (self.tied and key == HEAD) or (layer and pattern not in to_hf_map):
                continue
            if pattern in self.heads_of:
                value = self._permute(value, self.heads_of[pattern])
            hf_state_dict[to_hf_map[pattern].format(layer)] = value
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Raises ``KeyError`` for unknown keys; a tied model's missing head is its embedding."""
        self._validate_hf_rope_config(ComplexRoPE.Config)
        state_dict = {}
        for hf_key, value in hf_state_dict.items():
            pattern, layer = _generalise(hf_key)
            ours = self.from_hf_map[pattern]
            if ours is None:
                continue
            if ours in self.heads_of:
                value = self._reverse_permute(value, self.heads_of[ours])
            state_dict[ours.format(layer)] = value
        if self.tied and EMBEDDING in state_dict:
            state_dict.setdefault(HEAD, state_dict[EMBEDDING])
        return state_dict

    def _permute(
        self,
        w: torch.Tensor,
        n_heads_arg: int,
        dim1: int | None = None,
        dim2: int | None = None,
    ) -> torch.Tensor:
        """Within each head, rows 0 2 4 .. first, then 1 3 5 ..; dim1 and dim2 default to ``w.shape``."""
        rows, columns = dim1 or w.shape[0], dim2 or w.shape[1]
        return _on_whole(
            w,
            lambda whole: whole.reshape(n_heads_arg, -1, 2, columns)
            .transpose(1, 2)
            .reshape(rows, columns),
        )

    def _reverse_permute(
        self,
        w: torch.Tensor,
        n_heads_arg: int,
        dim1: int | None = None,
        dim2: int | None = None,
    ) -> torch.Tensor:
        """The inverse of ``_permute``."""
        rows, columns = dim1 or w.shape[0], dim2 or w.shape[1]
        return _on_whole(
            w,
            lambda whole: whole.reshape(n_heads_arg, 2, -1, columns)
            .transpose(1, 2)
            .reshape(rows, columns),
        )


def _generalise(key: str) -> tuple[str, str]:
    """ "layers.12.x" -> ("layers.{}.x", "12"); a key outside the layers comes back as it is."""
    found = re.search(r"(?<=layers\.)\d+(?=\.)", key)
    if found is None:
        return key, ""
    return f"{key[: found.start()]}{{}}{key[found.end() :]}", found.group()


def _on_whole(w: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``change`` to all rows at once: shards need not end where heads do."""
    if not isinstance(w, DTensor):
        return change(w)
    replicated = [Replicate()] * w.device_mesh.ndim
    whole = change(w.redistribute(placements=replicated).to_local())
    return DTensor.from_local(whole, w.device_mesh, replicated, run_check=False).redistribute(
        placements=w.placements
    )
