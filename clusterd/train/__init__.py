"""Training front end: ``from clusterd import train``, then one call of `train.run`, or a loop in a `train.session`.

The script passes what every torch script has: a model factory, a loss, a data set, an optimizer factory and the global
batch size. The parallel *plan* comes from outside: from clusterd's agent, from ``torchrun`` with
``CLUSTERD_PLAN="dp=2,tp=2"``, or not at all, in which case one process trains alone.

Guarantees under every plan, and across changes of plan:

- **Loss and gradient** are those of the mean over the global batch, whatever the replicas' shares; losses equal those
  of one process to float tolerance. `loss` must return a mean over the samples it is given, or a sum and its weight.
- **Sample order** is a function of (seed, epoch): global batch k of an epoch is entries [k * B, (k + 1) * B) of the
  order, cut into contiguous shares; a partial last batch is dropped. The plan does not change it. A stream gives its
  own order: every rank reads all of it, keeps its share, and goes on at its position.
- **The script starts under one seed** of Python, NumPy and torch and one hash seed in every process of a job, also
  after migrations and restarts; the job's id determines it. A ``random_split`` before `run` splits alike everywhere.
  Length and a few samples of the data are compared between processes; a difference is refused.
- **Initial weights** are those that the factory makes under the seed, the same on every rank. The factory must draw
  from torch's, NumPy's or Python's global generator, and be callable on torch's meta device.
- **Random numbers in a step** (torch's, NumPy's and Python's: dropout, stochastic depth) depend on (seed, step,
  replica, stage): repeatable under one plan, statistically equal under another, which the log says. A data set that
  draws from these generators gets numbers by (seed, step, replica), equal on all stages; in data-loader workers they
  are not repeatable across plans. The script's own loop draws the same numbers on all ranks.
- **Names** of parameters and their optimizer state are global (``blocks.17.attn.qkv.weight``) on every rank.
- **Buffers** (running statistics) are taken from replica 0. Batch normalisation sees the samples of a replica and a
  micro-batch, so that losses depend on how the plan cuts the batch, which the log says. What modules, the optimizer
  and the loss keep in themselves and in objects that they hold is migrated and saved too: numbers, text, lists and
  maps of these, tensors and arrays of at most 256 KiB, states of generators, and of objects that save their own. The
  log names what changes and is not carried.
- **Parameter attributes and hooks** follow the parameter: attributes (``p.no_decay = True``), which the optimizer
  factory may use to form groups, and hooks, which see the gradient of one replica and one micro-batch, as everywhere
  in torch. A hook that does more than scale the gradient rules out plans that cut the batch.
- **Plans that change the result are refused**, by proof: before the first step under a plan that cuts the batch or the
  model, children of the ranks compute a few samples as a whole and in the plan's parts. Where losses or gradients
  differ by more than rounding, the plan is refused with the numbers, unless the batch is cut and
  ``sees_batch="replica"`` accepts it. Before a
  migration switches, the target ranks make the two steps after a state of the source ranks, and compare. After a
  restart from a checkpoint, the first step must have the loss that it had where that was written. The set of trainable
  parameters is fixed when the model is made: none can become trainable later.
- **Replicas are compared**: 1, 2, 4, ... and every hundred steps after a start, parameters and optimizer state must be
  the same; a difference ends the job. What an optimizer draws is the same on all replicas.
- **Evaluation** (`Evaluation`) counts each sample once under every plan, in evaluation mode, with the buffers of
  replica 0, and changes no state of training. A stop or a migration ends it between two batches, and it is repeated.
- **A stop** (the agent's, or SIGTERM) takes effect at the end of a step, the same one on all ranks.

Importing this package imports neither torch nor CUDA; a fork server imports `clusterd.train.process.preload`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterd.process_attributes import SEED_VARIABLE, seed_generators
from clusterd.train.process.evaluation import Evaluation as Evaluation

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from clusterd.train.loop.session import Session
    from clusterd.train.process.job import Outcome

__all__ = ["Evaluation", "gather", "run", "session"]

with contextlib.suppress(ImportError):  # without fsspec nothing can open clusterd:// paths
    import fsspec

    fsspec.register_implementation("clusterd", "clusterd.train.data.dataset_fs.DatasetFileSystem", clobber=True)


if SEED_VARIABLE in os.environ:
    # A rank that runs in an interpreter of its own; a fork is seeded by its fork server.
    seed_generators(os.environ[SEED_VARIABLE])


def run(
    *,
    model: Callable[[], Any],
    loss: Callable[[Any, Any], Any] | Mapping[str, Callable[[Any, Any], Any]],
    data: Any,
    optimizer: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]],
    global_batch: int,
    steps: int,
    seed: int = 0,
    layers: Sequence[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
    num_workers: int = 0,
    sampler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    precision: str = "fp32",
    find_unused_parameters: bool = False,
    sees_batch: str = "global",
    save: str | None = None,
    save_format: str = "torch",
    init_from: str | None = None,
    init_strict: bool = True,
    evaluate: Evaluation | None = None,
    loggers: Sequence[Any] = (),
    on_step: Callable[[int, dict[str, Any]], object] | None = None,
    on_evaluate: Callable[[int, dict[str, float]], object] | None = None,
    on_checkpoint: Callable[[int, str], object] | None = None,
    stage: str = "",
) -> Outcome:
    """Train to the last step, or until a stop, under the plan that the environment names.

    Args:
        model: makes the module; called under the seed, more than once (also on the meta device). A model that is in
            evaluation mode as a whole is put into training mode.
        loss: (model output, target) to the mean loss over the samples given; or to a pair (sum, weight), whose sums
            over the global batch are divided (masked words: the sum over them, and their number), exact under every
            plan; or to a dict with one of these as ``loss`` and further values, or (loss, dict), which are reduced
            over replicas and micro-batches like it and logged as metrics. A dict of functions (model, batch), with
            `optimizer` a dict of the same keys: losses of submodules, which a step updates in this order.
        data: map-style data set of (input, target), either of them nested; or of mappings, for ``model(**batch)`` and
            ``loss(output, batch)``. Or a stream of such samples: an iterable whose ``state_dict`` and
            ``load_state_dict`` save and set its position.
        optimizer: parameters to `torch.optim.Optimizer`, or to a list of some (Muon for matrices, AdamW for the rest),
            each for parameters of its own; called more than once. Under some plans the parameters are
            this rank's shards of the model's parameters, with the same number of dimensions. A factory whose argument
            is named ``named_parameters`` gets pairs of global name and parameter.
        global_batch: samples per step over all replicas; the plan does not change it.
        layers: for pipeline parallelism, the submodules that the model applies one after another; a ModuleList
            counts as its items. Without it, no pipeline.
        tp_plan: for tensor parallelism, style by module name (``{"blocks.*.attn.qkv": "colwise"}``; Hugging Face's
            style names). Modules must accept a shard of their features: infer head counts with -1, do not store them.
            Trainable modules that compute with such shards must be sharded too, or be
            ``replicated_with_grad_allreduce`` (a norm that all heads share). An unsupported plan rules out tensor
            parallelism and nothing else.
        scheduler: optimizer to learning-rate scheduler, stepped once per step; by epochs, or by the monitored metric of
            `evaluate`, if it needs them.
        clip_norm: limit of the gradients' global 2-norm.
        num_workers: data-loader processes per rank, at most one for a stream; with 0 samples are read between steps.
        sampler: order of the samples of a map-style data set: an iterable of their numbers, as torch's samplers are, or
            of lists of `global_batch` of them. It is iterated once per epoch under (seed, epoch), alike on every rank;
            each epoch must have as many. Default: a permutation.
        collate_fn: a list of samples to one batch: (input, target), or a mapping. Micro-batches (accumulation,
            pipelines) are cut along the first dimension of each tensor in it, which must be the sample dimension.
            Default: torch's own.
        precision: "bf16" computes forward pass and loss under torch's autocast; parameters, gradients and optimizer
            state keep their dtype. Losses under different plans are then equal to that precision.
        find_unused_parameters: the set of parameters that get a gradient may differ between steps or replicas (experts,
            stochastic depth). Costs a walk of the graph per step, and rules out ZeRO-2 and ZeRO-3.
        sees_batch: "replica": a loss or a model that looks at the whole batch sees one replica's part of it, as under
            torch's DistributedDataParallel: results then depend on the plan. By default plans that change them are
            refused.
        save: file for the trained model, relative to the working directory: its whole ``state_dict``, written by
            rank 0 after the last step, or when the target loss is reached. A stopped run writes none.
        save_format: "torch"; "safetensors"; or "hf": a folder as of ``save_pretrained``, with the model's ``config``.
        init_from: weights to start from: a file of torch or safetensors, a folder of Hugging Face's (one file or an
            index of several), or a distributed checkpoint. Each rank reads its shards; a model that the files cover
            is made without values. Jobs that go on, after a move or from a checkpoint, do not read it.
        init_strict: False: what the files lack stays as the factory made it, and what they have beyond it is ignored.
        evaluate: when and on which data to evaluate the model; see `Evaluation`.
        loggers: where rank 0 writes the numbers of steps, evaluations and ``log``, beside the step log: "tensorboard",
            "wandb", or objects with ``write(step, values)`` and, if they want it, ``close()``.
        on_step: called on rank 0 with each finished step and its entry in the step log: ``loss``, ``lr``,
            ``samples_per_s``, ``grad_norm`` (with `clip_norm`), ``metrics``. It may come one step later.
        on_evaluate: called on rank 0 with the step and the metrics of each evaluation. Callbacks that change numbers of
            the model, the loss, the data or the optimizer rule out plans of several ranks.
        on_checkpoint: called on rank 0 with the step and the directory of each checkpoint that is complete.
        stage: name, in a script that trains several times. Each stage is a job of its own under clusterd (``submit
            --stages``), in which the calls for the other stages return at once; elsewhere they run one after another.
    Returns:
        The last step done, its loss, and the reason for a stop, if any. Under clusterd a stopped run does not
        return: the process exits with code 0.
    Raises:
        SystemExit: after one line on standard error; 92 the script's request is invalid, 93 the GPU failed, 94 no
            host that has its data can be reached, 95 out of device memory, 96 the job cannot train under this plan, 97
            torch cannot be imported or cannot use the device, 98 the rendezvous port is taken.
    """
    arguments = dict(locals())
    rank_main, job = _engine()
    outcome: Outcome = rank_main.run(job(arguments))
    return outcome


def session(**arguments: Any) -> AbstractContextManager[Session]:
    """Training whose loop the script owns, with the arguments of `run`.

    ::

        with train.session(model=..., optimizer=..., data=..., global_batch=..., loss=..., steps=...) as run:
            for step, batch in run:  # from the right step on, under whatever plan
                out = run.step(batch)
                if step % 500 == 0:
                    run.log(val_loss=run.evaluate(val_data))

    Stops, migrations, checkpoints and recovery work as in `run`: between two steps, when the loop asks for a batch. All
    ranks must go through the same calls; `out.loss` and results of ``evaluate`` are the same on all of them. Local
    variables do not travel: ``run.register(name, object)`` makes the state of an object part of the training state.
    Leaving the loop early, on all ranks, ends the job as done.
    """
    rank_main, job = _engine()
    opened: AbstractContextManager[Session] = rank_main.session(job(arguments))
    return opened


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of `tensor` on all replicas, in the order of samples, for a loss or a model that compares samples.

    A contrastive loss computes with the gathered features of the whole global batch, and is then the same under every
    number of replicas; a queue of features (MoCo) that gets the gathered ones is the same on all of them. Gradients
    flow back to the replica that has the sample. All replicas must make the same calls. Outside of a step, as in an
    evaluation, it returns `tensor`.

    Args:
        tensor: its first dimension is that of this replica's samples, or a multiple.
    Raises:
        SystemExit: code 96: the plan cuts the samples into micro-batches; 92: there are no rows for each sample.
    """
    from clusterd.train.parallel import gather as replicas

    gathered: torch.Tensor = replicas.gather(tensor)
    return gathered


