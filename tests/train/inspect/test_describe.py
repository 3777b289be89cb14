"""Description of a model without running it, good enough to choose plans."""

from __future__ import annotations

import functools
import logging
import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from scenarios import Recorded, job
from small_job import small
from torch import nn

from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.plans.stages import split_layers
from clusterd.train.inspect.describe import describe
from clusterd.train.parallel import build
from clusterd.train.parallel.optimizer_slots import ParameterSpec, optimizer_state
from clusterd.train.process.exits import Refused


def described(**options: Any) -> Any:
    return describe(job(Recorded(64), **options))


def test_parameters_and_layers_bear_global_names() -> None:
    shape = described()
    assert [layer.name for layer in shape.layers] == ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    assert [layer.block for layer in shape.layers] == [False, True, True, True, True, False]
    by_name = {p.name: p for p in shape.parameters}
    assert by_name["blocks.2.attn.qkv.weight"].layer == 3
    assert by_name["blocks.2.attn.qkv.weight"].shape == (96, 32)
    whole = sum(p.nbytes for p in job(Recorded(1)).model().parameters())
    assert shape.parameter_bytes == whole
    looked_up = [p.size_bytes for p in shape.parameters if p.name.startswith("embed.")]
    assert sum(shape.layer_weights()) == whole - sum(looked_up) + len(looked_up)


@pytest.mark.slow
def test_tensor_parallelism_is_tried_not_guessed() -> None:
    """Four heads of eight: 96 rows of qkv could be cut into eight, heads cannot."""
    shape = described()
    assert shape.tp_degrees == (2, 4)
    refused = dict(shape.tp_refused)
    assert "has 32 along dimension 1" in refused[3]
    assert "forward pass fails with 8 shards" in refused[8]
    cut = {p.name: p.tp_dim for p in shape.parameters if p.name.startswith("blocks.0.")}
    assert cut["blocks.0.up.weight"] == 0
    assert cut["blocks.0.up.bias"] == 0
    assert cut["blocks.0.down.weight"] == 1
    assert cut["blocks.0.down.bias"] == -1
    assert cut["blocks.0.norm1.weight"] == -1


def test_activations_are_those_that_autograd_keeps() -> None:
    """Counted for one sample on the meta device; checked against a real forward pass of eight."""
    samples = Recorded(64)
    shape = describe(job(samples))
    model = job(samples).model()
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.stack([samples[i][0] for i in range(8)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens)
    estimated = 8 * sum(layer.activation_bytes + layer.activation_tp_bytes for layer in shape.layers)
    assert estimated == pytest.approx(sum(kept.values()), rel=0.15)
    assert all(layer.activation_tp_bytes > layer.activation_bytes for layer in shape.layers if layer.block)
    assert all(layer.flops > 0 for layer in shape.layers if layer.name != "embed")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("optimizer", "ratio", "elementwise"),
    [
        ("adamw", 2.0, True),
        ("sgd", 0.0, True),
        ("momentum", 1.0, True),
        ("two groups", 2.0, True),
        ("rows", 0.0, False),
    ],
)
def test_optimizers_are_classified_by_behaviour(optimizer: str, ratio: float, elementwise: bool) -> None:
    shape = described(optimizer=optimizer)
    assert (shape.optimizer_state_ratio, shape.optimizer_elementwise) == (ratio, elementwise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "ratio"),
    [
        (torch.optim.AdamW, 1.0),
        (lambda p: torch.optim.AdamW(p, fused=True), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), 1.0),
        (torch.optim.Adagrad, 2.0),
    ],
)
def test_temporaries_of_an_update_are_counted_as_on_cuda(factory: Any, ratio: float) -> None:
    assert describe(replace(job(Recorded(64)), optimizer=factory)).optimizer_temporaries_ratio == ratio


@pytest.mark.slow
def test_an_update_is_made_group_by_group() -> None:
    """Stand-ins of vectors are a sixth of those of matrices; real vectors are negligible."""
    shape = describe(replace(job(Recorded(64)), optimizer=by_dimensions))
    matrices = sum(p.size_bytes for p in shape.parameters if len(p.shape) == 2)
    assert shape.optimizer_temporaries_ratio == pytest.approx(matrices / shape.parameter_bytes)


def by_dimensions(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in parameters if p.dim() == 2]}, {"params": [p for p in parameters if p.dim() != 2]}]
    return torch.optim.AdamW(groups)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("factory", [lambda p: torch.optim.AdamW(p, foreach=False), torch.optim.Adafactor])
