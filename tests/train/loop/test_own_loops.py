"""Changes that scripts make between steps and in updates, under every plan, after a move and after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.foreign import registry
from tests.foreign.runs import REFUSED, RIGHT, TOLD, Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    registry.load()
    groups = ["own_loops", "settings", "batches", "carried", "whole_batch", "cut_models", "trainers"]
    made = Runner(tmp_path_factory.mktemp("loops"), [f"tests.foreign.{group}" for group in groups])
    yield made
    made.close()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("script", "plan", "verdict", "says"),
    [
        ("rate_by_loop", "dp=2,zero=1", RIGHT, ""),
        ("assigned_by_loop", "dp=2,zero=3", RIGHT, ""),
        ("assigned_by_loop", "dp=1,offload=optimizer", RIGHT, ""),
        ("assigned_by_loop", "dp=2,zero=1", RIGHT, ""),
        ("clamped_by_loop", "dp=1,offload=optimizer", RIGHT, ""),
        ("assigned_by_optimizer", "dp=2,zero=3", RIGHT, ""),
        ("assigned_by_optimizer", "dp=2,zero=1", RIGHT, ""),
        ("clipped_by_past_norms", "dp=2,zero=1", REFUSED, "do not show that a tensor alone is updated as beside"),
        ("thawed_by_loop", "dp=2", RIGHT, ""),
        ("thawed_by_loop", "dp=2,zero=1", RIGHT, ""),
        ("thawed_by_loop", "dp=2,zero=3", RIGHT, ""),
        ("probed_by_loop", "dp=2,tp=2", RIGHT, ""),
        ("sampler_that_counts", "dp=2", RIGHT, ""),
        ("weight_drawn_by_loop", "dp=2", RIGHT, ""),
        ("weight_by_batch", "dp=2", REFUSED, "before step 1 the script's loop has made (loss).beta 0.7"),
        ("weight_of_rank_zero", "dp=2", REFUSED, "before step 1 the script's loop has made (loss).beta 0.1 on rank 0"),
        ("replay_filled_by_loop", "dp=2", RIGHT, ""),
        ("weights_in_an_array", "dp=2", RIGHT, ""),
        ("names_looked_up", "dp=2,zero=3", REFUSED, "changes a part of a weight (zero_.default), of which ranks have"),
        ("names_looked_up", "pp=2,accumulation=2", RIGHT, ""),
        ("batch_unpacked_by_loop", "pp=3,accumulation=4", RIGHT, ""),
        ("noisy_weights_by_loop", "tp=2", TOLD, "draws random numbers for a weight, of which ranks of tp=2 have"),
        ("noisy_weights_by_loop", "pp=2,accumulation=2", RIGHT, ""),
        ("initialised_by_loop", "pp=2,accumulation=2", RIGHT, ""),
        ("average_by_foreach", "pp=2,accumulation=2", RIGHT, ""),
        ("rate_by_gradients", "pp=2,accumulation=2", REFUSED, "of another stage of the pipeline (float)"),
        (
            "rate_by_groups",
            "pp=2,accumulation=2",
            REFUSED,
            "before step 2 the script's loop has made the learning rate",
        ),
        ("groups_by_size", "tp=2", REFUSED, "whose factory looks at sizes or values of parameters (let it look at"),
        ("moments_reset_by_loop", "tp=2", REFUSED, "looks up the optimizer's state of a parameter that this rank's"),
        ("moments_reset_by_loop", "dp=2,zero=1", RIGHT, ""),
        ("weight_by_norm_in_loop", "pp=2,accumulation=2", REFUSED, "of another stage of the pipeline (float)"),
        ("head_saved_by_loop", "pp=2,accumulation=2", REFUSED, "of another stage of the pipeline (reduce_ex)"),
        ("layerwise_rates_by_loop", "pp=2,accumulation=2", TOLD, "this stage of pp=2,accumulation=2 has 7 of 15"),
        ("mixup_by_loop", "dp=2", TOLD, "the script's loop computes with its batches"),
        ("rate_by_tokens", "dp=2", TOLD, "the script's loop computes with its batches, of which it has one of 2"),
        ("late_batch_by_loop", "dp=2", TOLD, "loss.beta: that dp=2 trains as one process was shown for its first"),
        ("mined_later", "dp=2", REFUSED, "after 4 steps, by what the script counts, "),
        ("centred_later", "dp=2,zero=3", REFUSED, "after 4 steps, by what the script counts, "),
        ("average_by_loop", "dp=2,zero=3", REFUSED, "the script copies the model (an average of its weights?)"),
        ("grown_by_loop", "one", REFUSED, "gave the optimizer a parameter that model() did not make"),
        ("head_saved_by_loop", "dp=2,zero=3", REFUSED, "saves weights or the state of its optimizer, of which a rank"),
        ("head_saved_by_loop", "tp=2", REFUSED, "saves weights or the state of its optimizer, of which a rank of"),
        ("optimizer_saved_by_loop", "dp=2,zero=1", REFUSED, "saves weights or the state of its optimizer, of which"),
        ("optimizer_saved_by_loop", "dp=2", RIGHT, ""),
        ("groups_of_the_model", "one", REFUSED, "the optimizer has parameters that its factory was not given"),
        ("balanced_by_bias", "dp=2", REFUSED, "before step 2 the script's loop has made bias a Tensor with checksum"),
        ("evaluated_on_main", "dp=2,zero=3", REFUSED, "rank 0 called the model after step 3, and rank 1 did not"),
        ("evaluated_on_main", "tp=2", REFUSED, "rank 0 called the model after step 3, and rank 1 did not"),
        ("evaluated_on_main", "dp=2", RIGHT, ""),
        ("norm_on_main", "dp=2,zero=3", REFUSED, "rank 0 computed with shards of a weight after step 3, and rank"),
        ("norm_on_main", "dp=2", RIGHT, ""),
        ("norm_on_all", "dp=2,zero=3", RIGHT, ""),
        ("norm_by_callback", "dp=2,zero=3", REFUSED, "on_step computes with the model on rank 0 alone, and ranks of"),
        ("memory_that_grows", "dp=2,zero=3", RIGHT, ""),
        ("optimizers_in_a_list", "dp=2,zero=1", RIGHT, ""),
        ("optimizers_in_a_list", "tp=2", RIGHT, ""),
        ("optimizers_in_a_list", "pp=2,accumulation=2", RIGHT, ""),
        ("order_by_world", "dp=2", REFUSED, "the sampler yields another order in the first epoch"),
        ("optimizer_in_a_wrapper", "one", REFUSED, "returned a Wrapped, which is no torch.optim.Optimizer, or has not"),
        ("sharpness_aware", "one", REFUSED, "Sharpness computes the loss several times per step (its step() needs a"),
    ],
)
def test_what_a_script_changes_is_as_in_one_process_or_named(
    runner: Runner, script: str, plan: str, verdict: str, says: str
) -> None:
    found = runner.verdicts(registry.SCRIPTS[script], [plan])[plan]
    assert found.verdict == verdict, found
    assert says in found.reason


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("annealed_by_loop", "move"),
        ("annealed_by_loop", "resume"),
        ("weight_in_a_global", "move"),
        ("curriculum_by_loop", "move"),
        ("replay_filled_by_loop", "restart"),
        ("curriculum_by_loop", "restart"),
        ("group_added_by_loop", "restart"),
        ("frozen_by_loop", "move"),
        ("rolled_out_before_the_loop", "resume"),
        ("clipped_by_past_norms", "restart"),
        ("sampler_that_counts", "resume"),
        ("set_that_grows", "restart"),
        ("weights_in_an_array", "restart"),
        ("weights_in_a_list", "move"),
        ("weights_in_a_map", "resume"),
        ("weight_in_a_shared_map", "restart"),
        ("masked_more_by_loop", "restart"),
        ("set_before_the_loop", "move"),
        ("set_before_the_loop", "restart"),
        ("schedule_registered", "move"),
        ("schedule_registered", "resume"),
        ("harder_before_each_step", "move"),
        ("counted_by_a_hook", "move"),
        ("optimizers_in_a_list", "move"),
        ("memory_that_grows", "restart"),
        ("kept_in_a_default", "move"),
        ("kept_in_a_default", "restart"),
    ],
)
def test_what_a_script_has_changed_goes_on(runner: Runner, script: str, how: str) -> None:
    found = runner.verdicts(registry.SCRIPTS[script], [how])[how]
    assert found.verdict == RIGHT, found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=1,offload=optimizer", "dp=2,zero=3"])
def test_an_evaluation_sees_what_the_optimizer_writes_for_it(runner: Runner, tmp_path: Path, plan: str) -> None:
    """An optimizer without schedule has an average for evaluations, of which a rank updates a part."""
    logged = []
    for under in ("dp=1", plan):
        run = runner._pools[0].run(tmp_path / under, under, script="schedule_free", steps=6).checked()
        logged.append({step: values["val"] for step, values in run.logged.items()})
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)
    assert len(logged[0]) == 3


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("harder_with_workers", "samples are read with it from the next epoch on"),
        ("stream_harder_with_a_worker", "samples are read with it from where the job goes on, and not before"),
    ],
)
def test_changes_that_workers_do_not_see_at_once_are_named(
    runner: Runner, tmp_path: Path, script: str, says: str
) -> None:
    (rank,) = runner._pools[0].run(tmp_path, "dp=1", script=script, steps=6).checked().ranks
    assert f".difficulty, of which data-loader workers have a copy: {says}" in rank.output


@pytest.mark.slow
def test_what_is_too_large_to_be_carried_is_named(runner: Runner) -> None:
    found = runner.verdicts(registry.SCRIPTS["replay_of_megabytes"], ["restart"])["restart"]
    assert found.verdict == TOLD, found
    assert "(data).weights, which has changed and is large, is neither migrated nor saved" in found.reason


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("script", "how", "says"),
    [
        ("rate_in_a_variable", "resume", "variables of the script's loop change (rate), and begin anew"),
        ("schedule_in_a_variable", "restart", "variables of the script's loop (schedule) have other values before its"),
        ("schedule_in_a_variable", "move", "variables of the script's loop change (schedule), and begin anew"),
        ("trainer_with_attributes", "restart", "variables of the script's loop change (self.waited), and begin anew"),
        ("counted_in_a_global_of_the_loop", "restart", "variables of the script's loop change (SEEN), and begin anew"),
        ("rewound_by_loop", "restart", "variables of the script's loop (initial) have other values before its first"),
        ("rate_behind_progress_bar", "restart", "variables of the script's loop change (best, rate), and begin anew"),
        ("rate_by_epoch", "resume", "variables of the script's loop change (rate), and begin anew"),
        ("second_loader_by_loop", "resume", "variables of the script's loop (more) have other values before its first"),
    ],
)
def test_variables_that_begin_anew_are_named(runner: Runner, script: str, how: str, says: str) -> None:
    found = runner.verdicts(registry.SCRIPTS[script], [how])[how]
    assert found.verdict == TOLD, found
    assert says in found.reason
