"""Track the user's training loop: which event ends a step, and which models are trained.

All methods run on the training thread. The exception is on_optimizer_step(), which runs on a thread
of autograd if an optimizer steps inside a backward pass.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import guard
from torchlens_perf.hooks import module_tree
from torchlens_perf.hooks.loop.passed_optimizers import (
    NO_GRADIENT,
    PassedOptimizers,
    collect_parameter_ids,
    create_reference,
    find_trained_parameter,
    read_gradient_version,
)
from torchlens_perf.hooks.loop.selection import NamedModel, name_models, unwrapped_class_name
from torchlens_perf.hooks.loop.trained_models import CalledModules, has_optimizer_class
from torchlens_perf.interruption import suppress
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.steps import NEVER, EvaluationRule, StepRule
from torchlens_perf.recorder.training_thread import Work
from torchlens_perf.run.records import WITHOUT_GRADIENTS
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.recorder.session import Session
    from torchlens_perf.recorder.training_thread import TrainingThread

# Name of this part of the step in the report.
RECOMPUTE = "recompute"
# Common id of all optimizers that step inside the backward pass. No object has this id.
_INSIDE_BACKWARD = 0
_EVALUATION, _INFERENCE, _SKIPPED = int(Flag.EVALUATION), int(Flag.INFERENCE), int(Flag.SKIPPED)
_NEW_TRAINING = int(Flag.NEW_TRAINING)
# Fewer steps are no training of their own. Later trainings count as part of the last one.
_MIN_TRAINING_STEPS, _MAX_TRAININGS = 8, 64
# Maximum number of observed optimizers. Programs with one optimizer per parameter do not accumulate
# gradients, so the first optimizers are sufficient.
_MAX_OPTIMIZERS = 8
# The step after which an optimizer's counter is read, and how many of its parameters are read.
_COUNTED_STEPS, _MAX_COUNTERS = 2, 8


class _GradientSample:
    """One parameter of an optimizer, whose gradient is observed."""

    __slots__ = ("last_gradient", "optimizer", "passes", "place")

    def __init__(self, optimizer: Any, place: tuple[int, int]) -> None:
        """place: group and position in the optimizer's `param_groups`."""
        self.optimizer = create_reference(optimizer)
        self.place = place
        # Id and versions of the gradient after the last backward pass. Zeros without a gradient.
        self.last_gradient = NO_GRADIENT
        self.passes = 0  # Number of backward passes whose gradients are summed.

    def _read_gradient_version(self) -> tuple[int, int, int]:
        (group, position), optimizer = self.place, self.optimizer()
        # An exception that is suppressed costs as much as all else in a hook.
        if optimizer is not None:
            with suppress(AttributeError, KeyError, IndexError, TypeError):  # It has changed.
                return read_gradient_version(optimizer.param_groups[group]["params"][position])
        return NO_GRADIENT

    def compare_gradient(self, *, ended: bool) -> None:
        """Compare the gradient with its state at the last call. Called when a backward pass begins
        or ends."""
        now = self._read_gradient_version()
        if now != self.last_gradient:
            self.last_gradient = now
            # A gradient that changed between two backward passes was cleared.
            self.passes = self.passes + (now != NO_GRADIENT) if ended else 0


class AccumulationCounter:
    """Counter of the backward passes whose gradients an optimizer step uses.

    The count is above one only with gradient accumulation. Counting all backward passes would
    mistake a GAN's two losses or a gradient penalty for accumulation. One gradient of each
    optimizer is therefore observed: a backward pass that changes an existing gradient accumulates.

    The counter runs on the training thread. Counting stops once another thread runs a backward
    pass, which may write the same gradients.
    """

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._samples: dict[int, _GradientSample] = {}  # By the optimizer's id.
        self._out_of_sight = torch_private.get_no_torch_function_context()
        self._max_passes = 0  # Maximum over all optimizers in the current step.

    def add_optimizer(self, optimizer: Any) -> None:
        self._samples = {
            key: each for key, each in self._samples.items() if each.optimizer() is not None
        }
        if len(self._samples) < _MAX_OPTIMIZERS:
            with self._out_of_sight():
                place = find_trained_parameter(optimizer)
            if place is not None:
                self._samples[id(optimizer)] = _GradientSample(optimizer, place)

    def update_samples(self, *, ended: bool) -> None:
        if not self._samples:
            return
        with self._thread.gradients:
            if not self._thread.reads_gradients:
                self._samples.clear()
                return
            with self._out_of_sight():
                for sample in self._samples.values():
                    sample.compare_gradient(ended=ended)

    def find_sample(self, optimizer: Any) -> _GradientSample | None:
        return self._samples.get(id(optimizer))

    def on_optimizer_step(self, optimizer: Any) -> None:
        sample = self.find_sample(optimizer)
        if sample is not None:
            self._max_passes = max(self._max_passes, sample.passes)
            sample.passes = 0

    def take_max_passes(self) -> int:
        """Return and reset the highest number of accumulated passes of an optimizer.

        The result is 0 if no gradient changed, for example if FSDP stores gradients elsewhere.
        """
        most, self._max_passes = self._max_passes, 0
        return most


