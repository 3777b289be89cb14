"""The script's callbacks, which rank 0 alone calls: what they change in the training, the other ranks would not."""

from __future__ import annotations

from typing import Any

from clusterd.train.loop.replicas import is_sampled
from clusterd.train.process import held
from clusterd.train.process.control import Control
from clusterd.train.state.training import Training


class Callbacks:
    """Calls callbacks, and watches some calls for changes of what the next steps compute with.

    A change is told, and where there are other ranks, all refuse the plan between two steps.
    """

    def __init__(self, training: Training, control: Control) -> None:
        self._training, self._control = training, control
        self._calls: dict[str, int] = {}
        self._told = False

    def call(self, name: str, step: int, values: Any) -> None:
        """Call the callback of this name, if the script has it."""
        callback = getattr(self._training.job, name)
        if callback is None:
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        if self._told or not is_sampled(self._calls[name]):
            callback(step, values)
            return
        before = self._numbers()
        callback(step, values)
        now = self._numbers()
        changed = next((key for key, value in before.items() if now.get(key, value) != value), None)
        if changed is not None:
            self._refuse(f"{name} has changed {changed} from {before[changed]} to {now[changed]}")

    def _refuse(self, change: str) -> None:
        self._told = True
        text = (
            f"{change}, but is called on rank 0 alone: what training depends on belongs into a scheduler, into "
            "forward(), or into a loop of the script's own (clusterd.train.session), which every rank runs"
        )
        if self._training.context.plan.ranks > 1:
            self._control.request("refuse", text)
        else:
            print(f"clusterd: {text}; plans of several ranks are refused", flush=True)

    def _numbers(self) -> dict[str, str]:
        """Numbers, and texts, that modules, loss, data and optimizer hold, by name; and learning rates.

        As text, in which a value that is not a number equals itself.
        """
        training = self._training
        roots = {**training.attributes.roots, "(data)": training.job.data}
        found = {
            held.path(name.rstrip("."), attribute): str(value)
            for name, owner in held.owners(roots).items()
            for attribute, value in owner.attributes.items()
            if isinstance(value, held.SIMPLE)
        }
        return found | {f"the learning rate of {name}": str(rate) for name, rate in training.rates().items()}