def test_an_optimizer_that_goes_tensor_by_tensor_makes_little_at_a_time(factory: Any) -> None:
    plain = replace(job(Recorded(64)), optimizer=factory)
    assert 0 < describe(plain).optimizer_temporaries_ratio < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("looks", "known"),
    [(lambda _: None, [("bytes", (3, 32), 1), ("scales", (3, 1), 4)]), (lambda p: float(p.detach().norm()), [])],
)
def test_state_in_blocks_is_of_the_real_size_or_unknown(looks: Any, known: list[Any]) -> None:
    """A trial without values tells the shape; small stand-ins, of other sizes, do not."""

    class Blocks(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                looks(p)
                blocks = -(-p.numel() // 32)
                self.state[p] = {"bytes": torch.zeros(blocks, 32, dtype=torch.int8), "scales": torch.ones(blocks, 1)}

    found = optimizer_state(Blocks, [ParameterSpec((10, 9), torch.float32, True, {})])
    assert [(slot.name, slot.shape, slot.dtype_bytes) for slot in found.odd_slots] == known


def test_the_state_of_an_optimizer_for_gpus_alone_is_known() -> None:
    outline = ParameterSpec((10, 9), torch.float32, True, {})
    found = optimizer_state(lambda parameters: torch.optim.AdamW(parameters, capturable=True), [outline])
    assert found.slots == ((("exp_avg", 4), ("exp_avg_sq", 4)),)


def test_mixed_precision_keeps_less_of_a_sample_and_a_copy_of_the_weights() -> None:
    """The copy is not an activation: it does not grow with the batch."""
    whole, mixed = described(), described(precision="bf16")
    block, mixed_block = whole.layers[1], mixed.layers[1]
    weights = sum(p.size_bytes for p in whole.parameters if p.layer == 1 and len(p.shape) == 2)
    assert (block.cast_bytes, mixed_block.cast_bytes) == (0, weights // 2)
    kept, kept_mixed = (b.activation_bytes + b.activation_tp_bytes for b in (block, mixed_block))
    assert kept_mixed < 0.7 * kept
    assert mixed.parameters == whole.parameters
    assert mixed.signature != whole.signature


def test_a_plain_module_gets_all_that_needs_no_names() -> None:
    shape = described(layers=False, tp_plan=False)
    for plan in ("dp=4", "dp=4,zero=3,checkpointing", "dp=2,offload=optimizer,accumulation=2"):
        assert check(Plan.parse(plan), shape) == []
    for plan in ("tp=2", "pp=2,accumulation=2"):
        assert len(check(Plan.parse(plan), shape)) == 1


def test_a_model_that_computes_with_its_data_is_described_without_counts() -> None:
    """Control flow on values fails on the meta device; sizes and names are still known."""

    class Peeking(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    shape = describe(small(Peeking, {"layer": "colwise_rep"}))
    assert shape.parameter_bytes == 80
    assert shape.layers[0].activation_bytes == 0
    assert shape.tp_degrees == (2, 4)


def test_a_factory_that_looks_at_its_weights_is_described_all_the_same() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(4, 4)
        assert float(layer.weight.detach().abs().max()) < 1.0
        return nn.Sequential(layer, nn.ReLU())

    shape = describe(small(factory, {"0": "colwise_rep"}))
    assert shape.parameter_bytes == 80
    assert shape.tp_degrees == (2, 4)
    assert shape.layers[0].flops == 32


@pytest.mark.parametrize(
    ("tp_plan", "says"),
    [
        ({"blocks.*.attention": "colwise"}, "names 'blocks.*.attention', which is no module"),
        ({"1": "colwise"}, "cuts '1', a Conv1d; torch cuts Linear and Embedding"),
        ({"0.weight": "colwise"}, "cuts '0.weight', a parameter by itself; torch cuts Linear and Embedding"),
        ({"0": "diagonal"}, "has style 'diagonal'; it must be one of colwise"),
    ],
)
def test_a_tp_plan_that_does_not_fit_the_model_rules_out_tensor_parallelism_alone(
    tp_plan: dict[str, str], says: str
) -> None:
    """Models come with plans that have styles for experts and packed weights."""
    shape = describe(small(lambda: nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1)), tp_plan))
    (why,) = check(Plan.parse("tp=2"), shape)
    assert says in why
    assert check(Plan.parse("dp=2,zero=3"), shape) == []


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_weight_that_is_computed_is_not_cut(norm: Any) -> None:
    shape = describe(small(lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()), {"0": "colwise_rep"}))
    (why,) = check(Plan.parse("tp=2"), shape)
    assert "0.weight is not a parameter but computed from others" in why
    assert check(Plan.parse("dp=2,zero=2"), shape) == []


class Gated(nn.Module):
    """A replicated tensor among sharded features: a norm that all heads share, or a gate with its own layer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.gate = nn.LayerNorm(2), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))
        self._what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x) * self.scale
        with torch.no_grad():
            y.mean() * self.norm.weight
        if self._what == "norm":
            y = self.norm(y.unflatten(-1, (-1, 2))).flatten(-2)
        if self._what == "gate":
            y = y * self.gate(x).sigmoid()
        return y if self._what == "end" else self.down(y + torch.zeros_like(y))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("", ""),
        ("norm", "gradients would differ between shards: norm.weight is replicated but computed with partial features"),
        (
            "gate",
            "gradients would differ between shards: a tensor that needs a gradient (mul) is replicated but "
            "computed with partial features",
        ),
        ("end", "gradients would differ between shards: each computes the loss from a part of the features"),
    ],
)
def test_layers_whose_shards_would_diverge_are_not_tensor_parallel(what: str, why: str) -> None:
    """Each shard had the gradient of its own heads, and the weights of shards diverged."""
    tp_plan = {"up": "colwise"} if what == "end" else {"up": "colwise", "down": "rowwise"}
    for precision in ("fp32", "bf16"):
        shape = describe(small(lambda: Gated(what), tp_plan, precision=precision), tp_degrees=[2])
        assert shape.tp_degrees == (() if why else (2,))
        assert why in dict(shape.tp_refused).get(2, "")


@pytest.mark.parametrize(
    ("what", "style", "why"),
    [
        ("norm", "replicated_with_grad_allreduce", ""),
        (
            "",
            "replicated_with_grad_allreduce",
            "norm gets whole features, whose gradients replicated_with_grad_allreduce would",
        ),
        ("norm", "replicate", "norm.weight is replicated but computed with partial features"),
    ],
)
def test_a_norm_over_each_head_learns_from_all_shards_where_the_plan_says_so(what: str, style: str, why: str) -> None:
    """For a norm over all features, which every shard has, the gradient would be doubled."""

    class Around(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if what else self.norm(x.unflatten(-1, (-1, 2))).flatten(-2))

    plan = {"up": "colwise", "norm": style, "down": "rowwise"}
    shape = describe(small(lambda: Around(what), plan), tp_degrees=[2])
    assert shape.tp_degrees == (() if why else (2,))
    assert why in dict(shape.tp_refused).get(2, "")


def test_a_parameter_of_two_modules_whose_features_are_cut_is_no_tensor_parallelism() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
            self.gate.weight = self.up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) * self.gate(x))

    shape = describe(small(Twice, {"up": "colwise", "gate": "colwise", "down": "rowwise"}))
    (why,) = check(Plan.parse("tp=2"), shape)
    assert "up.weight and gate.weight are one parameter" in why


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(Refused, match="layers names 'body', which is no submodule of the model; it has 0"):
        describe(small(lambda: nn.Sequential(nn.Linear(4, 4)), None, layers=("body",)))


@pytest.mark.slow
def test_a_model_that_does_more_than_its_layers_is_no_pipeline() -> None:
    """Stages apply layers: operations between them would be dropped silently."""
    (why,) = check(Plan.parse("pp=2,accumulation=2"), described(model="scaled"))
    assert "does more than apply `layers` one after another (mul)" in why
    assert check(Plan.parse("pp=2,accumulation=2"), described(model="tables")) == []


def test_a_stage_of_which_the_optimizer_takes_nothing_is_no_stage() -> None:
    """The empty optimizer of the stage failed with a traceback."""
    shape = described(optimizer="of the head")
    assert "stage 0 of pp=2 would have nothing to train" in check(Plan.parse("pp=2,accumulation=2"), shape)
    assert check(Plan.parse("dp=2,zero=3"), shape) == []


def test_a_table_with_sparse_gradients_is_not_cut() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, sparse=True))

    of_words = replace(small(make, {"0": "colwise_rep"}), data=[(torch.arange(3), torch.zeros(3, 4))] * 8)
    shape = describe(of_words)
    (why,) = check(Plan.parse("tp=2"), shape)
    assert "the gradient of 0.weight is sparse" in why
    assert check(Plan.parse("dp=2,zero=1"), shape) == []


def test_random_draws_do_not_prevent_a_pipeline() -> None:
    mask = functools.lru_cache(lambda n: torch.ones(n).cumsum(0))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * mask(4) if random.random() < 0.5 else x

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    assert describe(small(Deep, None, layers=("blocks",))).pipeline_refused == ""


def test_a_stream_without_a_position_is_refused_as_ranks_refuse_it() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]
        def __iter__(self) -> Any:
            yield torch.zeros(4), torch.zeros(4)

    with pytest.raises(Refused, match="without a position, so that no move"):
        describe(replace(small(lambda: nn.Linear(4, 4), None), data=Stream()))


def test_a_parameter_without_elements_is_not_sharded() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_parameter("none", nn.Parameter(torch.ones(0)))
        return model

    shape = describe(small(make, None))
    (why,) = check(Plan.parse("dp=2,zero=2"), shape)
    assert "cannot cut a parameter without elements: none has none" in why
    assert check(Plan.parse("dp=2,zero=1"), shape) == []


def test_a_model_that_the_script_has_made_itself_is_left_as_it_was() -> None:
    """The first line that people write to try clusterd: `model=lambda: net`."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    before = dict(net.named_parameters())
    shape = describe(small(lambda: net, {"0": "colwise_rep", "2": "colwise_rep"}))
    assert shape.tp_degrees == (2, 4)
    assert all(p is before[name] and p.shape[0] == 4 for name, p in net.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_samples_that_a_pipeline_cannot_send() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})

    of_maps = replace(small(make, None, layers=("one", "two")), data=[({"x": torch.zeros(4)}, torch.zeros(4))] * 8)
    assert "needs one tensor as input" in describe(of_maps).pipeline_refused
    with pytest.raises(Refused, match=r"a batch must be \(input, target\).* it is a list of 3: let data\[i\] or"):
        describe(replace(of_maps, data=[(torch.zeros(4),) * 3] * 8))