class _SteppedOptimizer(NamedTuple):
    """An optimizer that has stepped."""

    reference: Callable[[], Any]
    position: int | None
    """Position among the optimizers passed to watch(), or None."""
    class_name: str
    first_at: int
    """Number of steps of all optimizers up to the first step of this optimizer."""


class _WatchedModel(NamedTuple):
    reference: weakref.ref[Module]
    name: str
    since: int
    """Number of steps of all optimizers before the model was watched."""


class TrainingLoop:
    """The training loop of one session. Callers catch exceptions of its methods."""

    def __init__(
        self,
        session: Session,
        passed: PassedOptimizers,
        watch_models: Callable[[Sequence[NamedModel]], None],
    ) -> None:
        self._session = session
        self._recorder = session.recorder
        self._watch_models = watch_models
        self.passed = passed
        self._rule = StepRule(len(passed))
        self._evaluations = EvaluationRule()
        self._accumulation = AccumulationCounter(session.thread)
        self.called = CalledModules()
        """The outermost modules that were called, such as wrappers of watched models."""
        # True if a module or an optimizer is new since trained models were last looked for.
        self._has_news = False
        # Optimizers that have stepped, by id. The id of a deleted optimizer may be reused.
        self._optimizers: dict[int, _SteppedOptimizer] = {}
        # Optimizers created in the watch, by id, with the number of optimizer steps at that time.
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        # The gradients that the native recorder observes while it ends the steps; None while Python
        # ends them.
        self._handed_over: list[_GradientSample] | None = None
        # Results of _get_patience(), by ids of the optimizer and of the one that ends steps.
        self._patience: dict[tuple[int, int], int | None] = {}
        self._elsewhere: set[int] = set()  # Ids of optimizers that step on other threads.
        self._models_given = False
        self._roots: list[_WatchedModel] = []
        # Number of steps of all optimizers before models were watched, and the class of the first.
        self._classes: deque[tuple[int, str]] = deque(maxlen=2 * _MAX_TRAININGS)
        # Optimizers that have stepped inside the current backward pass.
        self._inside: list[Optimizer] = []
        self._skipped = False
        # First step of each training, and the class of its first model; see _begin_training().
        self._trainings = session.facts.trainings
        self._begins_training = False
        # True if an optimizer of an earlier training has stepped again.
        self._takes_turns = False
        # Number of optimizer steps before the current training.
        self._training_since = 0

    @property
    def models(self) -> list[Module]:
        """The watched models that still exist."""
        return [model for each in self._roots if (model := each.reference()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped and still exist, in the order of their first steps."""
        return [
            optimizer
            for each in self._optimizers.values()
            if (optimizer := each.reference()) is not None
        ]

    # -- at the start

    def use_given_models(self, models: Sequence[NamedModel]) -> None:
        self._models_given = True
        self._add_and_watch(models)

    def start_after_step_of(self, optimizer: Optimizer) -> None:
        """Start in the middle of a loop in which this optimizer has just stepped."""
        self._session.thread.note_work(Work.OPTIMIZER)
        self._recorder.optimizer_steps += 1
        self._rule.on_optimizer_step(id(optimizer), self._add_optimizer(optimizer).position)

    def start_without_optimizer(self) -> None:
        """Start in the middle of a loop without optimizer, after a backward pass."""
        self._session.thread.note_work(Work.BACKWARD)
        self._rule.note_missing_optimizer(alive=False)
        self._count_backwards_as_steps()

    # -- called by hooks

    def on_new_module(self, module: Module) -> None:
        """Handle the first call of an outermost module, which may be a model that is trained."""
        self.called.add(module)
        self._has_news = True
        self._take_over()  # The next step of an optimizer looks for trained models.

    def on_optimizer_created(self, optimizer: Optimizer) -> None:
        if not self._recorder.closed:
            begun_ns, address = self._recorder.now_ns(), id(optimizer)
            self._made[address] = (
                # No Python code, in which a signal handler could run: what it raised would be lost.
                weakref.ref(optimizer, functools.partial(self._made.pop, address)),
                self._recorder.optimizer_steps,
            )
            self._recorder.add_overhead(self._recorder.now_ns() - begun_ns)

    def on_optimizer_step(
        self, optimizer: Optimizer, *, skipped: bool = False, calls: int = 1
    ) -> None:
        """Handle an optimizer step that has returned, or that GradScaler has skipped.

        calls: number of calls of the optimizer's step inside each other, such as of its base class.
        """
        if not self._recorder.closed:
            with self._session.step.charged():
                self._handle_step_of(optimizer, skipped, calls)

    def _handle_step_of(self, optimizer: Optimizer, skipped: bool, calls: int) -> None:
        recorder = self._recorder
        self._take_over()
        self._skipped |= skipped
        if recorder.backwards:
            self._inside.append(optimizer)
            return
        recorder.optimizer_steps += 1
        known = self._optimizers.get(id(optimizer))
        is_new = known is None or known.reference() is not optimizer
        if known is None or is_new:
            known = self._add_optimizer(optimizer)
        if recorder.optimizer_steps == _COUNTED_STEPS and not is_new:
            self._publish_model_steps(optimizer)
        if known.first_at < self._training_since:
            self._join_trainings()
        self._accumulation.on_optimizer_step(optimizer)
        self._handle_optimizer_step(id(optimizer), known.position, optimizer, is_new=is_new)
        if not is_new:
            self._watch_trained_models()
            self._hand_over(optimizer, known, calls)

    def on_unrecorded_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle an optimizer step on a thread that is not recorded."""
        if id(optimizer) not in self._elsewhere:
            self._elsewhere.add(id(optimizer))
            self._take_over()
            position = self.passed.find_position(optimizer)
            if position is not None:
                self._rule.exclude_optimizer(position)

    @guard("begin of a backward pass")
    def on_backward_begin(self) -> None:
        with self._session.step.charged():
            if self._recorder.settled:
                self._recorder.compare_gradient(False)
            else:
                self._accumulation.update_samples(ended=False)

    @guard("backward pass inside of another one")
    def on_nested_backward(self) -> None:
        """Note that recomputation is not measured, because torch's checkpointing is not used.

        torch's own checkpointing does not call this method.
        """
        self._session.metadata.note_unmeasured_part(RECOMPUTE)

    @guard("end of a backward pass")
    def on_backward_end(self) -> None:
        with self._session.step.charged():
            self._handle_backward_end()

    def _handle_backward_end(self) -> None:
        self._recorder.backward_passes += 1
        if self._recorder.settled:
            self._recorder.compare_gradient(True)
            return
        self._accumulation.update_samples(ended=True)
        if self._inside:
            self._handle_steps_inside_backward()
            return
        rule = self._rule
        rule.on_backward_end()
        if rule.should_search_optimizer():
            rule.note_missing_optimizer(alive=len(self.passed) > 0 or has_optimizer_class())
            if rule.counts_backwards:
                self._count_backwards_as_steps()
        if rule.does_backward_end_step():
            self._session.step.end()
            self._watch_models_with_gradients()

    def on_forward_end(self, with_gradient: bool, module: int, is_root: bool) -> None:
        """Handle the end of an outermost module's forward pass. module: the module's id."""
        self._recorder.forward_passes += with_gradient
        self._recorder.without_gradient |= not with_gradient
        if self._rule.on_forward_end(with_gradient=with_gradient, module=module, is_root=is_root):
            self._session.step.end(_INFERENCE)

    def on_manual_step(self) -> bool:
        self._take_over()
        if self._recorder.optimizer_steps >= _COUNTED_STEPS and not self._rule.manual:
            # An optimizer has stepped more than once in this step, so its counter counts no steps.
            self._session.metadata.forget_model_steps()
        return self._rule.on_manual_step()

    # -- called by the session

    def finish_step(self, *, inference: bool) -> tuple[int, int]:
        recorder = self._recorder
        flags = (_SKIPPED if self._skipped else 0) | (_NEW_TRAINING if self._begins_training else 0)
        if not inference and self._evaluations.decide_step_end(
            without_gradient=bool(recorder.without_gradient)
        ):
            flags |= _EVALUATION
        # Observed gradients give the number of accumulated passes. Without observed gradients, use
        # the smaller of the numbers of forward and backward passes.
        passes = self._accumulation.take_max_passes() or min(
            recorder.forward_passes, recorder.backward_passes or recorder.forward_passes
        )
        recorder.forward_passes = recorder.backward_passes = recorder.without_gradient = 0
        self._skipped = self._begins_training = False
        return flags, max(1, passes)

    # -- helpers

    def _hand_over(self, optimizer: Optimizer, known: _SteppedOptimizer, calls: int) -> None:
        """Let the native recorder end the next steps, if only this optimizer steps."""
        if (
            len(self.optimizers) > 1
            or not self._rule.repeats(id(optimizer), known.position)
            or not self._session.thread.trains_alone
            or self._recorder.optimizer_steps <= _COUNTED_STEPS
            or self._recorder.busy
        ):
            return
        sample = self._accumulation.find_sample(optimizer)
        self._handed_over = [] if sample is None else [sample]
        state: tuple[Any, ...] = (None, NO_GRADIENT, 0)
        if sample is not None:
            state = (sample.place, sample.last_gradient, sample.passes)
        name_id = self._session.intern(f"optimizer {known.class_name}")
        entries = (id(optimizer), name_id), *[(id(optimizer), None)] * (calls - 1)
        self._recorder.passes_lead = self._evaluations.lead
        self._recorder.settle(known.reference, name_id, entries, *state)

    def _take_over(self) -> None:
        """Count in Python again, and take what the native recorder has counted."""
        recorder, samples, self._handed_over = self._recorder, self._handed_over, None
        if samples is None:
            return
        gradient, passes = recorder.unsettle()
        for sample in samples:
            sample.last_gradient, sample.passes = gradient, passes
        self._evaluations.steps += recorder.quiet_steps
        self._evaluations.lead = recorder.passes_lead
        self._rule.alone += recorder.quiet_steps
        recorder.quiet_steps = 0
        self._rule.learned = recorder.backward_passes > 0

    def _handle_optimizer_step(
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
            patience = self._get_patience(stepping, ending, is_new=is_new)
        ends = self._rule.on_optimizer_step(
            optimizer, position, ending_lives=lives, patience=patience
        )
        if before not in (None, self._rule.ending):
            self._evaluations.restart()
            if stepping is not None:
                self._begin_training(stepping, ending)
            name = type(stepping).__name__
            if ending is not None and stepping is not None and patience is None:
                self._session.note(
                    f"{name} has replaced {ending.class_name}: its first steps, before this was"
                    " clear, count as one"
                )
            elif ending is not None and len(self.passed) and patience is not None:
                self._session.note(
                    f"{name} has replaced {ending.class_name}: steps end with {name} from then on"
                )
        if ends:
            self._session.step.end()
        if self._rule.ignores_passed and not ignored:
            classes = " and ".join(type(each).__name__ for each in self.passed.list_alive())
            self._session.note(
                f"{classes or 'the optimizer'}, passed to watch(), has made no step: another"
                " optimizer ends the steps"
            )

    def _handle_steps_inside_backward(self) -> None:
        optimizers, self._inside = self._inside, []
        self._recorder.optimizer_steps += 1
        is_new = any(id(each) not in self._optimizers for each in optimizers)
        known = [self._optimizers.get(id(each)) or self._add_optimizer(each) for each in optimizers]
        self._handle_optimizer_step(
            _INSIDE_BACKWARD,
            max((each.position for each in known if each.position is not None), default=None),
        )
        if not is_new:
            self._watch_trained_models()

    @guard("reading an optimizer's step counter")
    def _publish_model_steps(self, optimizer: Optimizer) -> None:
        """Publish how many steps an optimizer counts, which a checkpoint restores.

        If the optimizer has stepped once per step so far, its counter counts steps. A counter on a
        device is not read, because that waits for the device.
        """
        steps = self._recorder.step + 1
        hidden = "torch._C._DisableTorchDispatch"
        if steps != _COUNTED_STEPS or not torch_private.is_usable(hidden):
            return
        # The modes of the user must not see that a tensor is read.
        with (
            torch_private.get_no_torch_function_context()(),
            torch_private.get_no_torch_dispatch_context(),
        ):
            known = _read_counters(optimizer)
        if known:
            self._session.metadata.set_model_steps(max(known), steps)

    def _add_optimizer(self, optimizer: Optimizer) -> _SteppedOptimizer:
        # A deleted optimizer matters only until another one ends the steps.
        self._optimizers = {
            key: each
            for key, each in self._optimizers.items()
            if key == self._rule.ending or each.reference() is not None
        }
        added = _SteppedOptimizer(
            create_reference(optimizer),
            self.passed.find_position(optimizer),
            type(optimizer).__name__,
            self._recorder.optimizer_steps,
        )
        self._optimizers[id(optimizer)] = added
        self._patience.clear()
        self._recorder.passes_name = self._session.intern(WITHOUT_GRADIENTS)
        self._accumulation.add_optimizer(optimizer)
        self._has_news = True
        return added

    def _get_patience(
        self, optimizer: Optimizer, ending: _SteppedOptimizer, *, is_new: bool
    ) -> int | None:
        """Return after how many steps without `ending` this optimizer replaces `ending`.

        None means the default number. The result is 0 if the optimizer steps the same parameters.
        The result is also 0 if the optimizer was created later and steps a watched model: training
        continues in another phase.
        """
        ended = ending.reference()
        key = id(optimizer), 0 if ended is None else id(ended)
        if is_new or key not in self._patience:
            known = self._patience[key] = self._compute_patience(optimizer, ended, ending.first_at)
            if is_new and known == 0:
                # From the second step on, two optimizers may take turns.
                self._patience[key] = 1
            return known
        return self._patience[key]

    def _compute_patience(self, optimizer: Optimizer, ended: Any, since: int) -> int | None:
        stepped, watched = collect_parameter_ids([optimizer]), self._watched_parameters()
        is_watched, replaced = bool(stepped & watched), collect_parameter_ids([ended])
        if stepped & replaced:
            return 0
        if ended is None:
            return 0 if is_watched or not watched else None
        if is_watched and replaced and not replaced & watched:
            return 0
        if not is_watched and self._models_given and watched:
            name = type(optimizer).__name__
            self._session.note(
                f"{name} has no parameters of a watched model: its steps do not end steps of the"
                " loop"
            )
            return NEVER if replaced & watched else None
        made = self._made.get(id(optimizer))
        if not is_watched or made is None or made[0]() is not optimizer or made[1] < since:
            return None
        others = [each.reference() for each in self._optimizers.values()]
        return (
            None
            if any(
                stepped & collect_parameter_ids([each]) for each in others if each is not optimizer
            )
            else 0
        )

    def _begin_training(self, stepping: Optimizer, ending: _SteppedOptimizer | None) -> None:
        """Note that steps from this one on train other models, as in a search over settings.

        That is known if the optimizer is new, steps no parameter of a model that was trained
        before, and has replaced the only other one. Optimizers that take turns belong together.
        """
        known = self._optimizers[id(stepping)]
        steps = self._recorder.step - (self._trainings[-1][0] if self._trainings else 0)
        others = [
            each
            for each in self._optimizers.values()
            if each is not known and each is not ending and each.reference() is not None
        ]
        if (
            not self._roots
            or steps < _MIN_TRAINING_STEPS
            or len(self._trainings) == _MAX_TRAININGS
            or self._takes_turns
            or known.first_at < self._training_since
            or any(each.first_at >= self._training_since for each in others)
            or collect_parameter_ids([stepping]) & self._watched_parameters(before=known.first_at)
        ):
            return
        if not self._trainings:
            self._trainings.append((0, self._find_class_name(0)))
        self._begins_training = True
        self._training_since = known.first_at
        self._trainings.append((self._recorder.step, self._find_class_name(known.first_at)))
        self._session.publish()

    def _join_trainings(self) -> None:
        """Take back that there were several trainings, because they take turns."""
        self._takes_turns, self._training_since = True, 0
        self._trainings.clear()
        self._session.publish()

    def _find_class_name(self, since: int) -> str:
        """Return the class of the first model that was watched since then; "" without any."""
        return next((name for when, name in self._classes if when >= since), "")

    def _count_backwards_as_steps(self) -> None:
        self._has_news = True
        self._recorder.passes_name = self._session.intern(WITHOUT_GRADIENTS)
        self._session.note(
            "no optimizer's step was seen: each backward pass counts as a step. To mark where a"
            " step ends, call w.step() at the end of your loop"
        )

    @guard("finding the trained models")
    def _watch_models_with_gradients(self) -> None:
        if self._has_news and not self._models_given:
            self._has_news = False
            with self._session.thread.gradients:
                if self._session.thread.reads_gradients:
                    self._watch_called_models(lambda parameter: parameter.grad is not None)
                    return
            self._session.note(
                "models are not timed, as several threads train: pass them to watch(model)"
            )

    @guard("finding the trained models")
    def _watch_trained_models(self) -> None:
        """Look for the models of all optimizers that have stepped, if there is news.

        Called when an optimizer has stepped for the second time. By then, all optimizers that take
        turns have stepped, so that their models get distinct names.
        """
        if self._has_news:
            self._has_news = False
            trained = collect_parameter_ids(self.optimizers)
            self._watch_called_models(lambda parameter: id(parameter) in trained)

    def _watch_called_models(self, is_trained: Callable[[Any], bool]) -> None:
        """Watch called models with trained parameters, or note why they are not watched."""
        watched = self._watched_parameters()
        found = self.called.find_models(is_trained)
        # A watched model, its wrapper or a part of it shares parameters.
        models = [
            each for each in found if watched.isdisjoint(map(id, module_tree.parameters(each)))
        ]
        if not self._models_given:
            self._add_and_watch(self._name_found(models))
            return
        for model in models:
            self._session.note(
                f"{type(model).__name__} is also trained, but its modules are not timed: pass it to"
                " watch() as well"
            )

    def _name_found(self, models: Sequence[Module]) -> list[NamedModel]:
        """Name models. A single model needs no name, and the name of a deleted one is free."""
        taken = [each.name for each in self._roots if each.reference() is not None]
        if len(models) + len(taken) < 2:
            return [NamedModel(each) for each in models]
        return name_models(models, taken=taken)

    def _watched_parameters(self, before: int = NEVER) -> set[int]:
        """Return the ids of parameters. before: a number of steps of all optimizers."""
        models = [each.reference() for each in self._roots if each.since < before]
        return {
            id(parameter)
            for model in models
            if model is not None
            for parameter in module_tree.parameters(model)
        }

    def _add_and_watch(self, models: Sequence[NamedModel]) -> None:
        if models:
            alive = [each for each in self._roots if each.reference() is not None]
            now = self._recorder.optimizer_steps
            new = [_WatchedModel(weakref.ref(each.module), each.name, now) for each in models]
            self._roots = [*alive, *new]
            self._watch_models(models)
            self._classes.append((now, unwrapped_class_name(models[0].module)))
            if self._trainings and not self._trainings[-1][1]:
                self._trainings[-1] = self._trainings[-1][0], self._classes[-1][1]
                self._session.publish()


def _read_counters(optimizer: Any) -> list[int]:
    """Return the step counters of some parameters that are not on a device."""
    states = itertools.islice(getattr(optimizer, "state", {}).values(), _MAX_COUNTERS)
    counters: list[Any] = [each.get("step") for each in states if isinstance(each, dict)]
    return [
        int(each) for each in counters if isinstance(each, int) or getattr(each, "is_cpu", False)
    ]
