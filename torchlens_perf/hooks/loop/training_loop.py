"""What the user's loop does, as the hooks see it: what of it ends a step, and which models it trains.

On the training thread; only the optimizers that step inside of a backward pass may do so on a thread of autograd's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import guard
from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers, parameters_of, reference_to
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.hooks.loop.trained_models import TrainedModels, living_optimizers, models_with_gradients
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.current_step import StepContent
from torchlens_perf.recorder.steps import NEVER, EvaluationRule, StepRule
from torchlens_perf.recorder.training_thread import Work
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.recorder.session import Session
    from torchlens_perf.recorder.training_thread import TrainingThread

RECOMPUTE = "recompute"  # a part of the step, as the report names it
_INSIDE_BACKWARD = 0  # stands for all optimizers that step there, often one for each parameter; no object has this id
_EVALUATION, _INFERENCE, _SKIPPED = int(Flag.EVALUATION), int(Flag.INFERENCE), int(Flag.SKIPPED)
_MAX_OPTIMIZERS = 8  # of those that step once for each parameter there are hundreds, and they cannot accumulate


class _Sample:
    """One parameter of an optimizer, and what is known of its gradient."""

    __slots__ = ("_parameter", "_seen", "passes")

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._seen: tuple[int, int, int] | None = None  # the gradient after the last backward pass
        self.passes = 0  # that it is the sum of

    def _gradient(self) -> tuple[int, int, int] | None:
        """Which tensor it is, and how often it was written to; None where there is none.

        FSDP2 adds to what a rank holds of a sharded gradient, which does not count as writing to the gradient.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return None
        return id(gradient), gradient._version, torch_private.local_part(gradient)._version

    def look(self, *, ended: bool) -> None:
        """When a backward pass begins, and when it has ended."""
        now = self._gradient()
        if now != self._seen:
            self._seen = now
            # What changes between two passes is cleared: set to None, or written to, by zero_().
            self.passes = self.passes + (now is not None) if ended else 0


class Accumulation:
    """How many backward passes an update's gradients come from: more than one only where gradients are accumulated.

    Counting forward or backward passes would take a GAN's two losses, or a gradient penalty, for accumulation. So one
    gradient of each optimizer that has stepped is looked at: a backward pass that finds one and changes it adds to it.
    On the training thread, and only until another thread runs a backward pass: that may write the same gradients.
    """

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._samples: dict[int, _Sample] = {}  # by the optimizer's id
        self._out_of_sight = torch_private.out_of_sight()
        self._most = 0  # in the step in progress

    def add(self, optimizer: Any) -> None:
        if len(self._samples) < _MAX_OPTIMIZERS:
            with self._out_of_sight():
                trained = (each for each in parameters_of(optimizer) if getattr(each, "requires_grad", False))
                parameter = next(trained, None)
            if parameter is not None:
                self._samples[id(optimizer)] = _Sample(parameter)

    def look(self, *, ended: bool) -> None:
        if not self._samples:
            return
        with self._thread.gradients:
            if not self._thread.reads_gradients:
                self._samples.clear()
                return
            with self._out_of_sight():
                for sample in self._samples.values():
                    sample.look(ended=ended)

    def optimizer_stepped(self, optimizer: Any) -> None:
        sample = self._samples.get(id(optimizer))
        if sample is not None:
            self._most = max(self._most, sample.passes)
            sample.passes = 0

    def step_ended(self) -> int:
        """The passes of the optimizer that had the most in the step that ends; 0 where no gradient was seen to change:
        sharded ones are kept elsewhere."""
        most, self._most = self._most, 0
        return most


class _Stepped(NamedTuple):
    """An optimizer that has stepped."""

    reference: Callable[[], Any]
    position: int | None
    """Among those passed to watch()."""
    class_name: str
    first_at: int
    """Steps of all optimizers, when it had made its first one."""


def _ids_of(optimizer: Any) -> set[int]:
    return {id(each) for each in parameters_of(optimizer)}


