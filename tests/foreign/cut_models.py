"""Models whose layers or tensors a plan cuts, and scripts that look beyond the part that a rank has."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clusterd.train import Evaluation
from tests.foreign.batches import SAMPLES, arguments
from tests.foreign.registry import script

CUTS = "tp=2", "pp=2,accumulation=2"
WIDTH, WORDS, LENGTH = 16, 32, 6


def texts() -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=random)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 3 + 1) % WORDS
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(self.up(self.norm(x))), self.p, self.training)
        return x + self.down(h)


class Model(nn.Module):
    block: Any = Block

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = ("embed", "blocks", "head")
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def cut(**others: Any) -> dict[str, Any]:
    return arguments(
        **{
            "model": Model,
            "loss": entropy,
            "data": texts(),
            "layers": LAYERS,
            "tp_plan": TP_PLAN,
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.5),
            **others,
        }
    )


@script(*CUTS)
def dropout_inside() -> dict[str, Any]:
    """Dropout between the split layers."""

    class M(Model):
        block = staticmethod(lambda: Block(0.3))

    return cut(model=M)


@script(*CUTS)
def penalty_of_all_weights() -> dict[str, Any]:
    """A loss with a penalty on all weights of the model that was made last."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [Model()]
        return made[0]

    def loss(out: Any, y: Any) -> Any:
        return entropy(out, y) + 1e-2 * sum(p.square().sum() for p in made[0].parameters())

    return cut(model=model, loss=loss)


@script(*CUTS)
def deep_supervision() -> dict[str, Any]:
    """A loss on activations that a forward hook keeps."""
    kept: dict[str, Any] = {}

    def model() -> nn.Module:
        m = Model()
        m.blocks[0].register_forward_hook(lambda _m, _i, out: kept.update(x=out))
        return m

    def loss(out: Any, y: Any) -> Any:
        return entropy(out, y) + 0.1 * kept["x"].square().mean()

    return cut(model=model, loss=loss)


class Balanced(Block):
    """A block with a router whose balance is kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.aux = nn.Linear(WIDTH, 2), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        self.aux = gates.square().sum(-1).mean()
        return super().forward(x) * gates[..., :1]


@script(*CUTS)
def auxiliary_in_attributes() -> dict[str, Any]:
    """A loss that adds what blocks keep in an attribute (router balance)."""
    made: list[Any] = []

    class M(Model):
        block = Balanced

    def model() -> nn.Module:
        made[:] = [M()]
        return made[0]

    def loss(out: Any, y: Any) -> Any:
        return entropy(out, y) + 0.1 * sum(b.aux for b in made[0].blocks)

    return cut(model=model, loss=loss)


@script(*CUTS)
def weight_by_norm_in_loop() -> dict[str, Any]:
    """A loop that weighs the loss by the norm of a weight."""
    made: list[nn.Module] = []
    weight = {"w": 1.0}

    def model() -> nn.Module:
        made[:] = [Model()]
        return made[0]

    def loss(out: Any, y: Any) -> Any:
        return entropy(out, y) * weight["w"]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            weight["w"] = float(made[0].embed.weight.detach().square().mean().sqrt())

    return cut(model=model, loss=loss, loop=loop)


@script(*CUTS)
def softmax_over_split() -> dict[str, Any]:
    """A softmax over the features of a split layer."""

    class B(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(self.norm(x)).softmax(-1))

    class M(Model):
        block = B

    return cut(model=M)


class Heads(nn.Module):
    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.size = WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        q, k, v = (layer(n).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(h.transpose(1, 2).flatten(2))


HEADS = {"blocks.*.q": "colwise", "blocks.*.k": "colwise", "blocks.*.v": "colwise", "blocks.*.o": "rowwise"}


@script(*CUTS)
def grouped_heads() -> dict[str, Any]:
    """Attention with grouped keys."""

    class M(Model):
        block = Heads

    return cut(model=M, tp_plan=HEADS)


@script(*CUTS)
def qkv_in_one() -> dict[str, Any]:
    """Attention whose queries, keys and values are one Linear, cut in three."""

    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
            return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class M(Model):
        block = B

    return cut(model=M, tp_plan={"blocks.*.qkv": "colwise", "blocks.*.o": "rowwise"})


@script(*CUTS)
def embedding_with_padding() -> dict[str, Any]:
    """A split embedding with a padding index."""

    class M(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=3)

    return cut(model=M, tp_plan={**TP_PLAN, "embed": "embedding_rowwise", "head": "colwise_rep"})


class Standardised(nn.Linear):
    """A Linear whose rows are standardised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True), self.bias) / 4


