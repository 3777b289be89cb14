"""Unusual models that plans must train correctly."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Attention
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate


class Normed(GPT):
    """Running statistics after every block; they depend on every forward pass."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.add_module("seen", nn.BatchNorm1d(sizes["width"]))
            block.register_forward_hook(self._count)

    @staticmethod
    def _count(block: Any, inputs: Any, output: torch.Tensor) -> None:
        block.seen(output.detach().flatten(0, 1))  # its output is unused, as batches differ between plans


class Masked(GPT):
    """One buffer shared by all blocks, changed in place."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        table = torch.zeros(sizes["width"])
        for block in self.blocks:
            block.register_buffer("table", table)
            block.register_forward_hook(lambda block, _, output: output + block.table)


class Routed(GPT):
    """Each sample goes to one expert: small shares of a batch leave some experts unused."""

    EXPERTS = 8

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for e in range(self.EXPERTS):
            self.embed.add_module(f"expert{e}", nn.Linear(sizes["width"], sizes["width"]))
        self.embed.register_forward_hook(self._route)

    def _route(self, embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(output)
        for e in range(self.EXPERTS):
            rows = (inputs[0][:, 0] % self.EXPERTS == e).nonzero()[:, 0]
            if len(rows):
                added = added.index_put((rows,), embed.get_submodule(f"expert{e}")(output[rows]))
        return output + added


class Sided(GPT):
    """Every replica uses a different parameter."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.side0, self.embed.side1 = (nn.Linear(sizes["width"], sizes["width"]) for _ in range(2))
        self.embed.register_forward_hook(self._add)

    @staticmethod
    def _add(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        mine = dist.get_rank() if dist.is_initialized() else 0
        return output + embed.get_submodule(f"side{mine}")(output)


class Fading(GPT):
    """A parameter is used in the first three steps, and never again."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.start = nn.Linear(sizes["width"], sizes["width"])
        self.embed.passes = 0
        self.embed.register_forward_hook(self._add)

    @staticmethod
    def _add(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        embed.passes += 1
        return output + embed.start(output) if embed.passes <= 3 else None


class Turned(GPT):
    """Expects the time dimension before the sample dimension."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.T)


def turned(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate a batch as that model expects it."""
    inputs, targets = default_collate(samples)
    return inputs.T, targets


class Scaled(GPT):
    """Does more than apply its layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


@functools.cache
def _table(width: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, width)


class Cached(GPT):
    """A table that is computed once and cached outside of any module."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.register_forward_hook(lambda embed, _, output: output + _table(output.shape[-1]))


class Held(GPT):
    """A table in an object that is not a module."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.held = SimpleNamespace(table=torch.linspace(-1.0, 1.0, sizes["width"]))
        self.embed.register_forward_hook(lambda embed, _, output: output + self.held.table)


class Marked(GPT):
    """Parameters with attributes that set their learning rate."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for parameter in self.blocks[0].parameters():
            parameter.rate = 0.5


class Evaluated(GPT):
    """In evaluation mode, as from `from_pretrained`; the output depends on the mode."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.register_forward_hook(lambda embed, _, output: output if embed.training else output * 0)
        self.eval()


class Cooling(GPT):
    """A temperature that falls with each pass, and a table as long as the longest text so far."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.temperature = 4.0
        self.embed.longest, self.embed.table = 0, torch.zeros(0)
        self.embed.register_forward_hook(self._grow)

    @staticmethod
    def _grow(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] > embed.longest:
            embed.longest = output.shape[1]
            embed.table = torch.linspace(0.0, 1.0, embed.longest)[:, None]
        return output + embed.table[: output.shape[1]]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.temperature = 1.0 + (self.temperature - 1.0) * 0.9
        return super().forward(tokens) / self.temperature


class Hooked(GPT):
    """A parameter with a hook that scales its gradient."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.token.weight.register_hook(lambda gradient: gradient / 8)


class Fainting(GPT):
    """The output of a block depends on the number of its passes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.register_buffer("added", torch.ones(sizes["width"]))
            block.register_forward_hook(self._add)

    @staticmethod
    def _add(block: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        block.added *= 0.5
        return output * (1 + block.added)


class Hollow(GPT):
    """Tensors without elements: a cache that is filled elsewhere, and an empty bias."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.register_buffer("cache", torch.zeros(0, sizes["width"]))
        self.head.nothing = nn.Parameter(torch.zeros(0))


class Reentrant(GPT):
    """Recomputes its blocks by reentrant checkpoints."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)


class Sparse(GPT):
    """An embedding with sparse gradients."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.token = nn.Embedding(sizes["vocabulary"], sizes["width"], sparse=True)


class Transposed(GPT):
    """Activations and gradients between blocks are column-major."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, inputs: self._turned(inputs[0]))
            block.register_forward_hook(lambda block, inputs, output: self._turned(output))

    @staticmethod
    def _turned(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2) * 1.0).contiguous().transpose(1, 2)


class Still(GPT):
    """No parameter is trainable."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.requires_grad_(False)


class Compiled(GPT):
    """Each of its blocks is compiled."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)


class Borrowing(GPT):
    """Model whose embedding uses a matrix of its first block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + x @ self.blocks[0].attn.proj.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NormedAttention(Attention):
    """One norm for the queries and keys of all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width // heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, -1))


class HeadNormed(GPT):
    """Norms per head, and a tp_plan that names them."""

    TP_PLAN = GPT.TP_PLAN | {"blocks.*.attn.norm": "replicated_with_grad_allreduce"}

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.attn = NormedAttention(sizes["width"], sizes["heads"])


class Versioned(nn.Module):
    """A part with a version, and with an extra state that it changes as it trains."""

    _version = 7

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.steps = block, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.block(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class OwnWay(GPT):
    """Saves itself under names of its own, by a method and a hook."""

    TP_PLAN = {name.replace("blocks.*.", "blocks.*.block."): style for name, style in GPT.TP_PLAN.items()}

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(Versioned(block) for block in self.blocks)
        self.loaded_version = 0
        self._register_state_dict_hook(self._note)

    @staticmethod
    def _note(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}saved by"] = torch.tensor(1.0)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        for name in list(state):
            if not name.startswith("saved by"):
                state[f"net.{name}"] = state.pop(name)
        return state

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        assert state.pop("saved by") == 1
        self.loaded_version = state._metadata["blocks.0"]["version"]
        named = {name.removeprefix("net."): value for name, value in state.items()}
        return super().load_state_dict(named, *arguments, **options)


MODELS = {
    "own way": OwnWay,
    "normed": Normed, "masked": Masked, "routed": Routed, "sided": Sided, "fading": Fading, "scaled": Scaled,
    "cached": Cached, "held": Held, "marked": Marked, "hooked": Hooked, "cooling": Cooling, "evaluated": Evaluated,
    "fainting": Fainting, "turned": Turned, "reentrant": Reentrant, "hollow": Hollow,
    "sparse": Sparse, "transposed": Transposed, "compiled": Compiled, "still": Still,
    "head normed": HeadNormed, "borrowing": Borrowing,
}  # fmt: skip