def _engine() -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    """Import torch and the engine, and return it with the constructor of its job."""
    try:
        from clusterd.train.process import (
            torch_version as torch_version,
        )  # the version check comes before every use of torch
        from clusterd.train import rank_main  # isort: skip
        from clusterd.train.parallel import alternating
        from clusterd.train.process import exits, job
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        import sys

        from clusterd.train.process import exits

        exits.exit_with(
            exits.NoTorch(
                f"{sys.executable} cannot import torch ({error}); name a Python that has it as `python` of the job"
            )
        )

    def job_of(arguments: dict[str, Any]) -> Any:
        try:
            job.check_arguments(arguments)
        except exits.Refused as error:
            exits.exit_with(error)
        given = {name: value for name, value in arguments.items() if name != "collate_fn" or value is not None}
        if isinstance(given.get("loss"), Mapping):
            given["losses"], given["loss"] = given["loss"], alternating.no_single_loss
        if isinstance(factories := given.get("optimizer"), Mapping):
            given["optimizer_parts"] = tuple(factories)
            given["optimizer"] = alternating.alternating_factory(factories)
        elif factories is not None:
            given["optimizer"] = alternating.joined_factory(job.adapt_optimizer_factory(factories))
        given["layers"] = tuple(given.get("layers", ()))
        return job.Job(**given)

    return rank_main, job_of