@script(*CUTS)
def standardised_down() -> dict[str, Any]:
    """A subclass of Linear that standardises rows, cut along them."""

    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down = Standardised(32, WIDTH)

    class M(Model):
        block = B

    return cut(model=M)


@script(*CUTS)
def mode_dependent() -> dict[str, Any]:
    """A forward pass that depends on the mode and a counter on the model."""

    class M(Model):
        def __init__(self) -> None:
            super().__init__()
            self.passes = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            if self.passes > 5:
                return super().forward(tokens) * 1.5
            return super().forward(tokens)

    return cut(model=M)


@script(*CUTS)
def names_looked_up() -> dict[str, Any]:
    """A loop that zeroes rows of a weight that it finds by name."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [Model()]
        return made[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            with torch.no_grad():
                made[0].get_parameter("blocks.0.up.weight").mul_(0.9)
                dict(made[0].named_parameters())["embed.weight"][:2].zero_()

    return cut(model=model, loop=loop)


@script(*CUTS)
def layer_dropped() -> dict[str, Any]:
    """Stochastic depth by torch's generator, by sample."""

    class B(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = (torch.rand(len(x), 1, 1) > 0.2).float()
            return x + keep * (super().forward(x) - x)

    class M(Model):
        block = B

    return cut(model=M)


@script(*CUTS)
def statistic_in_a_hook() -> dict[str, Any]:
    """A statistic of the first block's activations over the batch, by which the loss is scaled."""
    kept = {"x": torch.ones(())}

    def model() -> nn.Module:
        m = Model()
        m.blocks[0].register_forward_hook(lambda _m, _i, out: kept.update(x=out.detach().square().mean()))
        return m

    return cut(model=model, loss=lambda out, y: entropy(out, y) * kept["x"])


@script(*CUTS)
def other_output_when_evaluated() -> dict[str, Any]:
    """A model that returns something else in evaluation mode than the output of its last layer."""

    class M(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out = super().forward(tokens)
            return out if self.training else out / 2

    return cut(model=M, evaluate=Evaluation(data=texts(), every=2))


@script(*CUTS)
def softmax_when_evaluated() -> dict[str, Any]:
    """A split layer that normalises its features in evaluation mode only."""

    class B(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.gelu(self.up(self.norm(x)))
            return x + self.down(h if self.training else h / (1 + h.square().mean(-1, keepdim=True)))

    class M(Model):
        block = B

    return cut(model=M, evaluate=Evaluation(data=texts(), every=2))


@script(*CUTS)
def layerwise_rates_by_loop() -> dict[str, Any]:
    """Learning rates by the number of the group, which the loop sets."""
    made: list[Any] = []

    def optimizer(ps: Any) -> Any:
        made[:] = [torch.optim.SGD([{"params": [p]} for p in ps], lr=0.5)]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            for i, group in enumerate(made[0].param_groups):
                group["lr"] = 0.5 * 0.8**i / (1 + step / 10)
            run.step(batch)

    return cut(optimizer=optimizer, loop=loop)


@script(*CUTS)
def noisy_weights_by_loop() -> dict[str, Any]:
    """A loop that adds noise to all weights."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [Model()]
        return made[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            with torch.no_grad():
                for p in made[0].parameters():
                    p.add_(0.02 * torch.randn_like(p))

    return cut(model=model, loop=loop)


@script(*CUTS)
def tied_in_other_order() -> dict[str, Any]:
    """Tied layers of one stage, made in another order than they are applied."""

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.first.weight = self.second.weight
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(self.embed(x))))

    return cut(model=M, layers=("embed", "first", "second", "head"), tp_plan={"head": "colwise_rep"})


@script(*CUTS)
def weighted_words() -> dict[str, Any]:
    """A loss of (sum, weight) beside an accuracy."""

    def loss(out: Any, y: Any) -> Any:
        counts = y > 8
        total = F.cross_entropy(out.flatten(0, 1), y.where(counts, -100).flatten(), reduction="sum")
        return {"loss": (total, counts.sum()), "right": (out.argmax(-1) == y).float().mean()}

    return cut(loss=loss)


@script(*CUTS)
def head_saved_by_loop() -> dict[str, Any]:
    """A loop that writes the model's weights to a file."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [Model()]
        return made[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            if run.is_main:
                torch.save(made[0].state_dict(), io.BytesIO())

    return cut(model=model, loop=loop)


@script("dp=2,zero=1", *CUTS)
def optimizer_saved_by_loop() -> dict[str, Any]:
    """A loop that writes the state of its optimizer to a file."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.AdamW(parameters, lr=0.01)]
        return made[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            if run.is_main:
                torch.save(made[0].state_dict(), io.BytesIO())

    return cut(optimizer=optimizer, loop=loop)


@script("pp=3,accumulation=4")
def batch_unpacked_by_loop() -> dict[str, Any]:
    """A loop that takes its batch apart."""

    def loop(run: Any) -> None:
        for _, (x, y) in run:
            run.step((x.clone(), y))

    return cut(loop=loop)


class Masked(Block):
    """A block that hands a mask on."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return super().forward(x) * mask, mask


class Starts(nn.Module):
    """Embeds words, and makes a mask of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.table(tokens), (tokens > 3).unsqueeze(-1).float()


class Ends(nn.Module):
    """Computes logits of masked features."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(x * mask)


@script(*CUTS)
def mask_between_stages() -> dict[str, Any]:
    """Layers that hand on features and a mask."""

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = Starts(), Ends()
            self.blocks = nn.ModuleList(Masked() for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, mask = self.embed(tokens)
            for block in self.blocks:
                x, mask = block(x, mask)
            return self.head(x, mask)

    return cut(model=M)


@script(*CUTS)
def dictionary_of_layers() -> dict[str, Any]:
    """Layers in an `nn.ModuleDict`, with convolutions and normalisation of groups."""

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"embed": nn.Embedding(WORDS, WIDTH), "mix": Conv(), "again": Conv()})
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.parts["again"](self.parts["mix"](self.parts["embed"](tokens))))

    return cut(
        model=M, layers=("parts.embed", "parts.mix", "parts.again", "head"), tp_plan={"head": "colwise_gather_output"}
    )


class Conv(nn.Module):
    """A convolution over words."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)


@script(*CUTS)
def experts_in_blocks() -> dict[str, Any]:
    """Blocks that send each word to one of two experts."""

    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
            return sum(e(x) * (chosen == i) for i, e in enumerate(self.experts)) * gate

    class M(Model):
        block = B

    return cut(model=M, tp_plan={"blocks.*.experts.*.up": "colwise", "blocks.*.experts.*.down": "rowwise"})


@script(*CUTS)
def compiled_blocks() -> dict[str, Any]:
    """Blocks that are compiled."""

    def model() -> nn.Module:
        m = Model()
        for block in m.blocks:
            block.compile(backend="eager")
        return m

    return cut(model=model)


class CastBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)


class CastBlocks(Model):
    block = CastBlock


@script(*CUTS, tolerance=1e-3)
def autocast_in_blocks() -> dict[str, Any]:
    """The script's own autocast, inside each layer; equal to 1e-3."""
    return cut(model=CastBlocks)


class CastModel(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = self.embed(tokens).bfloat16()
            for block in self.blocks:
                x = block(x)
            return self.head(x.bfloat16()).float()


@script(*CUTS, tolerance=1e-3)
def autocast_needed() -> dict[str, Any]:
    """The same around all layers, with casts that need it."""
    return cut(model=CastModel)


class TwiceBlock(CastBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Twice(Model):
    block = TwiceBlock

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = self.embed(tokens)
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
        return self.head(x)


@script("dp=2,zero=3,accumulation=2", "tp=2", tolerance=1e-2)
def autocast_twice() -> dict[str, Any]:
    """Layers that are applied twice inside one autocast; equal to 1e-2."""
    return cut(model=Twice)


@script("dp=2,zero=3,accumulation=2", *CUTS, tolerance=1e-3)
def autocast_by_loop() -> dict[str, Any]:
    """Autocast around the steps of a loop of the script's own."""

    def loop(run: Any) -> None:
        for _, batch in run:
            with torch.autocast("cpu", torch.bfloat16):
                run.step(batch)

    return cut(loop=loop)


class Made:
    """Model and optimizer that the factories of a script have made, which its loop uses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def factories(self, optimizer: Any, **options: Any) -> dict[str, Any]:
        """Factories that keep what they make."""

        def model() -> nn.Module:
            self.model = Model()
            return self.model

        def keeping(parameters: Any) -> torch.optim.Optimizer:
            self.optimizer = optimizer(parameters)
            return self.optimizer

        return cut(model=model, optimizer=keeping, **options)


@script("dp=2,zero=1", *CUTS, advice="choose by names or `dim()`")
def groups_by_size() -> dict[str, Any]:
    """Weight decay for parameters of many elements only."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        large, small = ([p for p in parameters if (p.numel() >= 400) == which] for which in (True, False))
        return torch.optim.AdamW(
            [{"params": large, "weight_decay": 0.5}, {"params": small, "weight_decay": 0.0}], lr=0.02
        )

    return cut(optimizer=optimizer)


@script("dp=2,zero=1", "dp=1,offload=optimizer", *CUTS, advice="the parameters in `optimizer.param_groups`")
def moments_reset_by_loop() -> dict[str, Any]:
    """A loop that clears the moments of the model's weights (restarts of low-rank adapters)."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step == 4:
                for p in made.model.parameters():
                    if moments := made.optimizer.state.get(p):
                        moments["exp_avg"].zero_()
                        moments["exp_avg_sq"].mul_(0.1)

    return made.factories(lambda p: torch.optim.AdamW(p, lr=0.02), loop=loop)


@script(*CUTS)
def initialised_by_loop() -> dict[str, Any]:
    """Weights that the script draws again before the first step, orthogonal and normal."""
    made = Made()

    def loop(run: Any) -> None:
        for name, p in made.model.named_parameters():
            if "norm" in name:
                nn.init.constant_(p, 0.5)
            elif p.dim() > 1:
                (nn.init.kaiming_uniform_ if "up" in name else nn.init.orthogonal_)(p)
        for _, batch in run:
            run.step(batch)

    return made.factories(lambda p: torch.optim.SGD(p, lr=0.1), loop=loop)


@script("dp=2,zero=1", *CUTS)
def average_by_foreach() -> dict[str, Any]:
    """An average of the weights by `torch._foreach` functions, to which the loop goes back."""
    made = Made()

    def loop(run: Any) -> None:
        weights = [p.detach() for p in made.model.parameters()]
        average = [w.clone() for w in weights]
        for step, batch in run:
            run.step(batch)
            torch._foreach_lerp_(average, weights, 0.3)
            if step % 3 == 0:
                torch._foreach_copy_(weights, average)
            torch._foreach_mul_(weights, 0.99)

    return made.factories(lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), loop=loop)


@script(*CUTS, advice="`clip_norm`, or a rate from `out.loss`")
def rate_by_gradients() -> dict[str, Any]:
    """A loop whose rate follows the norm of the gradients that the step has left."""
    made = Made()

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            square = sum(float(p.grad.square().sum()) for p in made.model.parameters() if p.grad is not None)
            made.optimizer.param_groups[0]["lr"] = 0.3 / (1 + square**0.5)

    return made.factories(lambda p: torch.optim.SGD(p, lr=0.3), loop=loop)


@script("dp=2,zero=1", *CUTS)
def rate_by_groups() -> dict[str, Any]:
    """A loop whose rate follows the norm of the weights that the optimizer's groups have."""
    made = Made()

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            group = made.optimizer.param_groups[0]
            group["lr"] = 0.3 / sum(float(p.detach().norm()) for p in group["params"])

    return made.factories(lambda p: torch.optim.SGD(p, lr=0.3), loop=loop)
