"""Decide where a step ends, and whether the step contains an evaluation. Pure."""

from __future__ import annotations

from collections import Counter

# The optimizer that ends the steps is replaced after this many steps of another optimizer. A GAN's
# critic steps about five times for each step of the generator.
_GONE_AFTER = 32
# The lower limit if no optimizer was passed to watch(), because no step ends until the limit is
# reached. An actor may step twice for each step of its critics.
_GONE_AFTER_UNPASSED = 4
# After this many steps without another optimizer, the first one that steps twice in a row trains
# something else, such as the next fold. Optimizers that belong together take turns earlier.
_ALONE_AFTER, _GONE_AFTER_ALONE = 8, 1
NEVER = 1 << 62
# After this many steps of other optimizers, those passed to watch() are considered unused.
_UNUSED_AFTER = 3
# Number of turns after which the optimizers that step once per turn are known.
_KNOWN_AFTER = 4
# Number of backward passes that do not count as steps while an optimizer exists that has not
# stepped: gradients may be accumulating.
_MAX_ACCUMULATION = 256


class _TurnCounter:
    """Finds optimizers that step exactly once per turn of the loop. A turn begins with the step of
    the first optimizer.

    An optimizer that steps in every second turn, or twice per turn, is excluded: its step cannot
    mark the end of a turn.
    """

    def __init__(self, optimizers: int) -> None:
        self._once = set(range(optimizers))
        self._counts: Counter[int] = Counter()
        self._finished_turns = -1

    def count_step(self, position: int) -> bool:
        """Count a step of the optimizer at this position.

        Return True once, when the result becomes known.
        """
        if self.is_known:
            return False
        if position == 0:
            if self._finished_turns >= 0:
                self._once = {each for each in self._once if each == 0 or self._counts[each] == 1}
            self._finished_turns += 1
            self._counts.clear()
        self._counts[position] += 1
        return self.is_known

    @property
    def is_known(self) -> bool:
        return self._finished_turns == _KNOWN_AFTER

    def exclude(self, position: int) -> None:
        """Exclude an optimizer that steps in another loop, unless it is the only one left."""
        if len(self._once) > 1:
            self._once.discard(position)

    @property
    def last_optimizer(self) -> int:
        """Return the last optimizer that steps once per turn."""
        return max(self._once)


