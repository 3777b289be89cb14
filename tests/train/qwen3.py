"""An unmodified Qwen3 of Hugging Face's transformers: norms per head, tied output layer."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def config(*, width: int, depth: int, heads: int, context: int, vocabulary: int) -> Qwen3Config:
    """Configuration with random weights, of any size."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=context,
        use_cache=False,
        tie_word_embeddings=True,
    )


def tp_plan(**sizes: int) -> dict[str, str]:
    """The model's own tp_plan."""
    with torch.device("meta"):
        return dict(Qwen3ForCausalLM(config(**sizes))._tp_plan)


class Logits(Qwen3ForCausalLM):
    """Tokens to logits."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(config(**sizes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).logits
