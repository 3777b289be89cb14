"""A byte-level GPT, small enough for a laptop's CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embed(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, width)."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` are grouped by head (query, key, value of head 0, then of head 1, ...), so that a tensor-parallel
    shard of them is whole heads, and their number is inferred from what the shard has.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Vectors to the next byte's logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to (batch, time, vocabulary)."""
        return self.out(self.norm(x))


class GPT(nn.Module):
    """Embedding, blocks, head: `LAYERS` in order."""

    LAYERS = ("embed", "blocks", "head")
    TP_PLAN = {
        "blocks.*.attn.qkv": "colwise",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head.out": "colwise_rep",
    }

    def __init__(
        self, *, width: int = 64, depth: int = 4, heads: int = 4, context: int = 64, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = Head(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes to (batch, time, vocabulary) logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
