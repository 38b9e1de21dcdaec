"""State of the user's training loop: which event ends a step, and which models are trained.

All methods run on the training thread. Only optimizers that step inside a backward pass may do so
on a thread of autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import guard
from torchlens_perf.hooks.loop.passed_optimizers import (
    PassedOptimizers,
    parameters_of,
    reference_to,
)
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.hooks.loop.trained_models import (
    TrainedModels,
    living_optimizers,
    models_with_gradients,
)
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

# The report's name for this part of the step.
RECOMPUTE = "recompute"
# An id for all optimizers that step inside the backward pass, often one per parameter. No object
# has this id.
_INSIDE_BACKWARD = 0
_EVALUATION, _INFERENCE, _SKIPPED = int(Flag.EVALUATION), int(Flag.INFERENCE), int(Flag.SKIPPED)
# Optimizers that step once per parameter exist in hundreds. They cannot accumulate gradients, so
# observing the first ones is enough.
_MAX_OPTIMIZERS = 8


class _Sample:
    """One parameter of an optimizer and the state of its gradient."""

    __slots__ = ("_last_gradient", "_parameter", "passes")

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        # The gradient's identity and versions after the last backward pass.
        self._last_gradient: tuple[int, int, int] | None = None
        self.passes = 0  # Number of backward passes whose gradients are summed up.

    def _gradient(self) -> tuple[int, int, int] | None:
        """Return the gradient's id and how often it was written, or None without a gradient.

        FSDP2 adds to the local part of a sharded gradient, which does not change the version of the
        gradient itself. The result therefore contains both versions.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return None
        return id(gradient), gradient._version, torch_private.local_part(gradient)._version

    def update(self, *, ended: bool) -> None:
        """Compare the gradient at the begin (ended=False) and the end of a backward pass."""
        now = self._gradient()
        if now != self._last_gradient:
            self._last_gradient = now
            # A gradient that changes between two passes was cleared: set to None, or by zero_().
            self.passes = self.passes + (now is not None) if ended else 0


class Accumulation:
    """Counter of the backward passes whose gradients an optimizer step uses.

    The count is above one only with gradient accumulation. Counting all forward or backward passes
    would mistake a GAN's two losses or a gradient penalty for accumulation. One gradient of each
    optimizer is therefore observed: a backward pass that changes an existing gradient adds to it.

    Runs on the training thread and stops once another thread runs a backward pass, which may write
    the same gradients.
    """

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._samples: dict[int, _Sample] = {}  # By the optimizer's id.
        self._out_of_sight = torch_private.out_of_sight()
        self._max_passes = 0  # The maximum over the optimizers in the current step.

    def add(self, optimizer: Any) -> None:
        if len(self._samples) < _MAX_OPTIMIZERS:
            with self._out_of_sight():
                trained = (
                    each
                    for each in parameters_of(optimizer)
                    if getattr(each, "requires_grad", False)
                )
                parameter = next(trained, None)
            if parameter is not None:
                self._samples[id(optimizer)] = _Sample(parameter)

    def update(self, *, ended: bool) -> None:
        if not self._samples:
            return
        with self._thread.gradients:
            if not self._thread.reads_gradients:
                self._samples.clear()
                return
            with self._out_of_sight():
                for sample in self._samples.values():
                    sample.update(ended=ended)

    def optimizer_stepped(self, optimizer: Any) -> None:
        sample = self._samples.get(id(optimizer))
        if sample is not None:
            self._max_passes = max(self._max_passes, sample.passes)
            sample.passes = 0

    def step_ended(self) -> int:
        """Return the highest number of passes of any optimizer in the step that ends.

        The result is 0 if no gradient changed, as with sharded gradients that are kept elsewhere.
        """
        most, self._max_passes = self._max_passes, 0
        return most


class _Stepped(NamedTuple):
    """An optimizer that has stepped."""

    reference: Callable[[], Any]
    position: int | None
    """Position among the optimizers passed to watch(), or None."""
    class_name: str
    first_at: int
    """Number of steps of all optimizers up to the first step of this one."""


def _ids_of(optimizer: Any) -> set[int]:
    return {id(each) for each in parameters_of(optimizer)}


