"""Where a step ends, and whether it also evaluated. Pure: each rule hears what happens and says what that means."""

from __future__ import annotations

from collections import Counter

# An optimizer that used to end the step has gone when another one has stepped so often without it. A GAN's critic
# steps some five times for each step of its generator.
_GONE_AFTER = 32
# The same where none was passed, so that the one that ends the step is the first that was seen. Sooner, as steps are
# missing until then; but an actor may step twice for each step of its critics.
_GONE_AFTER_UNPASSED = 4
NEVER = 1 << 62
# What was passed to watch() never steps when other optimizers have stepped so often without it.
_UNUSED_AFTER = 3
# Turns of several optimizers, after which it is known which of them step once in each.
_KNOWN_AFTER = 4
# With an optimizer alive that has not stepped yet, gradients may be accumulated: so many backward passes are no step.
_MAX_ACCUMULATION = 256


class _Turns:
    """Which of several optimizers step exactly once in each turn of the loop. A turn begins with the first one's step.

    An actor that is updated in every second turn, or twice in it, does not say where a turn ends.
    """

    def __init__(self, optimizers: int) -> None:
        self._once = set(range(optimizers))
        self._counts: Counter[int] = Counter()
        self._turns = -1  # that are over

    def stepped(self, position: int) -> bool:
        """One of them, by its position, has stepped. Returns whether it is known just now which are the ones."""
        if self._turns == _KNOWN_AFTER:
            return False
        if position == 0:
            if self._turns >= 0:
                self._once = {each for each in self._once if each == 0 or self._counts[each] == 1}
            self._turns += 1
            self._counts.clear()
        self._counts[position] += 1
        return self._turns == _KNOWN_AFTER

    def leave_out(self, position: int) -> None:
        """Another loop steps this one. One at least is kept."""
        if len(self._once) > 1:
            self._once.discard(position)

    @property
    def last(self) -> int:
        """The last of those that do."""
        return max(self._once)