def test_parameters_that_fsdp2_cannot_shard_are_known_before() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([block, nn.Linear(4, 4).bfloat16(), block])
            self.kernel = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)

    shape = describe(small(Odd, None))
    why = " | ".join(check(Plan.parse("dp=2,zero=3,checkpointing"), shape))
    assert "contiguous parameters: kernel.weight is not" in why
    assert "blocks.2 again for recomputation" in why
    assert "one dtype" not in why  # blocks are separate

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

    (why,) = check(Plan.parse("dp=2,zero=2"), describe(small(lambda: nn.Sequential(Pair()), None)))
    assert "one dtype in each block: 0.one.weight has 4 bytes per element, 0.two.weight 2" in why


def test_layers_that_share_parameters_are_cut_alike_by_ranks_and_by_whoever_plans() -> None:
    """One block, applied four times: counted four times it would be split, and trained as two."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4)] * 4)

    names = ("first", "blocks", "last")
    paths = build.layer_paths(model := Again(), names)
    weights = [0] * len(paths)
    weights[0] = weights[1] = weights[-1] = sum(p.nbytes for p in model.first.parameters())
    assert build.layer_weights(model, paths) == weights
    assert any(set(range(1, 5)) <= set(stage) for stage in split_layers(weights, 2))


def test_an_embedding_takes_no_blocks_from_its_stage() -> None:
    """Its table is looked up: a stage with a large one has as many blocks as one without."""
    blocks = {f"block{n}": nn.Linear(8, 8) for n in range(4)}
    layers = {"embed": nn.Embedding(1000, 8), **blocks, "out": nn.Linear(8, 1)}
    job = replace(small(lambda: nn.Sequential(OrderedDict(layers)), None), layers=tuple(layers))
    shape = describe(job)
    assert split_layers(shape.layer_weights(), 2) == [range(3), range(3, 6)]
    stages = [build.stage_of(job.model(), job.layers, Plan(pp=2), n, shape.layer_weights()) for n in range(2)]
    assert [sum(isinstance(m, nn.Linear) for m in stage.modules()) for stage in stages] == [2, 3]
    assert check(Plan.parse("pp=6,accumulation=6"), replace(shape, global_batch=6)) == [], "alone it is a stage, too"
    told = replace(shape, layers=tuple(replace(layer, weight=0) for layer in shape.layers))
    assert split_layers(told.layer_weights(), 2) == [range(1), range(1, 6)], "as described before layers had weights"
    assert shape.signature != told.signature


@pytest.mark.slow
def test_containers_that_are_never_called_are_no_blocks() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)])

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])
            self.out = nn.Linear(2, 2)

    assert build.block_paths(Pairs()) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert build.block_paths(Loose()) == ["out"]
    compiled = nn.Sequential(
        nn.ModuleList(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager") for _ in "ab")
    )
    assert build.block_paths(compiled) == ["0.0", "0.1"]


def test_torch_warns_of_nothing_that_fake_tensors_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    """A mixture of experts began its log with pages of tracebacks, one per trial."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    class Experts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log.error("failed while attempting to run meta for aten._grouped_mm.default")
            return super().forward(x)

    shape = describe(small(lambda: Experts(4, 4), None))
    assert sum(p.size_bytes for p in shape.parameters) == (4 * 4 + 4) * 4
    assert not caplog.records and not log.disabled


class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        powers: torch.Tensor = self.second(self.first(inputs).pow(2))
        return powers


def test_mixed_precision_counts_what_a_gpu_saves_in_float32() -> None:
    """CUDA's autocast raises to a power in float32, a CPU's in bfloat16."""
    whole, mixed = (
        describe(small(lambda: nn.Sequential(Powers()), None, precision=precision)) for precision in ("fp32", "bf16")
    )
    assert [layer.activation_bytes for layer in whole.layers] == [3 * 16]  # the inputs of three operations
    assert [layer.activation_bytes for layer in mixed.layers] == [8 + 16 + 8]