class TrainingLoop:
    """The training loop of one session. Callers guard against exceptions."""

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
        # Optimizers that have stepped, by id. A later optimizer may get the id of a deleted one.
        self._optimizers: dict[int, _Stepped] = {}
        # Optimizers made inside the watch, by id, with the value of self._count at that time.
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0  # Number of optimizer steps.
        # Results of _patience_of() by the ids of the optimizer and the one that ends the steps.
        self._patience: dict[tuple[int, int], int | None] = {}
        self._notes: set[str] = set()
        self._elsewhere: set[int] = set()  # Ids of optimizers that step on other threads.
        self._models_given = False
        self._roots: list[weakref.ref[Module]] = []  # The watched models.
        # Optimizers that have stepped inside the current backward pass.
        self._inside: list[Optimizer] = []
        self._forwards = 0  # Forward passes with gradients since the last step ended.
        self._backwards = 0
        self._without_gradient = False
        self._skipped = False

    # -- at the start

    def models_given(self, models: Sequence[NamedModel]) -> None:
        self._models_given = True
        self._watch(models)

    def begins_after_step_of(self, optimizer: Optimizer) -> None:
        """Start in a running loop, in which this optimizer has just stepped."""
        self._session.thread.does(Work.OPTIMIZER)
        self._count += 1
        self._rule.optimizer_stepped(id(optimizer), self._add(optimizer).position)
        self._watch_models_of(optimizer)

    def begins_without_optimizer(self) -> None:
        """Start in a running loop without optimizer, after a backward pass."""
        self._session.thread.does(Work.BACKWARD)
        self._rule.no_optimizer(alive=False)
        self._backwards_are_steps()

    # -- called by hooks

    def optimizer_made(self, optimizer: Optimizer) -> None:
        if not self._session.recorder.closed:
            address = id(optimizer)
            self._made[address] = (
                weakref.ref(optimizer, lambda _: self._made.pop(address, None)),
                self._count,
            )

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """Handle an optimizer step that has returned or that GradScaler has skipped."""
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
        """Handle an optimizer that steps on a thread that is not recorded."""
        if id(optimizer) not in self._elsewhere:
            self._elsewhere.add(id(optimizer))
            position = self.passed.position(optimizer)
            if position is not None:
                self._rule.stepped_elsewhere(position)

    @guard("begin of a backward pass")
    def backward_begins(self) -> None:
        self._accumulation.update(ended=False)

    @guard("backward pass inside of another one")
    def backward_inside_backward(self) -> None:
        """Note that recomputation is not measured: another implementation of checkpointing runs.

        torch's checkpointing does not lead to this call.
        """
        self._session.metadata.not_measured(RECOMPUTE)

    @guard("end of a backward pass")
    def backward_ended(self) -> None:
        self._backwards += 1
        self._accumulation.update(ended=True)
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
        """Handle the return of a module that no other watched module has called. module: its id."""
        self._forwards += with_gradient
        self._without_gradient |= not with_gradient
        if self._rule.forward_ended(with_gradient=with_gradient, module=module, is_root=is_root):
            self._session.step.end(_INFERENCE)

    def manual_step(self) -> bool:
        return self._rule.manual_step()

    # -- called by the session

    def step_ended(self, *, inference: bool) -> StepContent:
        flags = _SKIPPED if self._skipped else 0
        if not inference and self._evaluations.step_ended(without_gradient=self._without_gradient):
            flags |= _EVALUATION
        # Observed gradients give the number of accumulated passes. If none was observed, as with
        # sharded gradients, it is the smaller of the numbers of forward and backward passes.
        passes = self._accumulation.step_ended() or min(
            self._forwards, self._backwards or self._forwards
        )
        self._forwards = self._backwards = 0
        self._without_gradient = self._skipped = False
        return StepContent(flags, max(1, passes))

    # -- helpers

    def _stepped(
        self,
        optimizer: int,
        position: int | None,
        stepping: Optimizer | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        ignored = self._rule.ignores_passed
        before = self._rule.ending
        ending = self._optimizers.get(before or 0)
        lives = ending is None or ending.reference() is not None
        patience = None
        if stepping is not None and ending is not None and (before != optimizer or is_new):
            patience = self._patience_of(stepping, ending, is_new=is_new)
        ends = self._rule.optimizer_stepped(
            optimizer, position, ending_lives=lives, patience=patience
        )
        if before not in (None, self._rule.ending):
            self._evaluations.steps_end_elsewhere()
            name = type(stepping).__name__
            if ending is not None and stepping is not None and patience is None:
                self._note_once(
                    f"{name} has replaced {ending.class_name}: its first steps, before this was"
                    " clear, count as one"
                )
            elif ending is not None and len(self.passed) and patience is not None:
                self._note_once(
                    f"{name} has replaced {ending.class_name}: steps end with {name} from then on"
                )
        if ends:
            self._session.step.end()
        if self._rule.ignores_passed and not ignored:
            self._session.note(
                f"{self.passed.class_names()}, passed to watch(), has made no step: another"
                " optimizer ends the steps"
            )

    def _stepped_inside(self) -> None:
        optimizers, self._inside = self._inside, []
        self._count += 1
        new = [each for each in optimizers if id(each) not in self._optimizers]
        known = [self._optimizers.get(id(each)) or self._add(each) for each in optimizers]
        self._stepped(
            _INSIDE_BACKWARD,
            max((each.position for each in known if each.position is not None), default=None),
        )
        for optimizer in new:
            self._watch_models_of(optimizer)

    def _add(self, optimizer: Optimizer) -> _Stepped:
        added = _Stepped(
            reference_to(optimizer),
            self.passed.position(optimizer),
            type(optimizer).__name__,
            self._count,
        )
        self._optimizers[id(optimizer)] = added
        self._patience.clear()
        return added

    def _patience_of(self, optimizer: Optimizer, ending: _Stepped, *, is_new: bool) -> int | None:
        """Return after how many steps without `ending` this optimizer ends the steps instead.

        None stands for the default number. The result is 0 if the optimizer steps the same
        parameters. It is also 0 if the optimizer was made later and steps those of a watched model:
        training goes on in another phase.
        """
        ended = ending.reference()
        key = id(optimizer), 0 if ended is None else id(ended)
        if is_new or key not in self._patience:
            known = self._patience[key] = self._compute_patience(optimizer, ended, ending.first_at)
            if is_new and known == 0:
                # From its second step on, it may be one of two optimizers that take turns.
                self._patience[key] = 1
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
            self._note_once(
                f"{name} has no parameters of a watched model: its steps do not end steps of the"
                " loop"
            )
            return NEVER if replaced & watched else None
        made = self._made.get(id(optimizer))
        if not is_watched or made is None or made[0]() is not optimizer or made[1] < since:
            return None
        others = [each.reference() for each in self._optimizers.values()]
        return (
            None if any(stepped & _ids_of(each) for each in others if each is not optimizer) else 0
        )

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.add(note)
            self._session.note(note)

    @guard("finding the trained models")
    def _backwards_are_steps(self) -> None:
        self._session.note(
            "no optimizer's step was seen: each backward pass counts as a step. To mark where a"
            " step ends, call w.step() at the end of your loop"
        )
        if not self._models_given:
            self._watch(self._models_with_gradients())

    def _models_with_gradients(self) -> list[NamedModel]:
        with self._session.thread.gradients:
            if self._session.thread.reads_gradients:
                return [
                    each for each in models_with_gradients() if not self._is_watched(each.module)
                ]
        self._session.note(
            "models are not timed, as several threads train: pass them to watch(model)"
        )
        return []

    @guard("finding the trained models")
    def _watch_models_of(self, optimizer: Optimizer) -> None:
        """Watch the models of an optimizer after its first step, or note why they are not."""
        self._accumulation.add(optimizer)
        watched = self._watched_parameters() if self._models_given else set()
        if self._models_given and all(
            id(parameter) in watched for parameter in parameters_of(optimizer)
        ):
            return  # The search for other models takes as long as several steps.
        new = [
            each
            for each in self._trained.trained_by(optimizer)
            if not self._is_watched(each.module)
        ]
        if not self._models_given:
            self._watch(new)
            return
        for each in new:
            name = each.name or type(each.module).__name__
            self._session.note(
                f"{name} is also trained, but its modules are not timed: pass it to watch() as well"
            )

    def _is_watched(self, model: Module) -> bool:
        """Return True if the model shares parameters with a watched model.

        It is then a watched model, a wrapper of one, or a part of one.
        """
        watched = self._watched_parameters()
        return any(id(parameter) in watched for parameter in model.parameters())

    def _watched_parameters(self) -> set[int]:
        roots = [root for reference in self._roots if (root := reference()) is not None]
        return {id(parameter) for root in roots for parameter in root.parameters()}

    def _watch(self, models: Sequence[NamedModel]) -> None:
        self._roots += [weakref.ref(each.module) for each in models]
        self._watch_models(models)