class StepRule:
    """Decides the step boundaries of one loop.

    - A step ends with the optimizer's step, even if GradScaler skips the optimizer's step.
    - Several optimizers that take turns make one step. The step ends with the last optimizer passed
      to watch() that steps once per turn, or else with the first optimizer that has stepped.
    - If no passed optimizer ever steps, another optimizer ends the steps.
    - A new optimizer may replace the one that ends the steps, as in a second phase of training.
    - Until an optimizer has stepped, forward passes without gradients end steps (inference).
    - In a loop without optimizers, backward passes end steps.
    - After the first w.step(), only w.step() ends steps. The first call ends no step if the same
      turn of the loop has already ended a step.
    """

    def __init__(self, passed: int = 0) -> None:
        """passed: number of optimizers passed to watch(). With 0, any optimizer may end steps."""
        self._passed = passed
        self._turns = _TurnCounter(passed)
        # Position of the passed optimizer that ends the steps.
        self._last = passed - 1
        self.ending: int | None = None
        """Id of the optimizer that ends the steps."""
        # Steps since the last boundary by optimizer, without the optimizer that ends the steps.
        self._others: Counter[int] = Counter()
        self.alone = 0
        """Number of steps in a row in which no other optimizer stepped."""
        # Number of steps by optimizers not passed to watch(), until a passed one has stepped.
        self._strangers = 0
        self._stepped = False  # True once an optimizer has stepped.
        self._backwards = 0  # Number of backward passes before an optimizer has stepped.
        # The first module called with gradients since the last backward pass.
        self._unused: int | None = None
        self._learns = False  # True if a backward pass has run since the last boundary.
        self._called: int | None = None  # The module whose calls are the steps of inference.
        self._ended = 0  # Number of steps that ended before the first w.step().
        self.learned = False
        """True if a backward pass has run since the last of these steps."""
        self.trains = passed > 0
        self.manual = False
        self.ignores_passed = False
        """True if the passed optimizers have not stepped, and others end the steps."""
        self.counts_backwards = False
        """True if there is no optimizer, and each backward pass ends a step."""

    def on_manual_step(self) -> bool:
        # In the first turn of several optimizers, a step may have ended in the middle of the turn.
        ended_already = not self.manual and (
            self._ended == 1 or (self._ended > 1 and not self.learned)
        )
        self.manual = self.trains = True
        self._others.clear()
        return not ended_already

    def repeats(self, optimizer: int, passed: int | None) -> bool:
        """Return True if each further step of this optimizer ends a step and changes nothing else.

        This holds while no other optimizer steps and w.step() is not called.
        """
        return (
            self.ending == optimizer
            and not self.manual
            and not self._others
            and (passed is None or self._turns.is_known)
        )

    def _count_step_end(self) -> bool:
        """Count a step that has ended. Return False if only w.step() ends steps."""
        if not self.manual:
            self._ended, self.learned = self._ended + 1, False
        return not self.manual

    def on_optimizer_step(
        self,
        optimizer: int,
        passed: int | None = None,
        *,
        ending_lives: bool = True,
        patience: int | None = None,
    ) -> bool:
        """Note that an optimizer has stepped, or has skipped a step because of gradients that are
        not finite.

        optimizer: the optimizer's id. passed: its position in the optimizers passed to watch(), or
        None.
        ending_lives: False if the optimizer that ends the steps has been deleted. patience: number
        of steps after which this optimizer replaces one that has stopped stepping; None for the
        default.
        """
        self._stepped, self.counts_backwards = True, False
        replaces = patience is not None and self.ending is not None
        if self._passed and not replaces:
            if passed is not None:
                if self.ignores_passed:
                    self.ignores_passed, self.ending = False, None
                self._strangers = -1  # From now on, other optimizers never end steps.
                if self._turns.count_step(passed) and self._turns.last_optimizer != self._last:
                    self._last, self.ending = self._turns.last_optimizer, None
            elif optimizer == self.ending:
                pass  # This optimizer has replaced a passed optimizer.
            elif self._strangers < 0:
                return False
            else:
                self._strangers += 1
                if self._strangers < _UNUSED_AFTER:
                    return False
                self.ignores_passed = True
        self.trains = True
        if not ending_lives and not replaces:
            self.ending = None
        if optimizer != self.ending and not self._takes_over(optimizer, passed, patience):
            self._others[optimizer] += 1
            return False
        self.ending = optimizer
        self.alone = 0 if self._others else self.alone + 1
        self._others.clear()
        return self._count_step_end()

    def exclude_optimizer(self, passed: int) -> None:
        """Note that a passed optimizer, given by position, steps on another thread and ends no step
        here.
        """
        self._turns.exclude(passed)
        if self._last == passed:
            self._last, self.ending = self._turns.last_optimizer, None

    def _takes_over(self, optimizer: int, passed: int | None, patience: int | None) -> bool:
        """Return True if this optimizer ends the steps from now on, as the first or as a
        replacement.
        """
        if patience is not None and self.ending is not None:
            return self._others[optimizer] >= patience
        if self._passed and not self.ignores_passed:
            may_end = self.ending is None and passed == self._last
            return may_end or self._others[optimizer] >= _GONE_AFTER
        return self.ending is None or self._others[optimizer] >= (
            _GONE_AFTER_ALONE if self.alone >= _ALONE_AFTER else _GONE_AFTER_UNPASSED
        )

    def on_backward_end(self) -> None:
        self._learns = self.learned = True
        self._unused = None
        if not self._stepped:
            self._backwards += 1

    def should_search_optimizer(self) -> bool:
        """Return True if it is time to check, after a backward pass, whether an optimizer exists.

        The first check follows the second pass, because w.step() may precede that pass. Later
        checks become rarer, because each check is slow.
        """
        count, settled = self._backwards, self._stepped or self.manual or self.counts_backwards
        return not settled and count >= 2 and count & (count - 1) == 0

    def note_missing_optimizer(self, *, alive: bool) -> None:
        """Note that no optimizer has stepped. alive: True if an optimizer exists."""
        self.counts_backwards = not alive or self._backwards >= _MAX_ACCUMULATION

    def does_backward_end_step(self) -> bool:
        return self.counts_backwards and self._count_step_end()

    def on_forward_end(self, *, with_gradient: bool, module: int = 0, is_root: bool = True) -> bool:
        """Note that a watched module that no other module called has returned. In inference this
        may end a step.

        module: the module's id. is_root: True for a whole model, False for a part.
        """
        if self.trains or self.counts_backwards:
            return False
        if with_gradient and (self._learns or self._unused != module):
            if self._unused is None:
                self._unused = module
            return False
        # The pass has no gradients, or its gradients are unused (inference without no_grad()).
        self._learns, self._unused = False, module if with_gradient else None
        if is_root:
            self._called = 0
            return self._count_step_end()
        if self._called is None:
            self._called = module
        return module == self._called and self._count_step_end()


class EvaluationRule:
    """Decides which steps contain an evaluation.

    A step with forward passes without gradients contains an evaluation, unless at least every
    second step has such passes. Frequent passes, as those of a teacher model, are part of training.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps so far."""
        self.lead = 0
        """Twice the number of steps with such passes, minus the number of all steps."""

    def restart(self) -> None:
        """Start again after the end of steps has moved to another event."""
        self.steps = self.lead = 1

    def decide_step_end(self, *, without_gradient: bool) -> bool:
        """Return True if the ending step contains an evaluation. without_gradient: True if the step
        had forward passes without gradients.
        """
        usual = self.steps > 0 and self.lead >= 0
        self.steps += 1
        self.lead += 1 if without_gradient else -1
        return without_gradient and not usual
