"""What a training script imports: ``from clusterd import train``, then one call of `train.run`.

The script gives what every torch script has: a model factory, a loss, a data set, an optimizer factory, the global
batch. How the work is spread over processes (the *plan*) comes from outside: from clusterd's agent, from
``torchrun`` with ``CLUSTERD_PLAN="dp=2,tp=2"``, or not at all, and then one process does everything.

What holds under every plan, and across changes of plan:

- **Loss and gradient** are those of the mean over the global batch, whatever the replicas' shares; losses equal those
  of one process to float tolerance. `loss` must be a mean over the samples it is given.
- **Samples** come in an order made of (seed, epoch): global batch k of an epoch is entries [k * B, (k + 1) * B) of it,
  cut into contiguous shares; a partial last batch is dropped. No plan changes that.
- **Initial weights** are those that the factory makes under the seed, on every rank alike; it must draw from torch's,
  NumPy's or Python's global generator, and be callable on torch's meta device.
- **Random numbers in a step** (torch's, NumPy's and Python's: dropout, layers left out) depend on (seed, step, replica,
  stage): repeatable under one plan, statistically equal under another. What a data set draws from these generators does
  so too, by (seed, step, replica), alike on all stages; in data-loader workers it is not repeatable across plans.
- **Names** of parameters and their optimizer state are global (``blocks.17.attn.qkv.weight``) on every rank.
- **Buffers** (running statistics) count as replica 0 has them. Where losses depend on them, or on other samples of the
  batch (batch normalisation), they depend on how the plan cuts the batch. Numbers, and lists and maps of some, that a
  module, the optimizer or the loss keeps in plain attributes are carried too; tensors there are not: register them.
  Where each forward pass counts, micro-batches count as well, which the log tells.
- **What hangs on parameters** goes where they go: attributes (``p.no_decay = True``), by which the optimizer's groups
  may be made, and hooks, which see the gradient of one replica and one micro-batch, as everywhere in torch. One that
  does more than scale it rules out plans that cut the batch.
- **What would not hold** under a plan rules that plan out, with its reason: a forward pass that writes into parameters
  (``max_norm``, moving averages kept as parameters), gradients that are added or clipped on the way back, a loss that
  is a sum, or computes with parameters. A loss that is a mean over what counts in the samples (words that are not
  padding) is told of in the log. Which parameters train is settled when the model is made: none can begin to later.
- **A stop** (the agent's, or SIGTERM) takes effect at the end of a step, the same one on all ranks.

Importing this package imports neither torch nor CUDA; `clusterd.train.process.preload` is what a fork server imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterd.train.process.job import Outcome

__all__ = ["run"]

with contextlib.suppress(ImportError):  # without fsspec there is nothing that could open clusterd://
    import fsspec

    fsspec.register_implementation("clusterd", "clusterd.train.data.dataset_fs.DatasetFileSystem", clobber=True)


def run(
    *,
    model: Callable[[], Any],
    loss: Callable[[Any, Any], Any],
    data: Any,
    optimizer: Callable[[Any], Any],
    global_batch: int,
    steps: int,
    seed: int = 0,
    layers: Sequence[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    precision: str = "fp32",
    find_unused_parameters: bool = False,
    save: str | None = None,
) -> Outcome:
    """Trains to the last step, or until it is stopped, under the plan that the surroundings name.

    Args:
        model: makes the module; called under the seed, more than once (also on the meta device). One that comes in
            evaluation mode as a whole is put into training mode.
        loss: (model output, target) to the mean loss over the samples given.
        data: map-style data set of (input, target).
        optimizer: parameters to `torch.optim.Optimizer`; called more than once. Under some plans the parameters are
            this rank's parts of the model's, with as many dimensions. One whose argument is called
            ``named_parameters`` is given pairs of global name and parameter.
        global_batch: samples per step over all replicas; the plan does not change it.
        layers: for pipeline parallelism, the submodules that the model applies one after another; a ModuleList
            counts as its items. Without it, no pipeline.
        tp_plan: for tensor parallelism, style by module name (``{"blocks.*.attn.qkv": "colwise"}``; Hugging Face's
            words). Modules must cope with a part of their features: infer head counts with -1, do not store them.
            What is trained and computes with such parts must be cut too, or be ``replicated_with_grad_allreduce``
            (a norm that all heads share). A plan that cannot be carried rules out tensor parallelism, nothing else.
        scheduler: optimizer to learning-rate scheduler, stepped once per step.
        clip_norm: limit of the gradients' global 2-norm.
        num_workers: data-loader processes per rank; with 0 samples are read between steps.
        collate_fn: a list of samples to one (input, target). Micro-batches (accumulation, pipelines) are cut along the
            first dimension of each tensor in it, which must then be that of the samples. Without it, torch's own.
        precision: "bf16" computes forward pass and loss under torch's autocast; parameters, gradients and optimizer
            state stay as they are. Losses under different plans are then equal to that precision.
        find_unused_parameters: which parameters get a gradient may differ between steps, or between replicas (experts,
            layers that are dropped at random). Costs a walk of the graph per step, and rules out ZeRO-2 and ZeRO-3.
        save: file for the trained model, relative to the working directory: its whole ``state_dict``, written by
            rank 0 after the last step, or when the target loss is reached; a run that is stopped leaves none.
    Returns:
        The last step done, its loss, and who stopped the run, if anyone. Under clusterd a stopped run does not
        return: the process ends with exit code 0.
    Raises:
        SystemExit: after one line on standard error; 92 what the script asks for cannot be, 93 the GPU failed, 94 no
            host that has its data can be reached, 95 out of device memory, 96 the job cannot train under this plan, 97
            torch cannot be imported or cannot use the device, 98 the rendezvous port is taken.
    """
    try:
        from clusterd.train.process import torch_version as torch_version  # before all that needs it
        from clusterd.train import rank_main  # isort: skip
        from clusterd.train.process import job
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
    return rank_main.run(
        job.Job(
            model=model,
            loss=loss,
            data=data,
            optimizer=job.adapt_optimizer_factory(optimizer),
            global_batch=global_batch,
            steps=steps,
            seed=seed,
            layers=tuple(layers),
            tp_plan=tp_plan,
            scheduler=scheduler,
            clip_norm=clip_norm,
            num_workers=num_workers,
            **({"collate_fn": collate_fn} if collate_fn is not None else {}),
            precision=precision,
            find_unused_parameters=find_unused_parameters,
            save=save,
        )
    )
