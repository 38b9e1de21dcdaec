"""Where a step ends. Pure: told what happens, it says whether that was the end of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# An optimizer that watch() was told of, and that used to end the step, has gone when another one has stepped so often
# without it. A GAN's critic steps some five times for each step of its generator.
_GONE_AFTER = 32


class StepRule:
    """Decides the step boundaries of one training loop.

    A step ends with the optimizer's step, also if GradScaler skips it. Several optimizers that take turns make one
    step: it ends with the last of those given to watch(), else with the first one seen, which is as good in a loop.
    Until an optimizer has stepped, forward passes without gradients are the steps (inference). Once the user calls
    w.step(), nothing else ends one.
    """

    def __init__(self, optimizers: Sequence[int] = ()) -> None:
        """optimizers: ids of those that count, in their order; empty: all do."""
        self._only = frozenset(optimizers)
        self._ending = optimizers[-1] if optimizers else None
        self._others: Counter[int] = Counter()  # steps, since the last boundary, of those that did not end it
        self._unused = False  # the last forward pass was with gradients, and there was no backward pass since
        self._learns = False  # there was a backward pass since the last boundary
        self.trains = bool(optimizers)
        self.manual = False

    def manual_step(self) -> bool:
        """The user's own w.step()."""
        self.manual = self.trains = True
        self._others.clear()
        return True

    def optimizer_stepped(self, optimizer: int) -> bool:
        """An optimizer, by its id, has stepped, or would have but for a gradient that is not finite."""
        if self._only and optimizer not in self._only:
            return False
        self.trains = True
        if optimizer != self._ending:
            if self._ending is not None and self._others[optimizer] < (_GONE_AFTER if self._only else 1):
                self._others[optimizer] += 1
                return False
            self._ending = optimizer  # the first one; or the one that used to end the step has gone
        if self._others:
            self._others.clear()
        return not self.manual

    def backward_ended(self) -> None:
        """A backward pass has ended."""
        self._learns = True
        self._unused = False

    def forward_ended(self, *, with_gradient: bool) -> bool:
        """The model has returned. In inference, that is a step."""
        if self.trains:
            return False
        if with_gradient and (self._learns or not self._unused):
            self._unused = True
            return False
        # Without gradients; or gradients are on and nobody uses them: inference without no_grad().
        self._learns, self._unused = False, with_gradient
        return True
