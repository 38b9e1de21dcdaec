"""Where a step ends. Pure: told what happens, it says whether that was the end of a step."""

from __future__ import annotations

from collections.abc import Sequence


class StepRule:
    """Decides the step boundaries of one training loop.

    A step ends with the optimizer's step. Several optimizers that take turns make one step: it ends with the last of
    those given to watch(), else with the first one seen, which is as good in a loop. Until an optimizer has stepped,
    forward passes without gradients are the steps (inference). Once the user calls w.step(), nothing else ends one.
    """

    def __init__(self, optimizers: Sequence[int] = ()) -> None:
        """optimizers: ids of those that count, in their order; empty: all do."""
        self._only = frozenset(optimizers)
        self._ending = optimizers[-1] if optimizers else None
        self._others: set[int] = set()  # optimizers that stepped since the last boundary and did not end the step
        self._backwards = 0  # since the last boundary
        self._forwards = 0  # with gradients, since the last boundary or backward pass
        self.trains = bool(optimizers)
        self.manual = False

    def manual_step(self) -> bool:
        """The user's own w.step()."""
        self.manual = self.trains = True
        self._begin()
        return True

    def optimizer_stepped(self, optimizer: int) -> bool:
        """An optimizer, by its id, has stepped."""
        if self._only and optimizer not in self._only:
            return False
        self.trains = True
        if self._ending is None or optimizer in self._others:
            self._ending = optimizer  # the first one; or the one that used to end the step has gone
        if optimizer != self._ending:
            self._others.add(optimizer)
            return False
        self._begin()
        return not self.manual

    def scaler_updated(self) -> bool:
        """GradScaler.update() ran. If no step has ended since the backward pass, the scaler has skipped it."""
        skipped = self._backwards > 0 and not self._others
        if skipped:
            self.trains = True
            self._begin()
        return skipped and not self.manual

    def backward_ended(self) -> None:
        """A backward pass has ended."""
        self._backwards += 1
        self._forwards = 0

    def forward_ended(self, *, with_gradient: bool) -> bool:
        """The model has returned. In inference, that is a step."""
        if self.trains:
            return False
        if with_gradient:
            self._forwards += 1
            if self._backwards or self._forwards == 1:
                return False
            # Gradients are on and nobody uses them: inference without no_grad().
        self._begin()
        return True

    def _begin(self) -> None:
        self._backwards = self._forwards = 0
        self._others.clear()
