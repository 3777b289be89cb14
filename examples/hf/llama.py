"""A Llama of Hugging Face's transformers, as `clusterd.train` likes it: random weights, any size, no download.

What is the model's own stays so: its modules and their names, the tensor-parallel plan that it brings (`_tp_plan`) and
the list of its layers (`_pp_plan`). What is added is small: layers are called one after another with nothing but hidden
states, so that a pipeline can be cut anywhere, and therefore each layer makes its own rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Llama(LlamaForCausalLM):
    """Tokens to logits, layer by layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        del self.model.rotary_emb
        for layer in self.model.layers:
            layer.rotary_emb = LlamaRotaryEmbedding(config)
            layer.register_forward_pre_hook(_with_positions, with_kwargs=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens to (batch, time, vocabulary) logits."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def _with_positions(layer: Any, inputs: tuple[Tensor], _: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
    positions = torch.arange(inputs[0].shape[1], device=inputs[0].device)[None]
    return inputs, {"position_embeddings": layer.rotary_emb(inputs[0], position_ids=positions)}


def config(*, width: int = 64, depth: int = 4, heads: int = 4, context: int = 64, vocabulary: int = 256) -> LlamaConfig:
    """A small one; half as many key-value heads as query heads."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        use_cache=False,
    )


def plans(of: LlamaConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """The model's own list of layers, in order, and its own tensor-parallel plan; read off it without memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(of)
    layers = sorted(model._pp_plan, key=["model.embed_tokens", "model.layers", "model.norm", "lm_head"].index)
    return tuple(layers), dict(model._tp_plan)