class TrainingLoop:
    """Of one session. Its callers are guarded."""

    def __init__(
        self,
        session: Session,
        passed: PassedOptimizers,
        watch_models: Callable[[Sequence[NamedModel]], None],
    ) -> None:
        self._session = session
        self._watch_models = watch_models
        self.passed = passed
        self._rule = StepRule(len(passed))
        self._evaluations = EvaluationRule()
        self._accumulation = Accumulation(session.thread)
        self._trained = TrainedModels()
        self._optimizers: dict[int, _Stepped] = {}  # that have stepped, by id, which a later one may have again
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}  # optimizers made meanwhile, and self._count then
        self._count = 0  # steps of optimizers
        self._patience: dict[tuple[int, int], int | None] = {}  # of an optimizer with another one that ends the steps
        self._said: set[str] = set()
        self._elsewhere: set[int] = set()  # optimizers that step on other threads, by id
        self._models_given = False
        self._roots: list[weakref.ref[Module]] = []  # models that are watched
        self._inside: list[Optimizer] = []  # that have stepped in the backward pass in progress
        self._forwards = 0  # with gradients, since the last boundary
        self._backwards = 0
        self._without_gradient = False
        self._skipped = False

    # -- at the begin

    def models_given(self, models: Sequence[NamedModel]) -> None:
        self._models_given = True
        self._watch(models)

    def begins_after_step_of(self, optimizer: Optimizer) -> None:
        """The loop goes on: this optimizer has just stepped."""
        self._session.thread.does(Work.OPTIMIZER)
        self._count += 1
        self._rule.optimizer_stepped(id(optimizer), self._add(optimizer).position)
        self._watch_models_of(optimizer)

    def begins_without_optimizer(self) -> None:
        """The loop goes on, after a backward pass, and there is no optimizer."""
        self._session.thread.does(Work.BACKWARD)
        self._rule.no_optimizer(alive=False)
        self._backwards_are_steps()

    # -- what hooks see

    def optimizer_made(self, optimizer: Optimizer) -> None:
        if not self._session.recorder.closed:
            address = id(optimizer)
            self._made[address] = weakref.ref(optimizer, lambda _: self._made.pop(address, None)), self._count

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """An optimizer's step has returned, or GradScaler has skipped it."""
        session = self._session
        if session.recorder.closed:
            return
        self._skipped |= skipped
        if session.recorder.backwards:
            self._inside.append(optimizer)
            return
        self._count += 1
        known = self._optimizers.get(id(optimizer))
        is_new = known is None or known.reference() is not optimizer
        if known is None or is_new:
            known = self._add(optimizer)
        self._accumulation.optimizer_stepped(optimizer)
        self._stepped(id(optimizer), known.position, optimizer, is_new=is_new)
        if is_new:
            self._watch_models_of(optimizer)

    def optimizer_elsewhere(self, optimizer: Optimizer) -> None:
        """An optimizer steps on a thread that is not recorded."""
        if id(optimizer) not in self._elsewhere:
            self._elsewhere.add(id(optimizer))
            position = self.passed.position(optimizer)
            if position is not None:
                self._rule.stepped_elsewhere(position)

    @guard("begin of a backward pass")
    def backward_begins(self) -> None:
        self._accumulation.look(ended=False)

    @guard("backward pass inside of another one")
    def backward_inside_backward(self) -> None:
        """Not torch's checkpointing; mostly another implementation, whose recomputation cannot be distinguished."""
        self._session.metadata.not_measured(RECOMPUTE)

    @guard("end of a backward pass")
    def backward_ended(self) -> None:
        self._backwards += 1
        self._accumulation.look(ended=True)
        if self._inside:
            self._stepped_inside()
            return
        rule = self._rule
        rule.backward_ended()
        if rule.lacks_optimizer():
            rule.no_optimizer(alive=len(self.passed) > 0 or bool(living_optimizers()))
            if rule.counts_backwards:
                self._backwards_are_steps()
        if rule.backward_is_step():
            self._session.step.end()

    def forward_ended(self, with_gradient: bool, module: int, is_root: bool) -> None:
        """A watched module that no other one called has returned. module: its id."""
        self._forwards += with_gradient
        self._without_gradient |= not with_gradient
        if self._rule.forward_ended(with_gradient=with_gradient, module=module, is_root=is_root):
            self._session.step.end(_INFERENCE)

    def manual_step(self) -> bool:
        return self._rule.manual_step()

    # -- for the session

    def step_ended(self, *, inference: bool) -> StepContent:
        flags = _SKIPPED if self._skipped else 0
        if not inference and self._evaluations.step_ended(without_gradient=self._without_gradient):
            flags |= _EVALUATION
        # A sum of gradients is what says it; where none is seen, as sharded ones, both passes must be there as often.
        passes = self._accumulation.step_ended() or min(self._forwards, self._backwards or self._forwards)
        self._forwards = self._backwards = 0
        self._without_gradient = self._skipped = False
        return StepContent(flags, max(1, passes))

    # -- parts

    def _stepped(
        self, optimizer: int, position: int | None, stepping: Optimizer | None = None, *, is_new: bool = False
    ) -> None:
        ignored = self._rule.ignores_passed
        before = self._rule.ending
        ending = self._optimizers.get(before or 0)
        lives = ending is None or ending.reference() is not None
        patience = None
        if stepping is not None and ending is not None and (before != optimizer or is_new):
            patience = self._patience_of(stepping, ending, is_new=is_new)
        ends = self._rule.optimizer_stepped(optimizer, position, ending_lives=lives, patience=patience)
        if before not in (None, self._rule.ending):
            self._evaluations.steps_end_elsewhere()
            name = type(stepping).__name__
            if ending is not None and stepping is not None and patience is None:
                self._say_once(
                    f"{name} took the place of {ending.class_name}: its first steps, until that was clear, count as one"
                )
            elif ending is not None and len(self.passed) and patience is not None:
                self._say_once(f"{name} has taken the place of {ending.class_name}: steps end with it from then on")
        if ends:
            self._session.step.end()
        if self._rule.ignores_passed and not ignored:
            self._session.note(
                f"{self.passed.class_names()}, passed to watch(), has not stepped: steps end with another optimizer, "
                "which does"
            )

    def _stepped_inside(self) -> None:
        optimizers, self._inside = self._inside, []
        self._count += 1
        new = [each for each in optimizers if id(each) not in self._optimizers]
        known = [self._optimizers.get(id(each)) or self._add(each) for each in optimizers]
        self._stepped(
            _INSIDE_BACKWARD, max((each.position for each in known if each.position is not None), default=None)
        )
        for optimizer in new:
            self._watch_models_of(optimizer)

    def _add(self, optimizer: Optimizer) -> _Stepped:
        added = _Stepped(
            reference_to(optimizer), self.passed.position(optimizer), type(optimizer).__name__, self._count
        )
        self._optimizers[id(optimizer)] = added
        self._patience.clear()
        return added

    def _patience_of(self, optimizer: Optimizer, ending: _Stepped, *, is_new: bool) -> int | None:
        """How many steps this one makes without `ending`, which ends the steps, before it takes its place.

        None: as many as are usual. One that steps the same parameters, or that was made since then and steps those of
        a watched model, takes it at once: training goes on in another phase.
        """
        ended = ending.reference()
        key = id(optimizer), 0 if ended is None else id(ended)
        if is_new or key not in self._patience:
            known = self._patience[key] = self._compute_patience(optimizer, ended, ending.first_at)
            if is_new and known == 0:
                self._patience[key] = 1  # from its second step on, it may be one of two that take turns
            return known
        return self._patience[key]

    def _compute_patience(self, optimizer: Optimizer, ended: Any, since: int) -> int | None:
        stepped, watched = _ids_of(optimizer), self._watched_parameters()
        is_watched, replaced = bool(stepped & watched), _ids_of(ended)
        if stepped & replaced:
            return 0
        if ended is None:
            return 0 if is_watched or not watched else None
        if is_watched and replaced and not replaced & watched:
            return 0
        if not is_watched and self._models_given and watched:
            name = type(optimizer).__name__
            self._say_once(f"{name} steps the parameters of no watched model: its steps end no step of the loop")
            return NEVER if replaced & watched else None
        made = self._made.get(id(optimizer))
        if not is_watched or made is None or made[0]() is not optimizer or made[1] < since:
            return None
        others = [each.reference() for each in self._optimizers.values()]
        return None if any(stepped & _ids_of(each) for each in others if each is not optimizer) else 0

    def _say_once(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            self._session.note(note)

    @guard("finding the trained models")
    def _backwards_are_steps(self) -> None:
        self._session.note(
            "no optimizer's step was seen: each backward pass counts as a step. To say where a step ends, call "
            "w.step() at the end of your loop"
        )
        if not self._models_given:
            self._watch(self._models_with_gradients())

    def _models_with_gradients(self) -> list[NamedModel]:
        with self._session.thread.gradients:
            if self._session.thread.reads_gradients:
                return [each for each in models_with_gradients() if not self._is_watched(each.module)]
        self._session.note("models are not timed, as several threads train: pass them to watch(model)")
        return []

    @guard("finding the trained models")
    def _watch_models_of(self, optimizer: Optimizer) -> None:
        """It has stepped for the first time: its models are watched, or it is said that they are not."""
        self._accumulation.add(optimizer)
        watched = self._watched_parameters() if self._models_given else set()
        if self._models_given and all(id(parameter) in watched for parameter in parameters_of(optimizer)):
            return  # to look for others takes as long as some steps
        new = [each for each in self._trained.of(optimizer) if not self._is_watched(each.module)]
        if not self._models_given:
            self._watch(new)
            return
        for each in new:
            name = each.name or type(each.module).__name__
            self._session.note(f"{name} is trained too, and its modules are not timed: pass it to watch() as well")

    def _is_watched(self, model: Module) -> bool:
        """Whether it is a watched model, wraps one, or is a part of one: they have parameters in common."""
        watched = self._watched_parameters()
        return any(id(parameter) in watched for parameter in model.parameters())

    def _watched_parameters(self) -> set[int]:
        roots = [root for reference in self._roots if (root := reference()) is not None]
        return {id(parameter) for root in roots for parameter in root.parameters()}

    def _watch(self, models: Sequence[NamedModel]) -> None:
        self._roots += [weakref.ref(each.module) for each in models]
        self._watch_models(models)
