"""Split proof: scripts whose parts train otherwise than the whole are refused before a step, others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool

from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.train.inspect.describe import describe
from clusterd.train.proof.cuts import BATCH, PARTS_MAX, SAMPLES, Cut
from clusterd.train.proof.results import OF_UPDATES, Difference
from tests.foreign import registry


@given(
    st.builds(Plan, dp=st.integers(1, 64), accumulation=st.integers(1, 16)),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
)
def test_a_cut_has_parts_for_every_piece_and_no_more_samples_than_a_step(
    plan: Plan, each: int, gathers: bool, small: bool
) -> None:
    pieces = plan.dp * plan.accumulation
    cut = Cut.of(plan, pieces * each, gathers=gathers, small=small)
    assert pieces % cut.parts == 0
    assert cut.parts > 1 or pieces == 1
    assert cut.samples <= pieces * each
    if not (gathers or small) and pieces <= PARTS_MAX and each > 1:
        assert cut.samples >= min(SAMPLES, pieces * each) - cut.parts
    if gathers:
        assert cut.parts == pieces


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 4), st.booleans(), st.integers(0, 60))
def test_replicas_with_more_samples_get_more_of_a_proof(
    shares: list[int], accumulation: int, small: bool, known: int
) -> None:
    plan = Plan(dp=len(shares), accumulation=accumulation, shares=tuple(share * accumulation for share in shares))
    cut = Cut.of(plan, sum(plan.shares), small=small, most=known)
    samples = [sum(cut.sizes[n] for n in cut.of_replica(plan, replica)) for replica in range(plan.dp)]
    for own, share in zip(samples, shares, strict=True):
        assert accumulation <= own <= share * accumulation
        assert (own > min(samples)) == (share > min(shares))


@pytest.fixture(scope="module")
def foreign() -> RankPool:
    pool = RankPool(
        modules=[
            "tests.foreign.whole_batch",
            "tests.foreign.diverging",
            "tests.foreign.settings",
            "tests.foreign.cut_models",
            "tests.foreign.trainers",
            "tests.foreign.networks",
            "tests.train.proof.ending",
        ]
    )
    yield pool
    pool.close()


REFUSED = [
    ("barlow_twins", "dp=2", "the loss is"),
    ("own_statistics", "accumulation=2", "the loss is"),
    ("mixup_in_forward", "dp=2", "the loss is"),
    ("negatives", "dp=2", "gradient"),
    ("hard_mining", "dp=2,accumulation=2", "of their 4 parts"),
    ("limited_experts", "dp=2,zero=3", "the loss is"),
    ("balanced_experts", "dp=2", "the loss is"),
    ("padded_mean", "dp=2", "the loss is"),
    ("clipped_by_hooks", "dp=2", "where gradients are large, the norm of the gradient of"),
    ("summed", "accumulation=2", "it is their sum, not their mean"),
    ("clipped_backward", "dp=2", "gradient"),
    ("warmed_up_by_calls", "accumulation=2", "the loss is"),
    ("signs_in_backward", "dp=2,shares=3:5", "gradient"),
    ("private", "accumulation=2", "by the same gradients: the optimizer also reads what passes leave beside gradients"),
    ("private", "dp=2,zero=1", "the norm of the update of"),
    (
        "stepped_in_hooks",
        "accumulation=2",
        "passes change trainable parameters, as an optimizer does that steps in hooks",
    ),
    ("flooded", "dp=2", "with a mean over the samples at the bound of abs(), the loss is"),
    ("weighted_by_its_value", "dp=2", "with a mean over the samples at the bound of gt(), the loss is"),
    ("free_bits", "accumulation=2", "with a mean over the samples at the bound of clamp(), the loss is"),
    ("rarely_padded", "dp=2", "the loss is"),
    ("tasks_in_turn", "accumulation=2", "gradient"),
    ("stepped_in_hooks", "dp=2,zero=1", "leave the step to the optimizer that `optimizer` returns"),
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("script", "plan", "reason"), REFUSED)
def test_what_looks_at_the_batch_is_refused_before_the_first_step(
    foreign: RankPool, tmp_path: Path, script: str, plan: str, reason: str
) -> None:
    run = foreign.run(tmp_path, plan, script=script, steps=3)
    assert {rank.exit_code for rank in run.ranks} == {96}, run.ranks[0].output
    assert run.losses == []
    for rank in run.ranks:
        assert "the result depends on how the batch is cut: " in rank.output
        assert reason in rank.output
        assert "Traceback" not in rank.output


STAGES = "pp=2,accumulation=1,schedule=gpipe"

OTHERWISE = [
    ("qkv_in_one", "tp=2", "the loss is 3.6"),
    ("auxiliary_in_attributes", "pp=2,accumulation=2", "the loss is 3.5"),
    ("other_output_when_evaluated", STAGES, "the norm of the output in evaluation mode is"),
    ("softmax_over_split", "dp=2,tp=2,zero=1", "in one process"),
    ("softmax_when_evaluated", "tp=2", "the norm of the output in evaluation mode is"),
    ("mode_dependent", STAGES, "after 4 steps, by what the script counts, "),
    ("statistic_in_a_hook", STAGES, "the loss is"),
    ("deep_supervision", "pp=2,accumulation=2", "fails where one process does not: RuntimeError"),
    ("standardised_down", "tp=2", "torch cannot compute with shards what the script does with one"),
    ("penalty_of_all_weights", STAGES, "computes with a parameter or a buffer of another stage of the pipeline"),
    ("step_within", "dp=2,zero=3", "the cut model; most often because FSDP2 gathers weights for forward passes"),
    ("statistic_in_a_hook", "dp=2,tp=2,zero=1", "the result depends on how the batch is cut"),
    ("private", "dp=2,zero=3", "the norm of the update of"),
]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("script", "plan", "reason"), OTHERWISE)
def test_a_cut_model_that_computes_something_else_is_refused_before_the_first_step(
    foreign: RankPool, tmp_path: Path, script: str, plan: str, reason: str
) -> None:
    """Shards have a part of the features, and stages nothing of what others compute."""
    run = foreign.run(tmp_path, plan, script=script, steps=12)
    assert {rank.exit_code for rank in run.ranks} == {96}, run.ranks[0].output
    assert run.losses == []
    for rank in run.ranks:
        assert reason in rank.output
        assert "Traceback" not in rank.output


EQUAL = [
    ("layer_dropped", "tp=2", ""),
    ("warmed_up_by_calls", "dp=2", ""),
    ("clipped_backward", "accumulation=2", ""),
    ("contrastive_gathered", "dp=2", ""),
    ("flooded_gathered", "dp=2", ""),
    ("loss_and_accuracy", "dp=2,accumulation=2", ""),
    ("sequential_layers", "pp=2,accumulation=2", ""),
    ("noisy_updates", "dp=2", ""),
    ("metric_of_the_batch", "dp=2", "spread is"),
    ("barlow_twins", "dp=1", ""),
    ("signs_in_backward", "dp=2,shares=4:4", ""),
    ("embedding_with_padding", "dp=2,tp=2,zero=3", ""),
    ("grouped_heads", "tp=2", ""),
    ("weighted_words", "tp=2", ""),
    ("weighted_words", "dp=2,pp=2,zero=2,accumulation=2", ""),
    ("tied_in_other_order", STAGES, ""),
    ("clipped_one_cycle", "dp=2,shares=3:5", ""),
    ("seeds_itself", "dp=2", ""),
    ("complex_weights", "dp=2", ""),
    ("priorities_by_errors", "dp=2", ""),
    ("drawn_by_data", "accumulation=2", ""),
    ("optimizers_in_a_list", "dp=2,zero=3", ""),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("script", "plan", "said"), EQUAL)
def test_what_trains_alike_is_not_accused(foreign: RankPool, tmp_path: Path, script: str, plan: str, said: str) -> None:
    alone = foreign.run(tmp_path / "alone", "dp=1", script=script, steps=4).checked()
    run = foreign.run(tmp_path / "plan", plan, script=script, steps=4).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    lines = [line for line in run.ranks[0].output.splitlines() if line.startswith("clusterd: ")]
    assert [said in line for line in lines] == [True] * bool(said), lines


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("script", "plan", "said"),
    [
        ("stream_rarely_padded", "dp=2", "was shown with the first batch of the stream: where later samples have"),
        ("replicas_semantics", "dp=2", "cuts the batch, as accepted: the loss is"),
        ("dropped_out", "dp=2", "draws random numbers"),
        ("dropout_inside", "tp=2", "draws random numbers"),
        ("layer_dropped", STAGES, "draws random numbers"),
        ("normalised", "dp=2", "is batch normalisation"),
        ("activations_logged", "dp=2", "what forward passes keep depends on dp=2, and with it what reads that"),
        ("range_for_evaluation", "dp=2", "what forward passes keep depends on dp=2, and with it what reads that"),
        ("rounded_later", "accumulation=2", "what forward passes keep depends on accumulation=2, and with it what"),
        (
            "random_slopes",
            "dp=2",
            "it is not shown that dp=2 trains as one process: random numbers that cannot be fixed",
        ),
        ("seldom_dropped", "accumulation=4", "as one process: random numbers that cannot be fixed change a step by"),
        ("too_large_whole", "tp=2", "trains as one process: the whole model does not fit one device"),
        ("ends_in_a_group", "dp=2", "trains as one process: a process of the comparison ended without a result"),
    ],
)
def test_accepted_differences_are_told_once(
    foreign: RankPool, tmp_path: Path, script: str, plan: str, said: str
) -> None:
    output = "".join(rank.output for rank in foreign.run(tmp_path, plan, script=script, steps=3).checked().ranks)
    assert output.count(said) == 1
    assert output.count("clusterd: ") == 1


def test_a_known_plan_is_not_proven_again(foreign: RankPool, tmp_path: Path) -> None:
    family = Plan.parse("dp=2").family
    run = foreign.run_each(
        tmp_path, "dp=2", [{"script": "barlow_twins", "steps": 3}], more=lambda _: {"proven": [family]}
    )[0]
    assert len(run.checked().losses) == 3


def test_replicas_that_diverge_end_at_once(foreign: RankPool, tmp_path: Path) -> None:
    run = foreign.run(tmp_path, "dp=2", script="updates_by_entropy", steps=50)
    assert {rank.exit_code for rank in run.ranks} == {92}
    assert "replicas have diverged by step 1: the norm of " in run.ranks[0].output
    assert len(run.losses) <= 2


def test_models_that_differ_between_replicas_are_refused_by_that_name(foreign: RankPool, tmp_path: Path) -> None:
    run = foreign.run(tmp_path, "dp=2", script="buffer_by_entropy", steps=3)
    assert {rank.exit_code for rank in run.ranks} == {96}
    assert "model() made different weights or buffers on different ranks" in run.ranks[0].output


def test_the_description_tells_what_the_script_accepts() -> None:
    """`clusterd show` says it."""
    accepted, other = (describe(registry.job_of(name, 3), trace=False) for name in ("replicas_semantics", "summed"))
    assert (accepted.sees_batch, other.sees_batch) == ("replica", "global")
    assert ModelShape.from_dict(accepted.to_dict()).sees_batch == "replica"


def test_a_parameter_called_update_is_not_taken_for_an_update() -> None:
    cut = Cut.of(Plan(dp=2), 8)
    for what, is_said in (("gradient of update_gate.weight", False), ("update of gate.weight", True)):
        found = Difference(1.0, f"the norm of the {what}", 1.0, 2.0, False).verdict(cut, BATCH, draws=False)
        assert (OF_UPDATES in found.difference) == is_said
