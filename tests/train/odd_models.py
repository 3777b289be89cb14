"""Unusual models, optimizers and schedulers that plans must train correctly."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model import GPT, Attention
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from clusterd.train.process.job import adapt_optimizer_factory


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
    """Its embedding uses a matrix of the first block."""

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


class CommonScale(torch.optim.SGD):
    """The update of a tensor depends on the largest gradient of all tensors."""

    def step(self, closure: Any = None) -> Any:
        largest = max(p.grad.abs().max() for g in self.param_groups for p in g["params"] if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / largest
        return super().step(closure)


class Clipping(torch.optim.SGD):
    """Clips in the optimizer, but only huge gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1000.0)
        return super().step(closure)


class LargeFactored(torch.optim.SGD):
    """Divides by row means, of matrices that are large along both dimensions."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for g in self.param_groups for p in g["params"] if p.dim() == 2 and min(p.shape) >= 128):
            p.grad /= p.grad.abs().mean(1, keepdim=True)
        return super().step(closure)


class LateRatio(torch.optim.SGD):
    """After five updates, scales every tensor's gradient to the tensor's norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 5 else ():
                p.grad *= p.detach().norm() / p.grad.norm()
        return super().step(closure)


class SomeRows(torch.optim.SGD):
    """Looks at whole tensors of the groups that ask for it."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for g in self.param_groups if g["rows"] for p in g["params"]):
            p.grad /= p.grad.norm()
        return super().step(closure)


class InParts(torch.optim.Optimizer):
    """Two inner optimizers, neither of which accepts an empty parameter list."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        matrices = SomeRows([{"params": [p for p in parameters if p.dim() == 2], "rows": True}], lr=0.1)
        self._parts = [matrices, torch.optim.AdamW([p for p in parameters if p.dim() != 2])]
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


class Lookahead(torch.optim.SGD):
    """Every fifth update goes half the way back, elementwise."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["done"] % 5 == 0:
                    p.data.copy_(slow.lerp_(p.data, 0.5))


class SlowWeights(torch.optim.SGD):
    """Every second update goes half the way back to weights that it keeps in a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.kept, strict=True):
            p.data.copy_(slow.lerp_(p.data, 0.5))


class Anchored(torch.optim.SGD):
    """Draws each parameter to its initial value, kept in a dict."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p, first in self.kept.items():
            p.data.lerp_(first, 0.1)


class LateAverage(torch.optim.SGD):
    """Keeps an average of each parameter from the third update on, and is drawn to it from the fifth on."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 3 else ():
                average = self.state[p].setdefault("average", p.detach().clone())
                p.data.lerp_(average.lerp_(p.data, 0.1), 0.5 if group["done"] > 5 else 0.0)


class LateFunction(torch.optim.SGD):
    """After the third update it keeps an object that needs pickle."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 3 else ():
                self.state[p]["shape"] = lambda step: step


class Counting(torch.optim.SGD):
    """Keeps a counter for no parameter; its steps shrink with it."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = count = self.state.get("count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / count
        return super().step(closure)


class OwnCount(Counting):
    """Keeps that counter in an attribute of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.state["count"], self.count = self.count, self.count + 1
        done = super().step(closure)
        del self.state["count"]
        return done


def cosine(optimizer: Any) -> Any:
    """As commonly written: NumPy's cosine returns NumPy scalars."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 40)))


class Drawn(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler with a function in its state."""

    def __init__(self, optimizer: Any) -> None:
        self.shape = lambda step: 1 / (1 + step)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.shape(self.last_epoch) for base in self.base_lrs]


class StatelessScheduler:
    """A scheduler without state_dict."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = optimizer.param_groups

    def step(self) -> None:
        for group in self._groups:
            group["lr"] *= 0.9


def warmup(optimizer: Any) -> Any:
    """Warm-up over ten steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


def by_marks(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One group for parameters with the attribute, and one for the others."""
    marked = [p for p in parameters if hasattr(p, "rate")]
    others = [p for p in parameters if not hasattr(p, "rate")]
    return torch.optim.SGD([{"params": marked, "lr": 0.5}, {"params": others, "lr": 0.05}], momentum=0.5)


def by_names(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The first block has a higher learning rate than the rest."""
    first = [p for name, p in named_parameters if name.startswith("blocks.0.")]
    others = [p for name, p in named_parameters if not name.startswith("blocks.0.")]
    return torch.optim.SGD([{"params": first, "lr": 0.5}, {"params": others, "lr": 0.05}], momentum=0.5)


def of_the_head(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Only the head is trained."""
    return torch.optim.SGD([p for name, p in named_parameters if name.startswith("head.")], lr=0.1)


def rows_by_names(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The blocks' matrices as a whole, all else elementwise."""
    rows = [p for name, p in named_parameters if name.startswith("blocks.") and p.dim() == 2]
    others = [p for name, p in named_parameters if not (name.startswith("blocks.") and p.dim() == 2)]
    return SomeRows([{"params": rows, "rows": True}, {"params": others, "rows": False}], lr=0.1)


def rows_by_marks(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for parameters with the attribute."""
    rows = [p for p in parameters if hasattr(p, "rate")]
    others = [p for p in parameters if not hasattr(p, "rate")]
    return SomeRows([{"params": rows, "rows": True}, {"params": others, "rows": False}], lr=0.1)


MODELS = {
    "normed": Normed, "masked": Masked, "routed": Routed, "sided": Sided, "fading": Fading, "scaled": Scaled,
    "cached": Cached, "held": Held, "marked": Marked, "hooked": Hooked, "cooling": Cooling, "evaluated": Evaluated,
    "fainting": Fainting, "turned": Turned, "reentrant": Reentrant, "hollow": Hollow,
    "sparse": Sparse, "transposed": Transposed, "compiled": Compiled, "still": Still,
    "head normed": HeadNormed, "borrowing": Borrowing,
}  # fmt: skip
OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "lbfgs": torch.optim.LBFGS,
    "with the loss": lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(3))]),
    "common scale": lambda p: CommonScale(p, lr=0.01),
    "by marks": by_marks,
    "by names": adapt_optimizer_factory(by_names),
    "of the head": adapt_optimizer_factory(of_the_head),
    "rows by names": adapt_optimizer_factory(rows_by_names),
    "rows by marks": rows_by_marks,
    "rows and others": InParts,
    "clipping": lambda p: Clipping(p, lr=0.1),
    "large factored": lambda p: LargeFactored(p, lr=0.1),
    "late ratio": lambda p: LateRatio(p, lr=0.1),
    "slow weights": lambda p: SlowWeights(p, lr=0.1),
    "anchored": lambda p: Anchored(p, lr=0.1),
    "late average": lambda p: LateAverage(p, lr=0.1, momentum=0.9),
    "late function": lambda p: LateFunction(p, lr=0.1),
    "lookahead": lambda p: Lookahead(p, lr=0.1),
    "own count": lambda p: OwnCount(p, lr=0.1),
    "counting": lambda p: Counting(p, lr=0.1),
}


def onecycle(optimizer: Any) -> Any:
    """Momentum, or the first beta, is cycled too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=12)


SCHEDULERS = {
    "cosine": cosine, "onecycle": onecycle, "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "by hand": StatelessScheduler, "drawn": Drawn, "warmup": warmup,
}  # fmt: skip