class StepRule:
    """Decides the step boundaries of one loop.

    A step ends with the optimizer's step, also if GradScaler skips it. Several optimizers that take turns make one
    step: it ends with the last of those passed to watch() that steps once in each turn, else with the first one seen,
    which is as good in a loop.
    If none of those passed ever steps and another one does, that one counts. An optimizer that takes the place of the
    one that ends the step, as in a second phase of training, ends it from then on.
    Until an optimizer has stepped, forward passes without gradients are the steps (inference); in a loop without any
    optimizer, backward passes are. Once the user calls w.step(), nothing else ends one. The first such call ends none
    where the turn of the loop that it belongs to has ended one already.
    """

    def __init__(self, passed: int = 0) -> None:
        """passed: how many optimizers were passed to watch(); 0: any optimizer ends a step."""
        self._passed = passed
        self._turns = _Turns(passed)
        self._last = passed - 1  # of those passed: it ends the step
        self.ending: int | None = None
        """The optimizer that ends the step, by its id."""
        self._others: Counter[int] = Counter()  # steps, since the last boundary, of those that did not end it
        self._strangers = 0  # steps of optimizers that were not passed, before any of those passed has stepped
        self._stepped = False  # an optimizer has
        self._backwards = 0  # before that
        self._unused: int | None = None  # the module called first, with gradients, since the last backward pass
        self._learns = False  # there was a backward pass since the last boundary
        self._called: int | None = None  # the module whose calls are the steps of inference
        self._ended = 0  # steps, before the first w.step()
        self._learned = False  # there was a backward pass since the last of them
        self.trains = passed > 0
        self.manual = False
        self.ignores_passed = False
        """Other optimizers than those passed end the steps, as those passed have not stepped."""
        self.counts_backwards = False
        """No optimizer is there: each backward pass ends a step."""

    def manual_step(self) -> bool:
        # In its first turn, a loop of several optimizers has had a boundary in the middle.
        ended_already = not self.manual and (self._ended == 1 or (self._ended > 1 and not self._learned))
        self.manual = self.trains = True
        self._others.clear()
        return not ended_already

    def _ends(self) -> bool:
        """Whether what has just happened ends a step, as the user ends none himself."""
        if not self.manual:
            self._ended, self._learned = self._ended + 1, False
        return not self.manual

    def optimizer_stepped(
        self, optimizer: int, passed: int | None = None, *, ending_lives: bool = True, patience: int | None = None
    ) -> bool:
        """An optimizer, by its id, has stepped, or would have but for a gradient that is not finite.

        passed: which of the optimizers passed to watch() it is, by position; None: none of them. ending_lives: False
        where the one that ends the steps has been deleted. patience: how many steps it makes without the one that ends
        the steps before it takes that one's place; None: as many as are usual.
        """
        self._stepped, self.counts_backwards = True, False
        replaces = patience is not None and self.ending is not None
        if self._passed and not replaces:
            if passed is not None:
                if self.ignores_passed:
                    self.ignores_passed, self.ending = False, None
                self._strangers = -1  # what was passed steps: others never count
                if self._turns.stepped(passed) and self._turns.last != self._last:
                    self._last, self.ending = self._turns.last, None
            elif optimizer == self.ending:
                pass  # it has taken the place of one that was passed
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
        if self._others:
            self._others.clear()
        return self._ends()

    def stepped_elsewhere(self, passed: int) -> None:
        """An optimizer passed to watch(), by its position, steps in another thread's loop: it ends no step here."""
        self._turns.leave_out(passed)
        if self._last == passed:
            self._last, self.ending = self._turns.last, None

    def _takes_over(self, optimizer: int, passed: int | None, patience: int | None) -> bool:
        """Whether this one ends the steps from now on: it is the first one, or the one that ended them has gone."""
        if patience is not None and self.ending is not None:
            return self._others[optimizer] >= patience
        if self._passed and not self.ignores_passed:
            may_end = self.ending is None and passed == self._last
            return may_end or self._others[optimizer] >= _GONE_AFTER
        return self.ending is None or self._others[optimizer] >= _GONE_AFTER_UNPASSED

    def backward_ended(self) -> None:
        self._learns = self._learned = True
        self._unused = None
        if not self._stepped:
            self._backwards += 1

    def lacks_optimizer(self) -> bool:
        """Whether to look now, after a backward pass, if there is an optimizer at all.

        After the second one, as w.step() may come before it, and then ever more rarely: looking takes long.
        """
        count, settled = self._backwards, self._stepped or self.manual or self.counts_backwards
        return not settled and count >= 2 and count & (count - 1) == 0

    def no_optimizer(self, *, alive: bool) -> None:
        """None has stepped so far. alive: whether there is one that may still do so."""
        self.counts_backwards = not alive or self._backwards >= _MAX_ACCUMULATION

    def backward_is_step(self) -> bool:
        return self.counts_backwards and self._ends()

    def forward_ended(self, *, with_gradient: bool, module: int = 0, is_root: bool = True) -> bool:
        """A watched module that no other one called has returned. In inference, that may be a step.

        module: its id. is_root: it is a whole model; else its model was not called, but parts of it are.
        """
        if self.trains or self.counts_backwards:
            return False
        if with_gradient and (self._learns or self._unused != module):
            if self._unused is None:
                self._unused = module
            return False
        # Without gradients; or gradients are on and nobody uses them: inference without no_grad().
        self._learns, self._unused = False, module if with_gradient else None
        if is_root:
            self._called = 0
            return self._ends()
        if self._called is None:
            self._called = module
        return module == self._called and self._ends()


class EvaluationRule:
    """Tells steps that also evaluate from those of a loop that always runs a part without gradients.

    A step with forward passes without gradients has evaluated, unless every other step has some, or more: then they
    are a part of training, such as a target network, a teacher, or an agent that acts.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._without_gradient = 0

    def steps_end_elsewhere(self) -> None:
        """What was seen until here tells nothing of the steps to come; the one in progress holds parts of two."""
        self._steps = self._without_gradient = 1

    def step_ended(self, *, without_gradient: bool) -> bool:
        """Whether the step that ends here has evaluated. without_gradient: it held such forward passes."""
        usual = self._steps > 0 and 2 * self._without_gradient >= self._steps
        self._steps += 1
        self._without_gradient += without_gradient
        return without_gradient and not usual
