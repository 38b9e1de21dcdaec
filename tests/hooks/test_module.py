"""Tests of modules' forward times and of the choice of timed modules, which stay unchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.recording import EVERYTHING, Record, recorded
from torchlens_perf import watch
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError
from torchlens_perf.hooks.loop.selection import NamedModel, select_modules, unwrapped_class_name
from torchlens_perf.run.ring import Flag, Kind


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


class Model(nn.Module):
    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            again = self.use_reentrant
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return x


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def inside(inner: Record, outer: Record) -> bool:
    return (
        outer.start_ns <= inner.start_ns
        and inner.end_ns <= outer.end_ns
        and inner.depth > outer.depth
    )


def run(model: nn.Module, batch: Tensor | None = None) -> Tensor:
    result = model(torch.randn(2, 4) if batch is None else batch)
    result.sum().backward()
    return result


# -- what is recorded


def test_each_module_call_is_a_span_inside_that_of_its_caller(tmp_path: Path) -> None:
    """The root module's span is the forward phase.

    Times of inner modules add up to less than their caller's time.
    """
    model = Model()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)
    (root,) = recording.of(Kind.FORWARD)
    spans = {record.name: record for record in recording.of(Kind.MODULE)}

    assert root.name == "forward Model"
    assert list(spans) == [
        "stem", "blocks.0.linear", "blocks.0.act", "blocks.0", "blocks.1.linear", "blocks.1.act", "blocks.1",
    ]  # fmt: skip
    assert [spans[name].depth for name in spans] == [2, 3, 3, 2, 3, 3, 2]
    assert all(inside(span, root) for span in spans.values())
    assert inside(spans["blocks.1.act"], spans["blocks.1"])
    children = sum(spans[name].duration_ns for name in ("stem", "blocks.0", "blocks.1"))
    assert children <= root.nested_ns <= root.duration_ns
    assert {record.flags for record in recording.records if record.kind != Kind.STEP} == {Flag(0)}


def test_each_call_of_a_shared_or_recursive_module_is_recorded(tmp_path: Path) -> None:
    """All calls have the first name of the module."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: Tensor, left: int = 2) -> Tensor:
            x = self.second(self.first(x))
            return self(x, left - 1) if left else x

    model = Recursive()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)

    assert recording.names(Kind.MODULE) == ["first"] * 6 + ["forward Recursive"] * 2
    assert recording.names(Kind.FORWARD) == ["forward Recursive"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_module_is_not_a_forward_pass(use_reentrant: bool, tmp_path: Path) -> None:
    """Activation checkpointing runs modules again inside the backward pass."""
    model = Model(use_reentrant)
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)
    (backward,) = [each for each in recording.of(Kind.BACKWARD) if each.depth == 1]
    recomputed = recording.of(Kind.RECOMPUTE)

    assert recording.names(Kind.FORWARD) == ["forward Model"]
    assert [each.name for each in recomputed] == ["checkpoint"] * 2
    assert all(inside(each, backward) for each in recomputed)
    assert [
        sum(inside(each, region) for each in recording.of(Kind.MODULE, "blocks.1"))
        for region in recomputed
    ] == [
        1,
        0,
    ]
    assert {each.name for each in recording.of(Kind.MODULE)} == {
        "stem", "blocks.0", "blocks.0.linear", "blocks.0.act", "blocks.1", "blocks.1.linear", "blocks.1.act",
    }  # fmt: skip
    assert recording.unbalanced == 0


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_of_a_module_is_passed_on_and_its_span_is_flagged(
    error: BaseException, tmp_path: Path
) -> None:
    """The user gets the same exception object, all spans end, and the loop continues."""
    model = nn.Sequential(Block(), nn.Sequential(Raises(error)))
    good = model[0]
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        with pytest.raises(type(error)) as caught:
            model(torch.randn(2, 4))
        good(torch.randn(2, 4))

    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    raised = [(each.kind, each.name) for each in recording.records if each.flags & Flag.EXCEPTION]
    assert raised == [
        (Kind.MODULE, "1.0"),
        (Kind.MODULE, "1"),
        (Kind.FORWARD, "forward Sequential"),
    ]
    assert recording.unbalanced == 0
    assert (recording.records[-1].name, recording.records[-1].depth) == ("0", 1)


def test_module_that_returns_none_is_not_flagged_as_failed(tmp_path: Path) -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    model = nn.Sequential(Silent())
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        assert model(torch.randn(2, 4)) is None

    assert {each.flags for each in recording.records if each.kind != Kind.STEP} == {Flag(0)}


def test_module_call_on_another_thread_is_not_part_of_the_step(tmp_path: Path) -> None:
    model = Block()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)
        thread = threading.Thread(target=model, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()

    flags = [
        each.flags
        for each in recording.records
        if (each.kind, each.name) == (Kind.MODULE, "linear")
    ]
    assert flags == [Flag(0), Flag.OTHER_THREAD]


def test_watch_may_end_inside_a_module_call(tmp_path: Path) -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            watched.stop()
            return x + 1

    model = nn.Sequential(Block(), Ends(), Block())
    batch = torch.randn(2, 4)
    watched = watch(model, dir=str(tmp_path), sidecar=False, report="off", modules="all")
    with watched:
        inside_result = model(batch)

    assert torch.equal(model(batch), inside_result)


class Acts(dict):
    """A value that calls a function when the search for tensors checks the value's type."""

    def __init__(self, act: Callable[[], Any], **items: Tensor) -> None:
        super().__init__(items)
        self.act = act

    def values(self) -> Any:
        self.act()
        return super().values()


class TakesAndGives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Acts) -> Acts:
        return self.inner(x)


def test_keyboard_interrupt_inside_a_module_hook_reaches_the_user(tmp_path: Path) -> None:
    """Other errors in code of this package are swallowed."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    model = TakesAndGives()
    with recorded(tmp_path, model, **EVERYTHING):
        with pytest.raises(KeyboardInterrupt):
            model(Acts(interrupt, x=torch.ones(1)))


def test_watch_may_end_between_a_module_hook_and_its_call(tmp_path: Path) -> None:
    """Another thread ends the watch in this case."""
    model = TakesAndGives()
    watched = watch(model, dir=str(tmp_path), sidecar=False, report="off", **EVERYTHING)
    x = Acts(watched.stop, x=torch.ones(1))
    with watched:
        result = model(x)

    assert result is x


# -- selection of modules


def names(model: nn.Module, modules: Any, most: int = 128) -> list[str]:
    return [
        each.name
        for each in select_modules(NamedModel(model), Config(modules=modules), most).modules
    ]


def test_forward_passes_without_gradients_have_one_name_once_the_loop_trains(
    tmp_path: Path,
) -> None:
    """They are passes of a reference network, a teacher, or of the model itself in an evaluation.

    Modules inside them are not timed, so that modules have the times of training.
    """
    model, reference = Model(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        for step in range(6):
            with torch.no_grad():
                expected = reference(torch.randn(2, 4)) + model(torch.randn(2, 4))
            reference(torch.randn(2, 4))
            assert expected.shape == (2, 4)
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            before = step

    passes = recording.of(Kind.FORWARD)
    assert [each.name for each in passes if each.step == 0] == ["forward Model"] * 2
    last = [each for each in passes if each.step == before]
    assert [each.name for each in last] == [
        *["forward passes without gradients"] * 2,
        "forward Model",
    ]
    assert not any(inside(each, one) for one in last[:2] for each in recording.of(Kind.MODULE))
    assert sum(inside(each, last[2]) for each in recording.of(Kind.MODULE)) == 7


def test_forward_passes_of_inference_have_the_name_of_their_model(tmp_path: Path) -> None:
    model = Model()
    with recorded(tmp_path, model, **EVERYTHING) as recording, torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 4))

    assert recording.names(Kind.FORWARD) == ["forward Model"] * 4
    assert len(recording.of(Kind.MODULE)) == 4 * 7


def test_exception_of_a_reference_network_is_passed_on_and_its_span_ends(tmp_path: Path) -> None:
    model, reference = Model(), nn.Sequential(nn.Linear(4, 4), Raises(ValueError("bad batch")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        for _ in range(4):
            with torch.no_grad(), pytest.raises(ValueError, match="bad batch"):
                reference(torch.randn(2, 4))
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    failed = [each for each in recording.of(Kind.FORWARD) if each.name != "forward Model"]
    assert [each.flags for each in failed] == [Flag.EXCEPTION] * len(failed)
    assert len(failed) >= 2
    assert recording.unbalanced == 0
    last = recording.of(Kind.FORWARD)[-1]
    assert sum(inside(each, last) for each in recording.of(Kind.MODULE)) == 7


def test_levels_of_modules_do_not_count_containers() -> None:
    """Modules in a ModuleList are one level down, not two, because a ModuleList is never called."""
    model = Model()

    assert names(model, "none") == ["Model"]
    assert names(model, 1) == ["Model", "stem", "blocks.0", "blocks.1"]
    assert names(model, "auto") == names(model, 2) == names(model, "all")


def test_patterns_select_modules_and_the_root_is_always_timed() -> None:
    assert names(Model(), ("blocks.*.linear", "st?m")) == [
        "Model",
        "stem",
        "blocks.0.linear",
        "blocks.1.linear",
    ]
    assert names(Model(), ("nothing",)) == ["Model"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (["blocks.*", "Model.*"], 'modules="Model.*" matches no module'),
        (["foo"], 'modules="foo" matches no module'),
        (["stem", "blocks.2"], 'modules="blocks.2" matches no module'),
        (["Blocks.*"], 'modules="Blocks.*" matches no module'),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_pattern_without_a_match_raises_in_code_and_warns_in_the_environment(
    pattern: list[str],
    problem: str,
    several: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = {"model": Model(), "other": nn.Linear(4, 4)} if several else Model()
    with pytest.raises(ConfigError, match=re.escape(problem)) as raised:
        watch(model, modules=pattern, dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    example = '"model.stem"' if several else '"stem"'
    assert str(raised.value).endswith(
        f"Names are matched against model.named_modules(), for example {example}"
    )

    monkeypatch.setenv("TORCHLENS_PERF_MODULES", ",".join(pattern))
    with watch(model, dir=str(tmp_path)) as off:
        run(model["model"] if several else model)
    assert off.run_dir is None
    warnings = [each.getMessage() for each in caplog.records if "matches" in each.getMessage()]
    assert warnings == [f"torchlens_perf is off: TORCHLENS_PERF_MODULES: {raised.value}"]


def test_pattern_without_a_match_warns_if_the_model_was_not_passed(tmp_path: Path) -> None:
    """The model is found only after its optimizer's second step, which is too late for an error."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, modules=("Model.*",)) as recording:
        for _ in range(2):
            run(model)
            optimizer.step()

    assert [
        each for each in recording.notes if each.startswith('modules="Model.*" matches no module.')
    ]


class Wrapper(nn.Module):
    """A module that contains a model, like wrappers of installed packages."""

    def __init__(self, **inside: nn.Module) -> None:
        super().__init__()
        for name, module in inside.items():
            self.add_module(name, module)


class PassesOn(Wrapper):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            for inner in self.__dict__.get("_modules", {}).values():
                return getattr(inner, name)
            raise


def installed(kind: type[nn.Module], name: str, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """Make a class look like one of an installed package of another author."""
    package = types.ModuleType("somebodys")
    package.__file__ = f"{sysconfig.get_path('purelib')}/somebodys/__init__.py"
    monkeypatch.setitem(sys.modules, "somebodys", package)
    return type(name, (kind,), {"__module__": "somebodys.models"})


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(
            lambda: {"convs": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])},
            id="list of layers",
        ),
        pytest.param(
            lambda: {"layers": nn.ModuleDict({"a": nn.Linear(4, 4)})}, id="dictionary of layers"
        ),
        pytest.param(
            lambda: {"act": nn.ReLU(), "lins": nn.ModuleList([nn.Linear(4, 4)])},
            id="and an activation",
        ),
        pytest.param(
            lambda: {"net": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}, id="layers in a row"
        ),
        pytest.param(lambda: {"rnn": nn.LSTM(4, 4)}, id="one layer"),
        pytest.param(
            lambda: {"encoder": nn.TransformerEncoderLayer(4, 2, 4)}, id="a Transformer's layer"
        ),
    ],
)
def test_model_class_from_a_package_keeps_its_module_names(
    inside: Callable[[], dict[str, nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with layers from torch, such as torch_geometric's GCN, is not taken for a wrapper."""
    model = installed(Wrapper, "GCN", monkeypatch)(**inside())
    first = next(iter(inside()))
    assert unwrapped_class_name(model) == "GCN"
    assert names(model, "all")[0] == "GCN"
    assert all(name.startswith((first, "lins")) for name in names(model, "all")[1:])


def test_wrappers_from_a_package_do_not_count_as_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's PeftModel.base_model is a LoraModel, whose `model` is the user's.

    Both classes forward attributes.
    """
    wrapper = installed(PassesOn, "PeftModel", monkeypatch)
    for model in (Model(), nn.Sequential(Block(), Block())):
        wrapped = wrapper(base_model=wrapper(model=model))
        assert unwrapped_class_name(wrapped) == unwrapped_class_name(model)
        for modules in (1, 2, "auto", "all"):
            assert names(wrapped, modules) == names(model, modules)


def test_wrapper_of_a_users_model_is_recognized_by_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unwrapped_class_name(installed(Wrapper, "Engine", monkeypatch)(net=Model())) == "Model"
    assert unwrapped_class_name(Wrapper(net=Model())) == "Wrapper"


@pytest.mark.parametrize("modules", ["auto", "all", 1, ("blocks.0",)])
def test_modules_with_untimed_submodules_are_listed(modules: Any) -> None:
    """Users are advised to use deeper patterns for these modules."""
    selection = select_modules(NamedModel(Model()), Config(modules=modules))
    unopened = {"auto": [], "all": [], 1: ["blocks.0", "blocks.1"], ("blocks.0",): ["blocks.0"]}[
        modules
    ]
    assert selection.unopened == unopened
    for name in unopened:
        assert len(names(Model(), (f"{name}.*",))) > 1


def test_no_deeper_pattern_is_suggested_for_a_compiled_module() -> None:
    blocks = Model()
    blocks.blocks[0].compile(backend="eager")
    within = select_modules(NamedModel(blocks), Config(modules=1))
    assert (within.unopened, within.all_levels) == (["blocks.1"], False)

    for compiled in (torch.compile(Model(), backend="eager"), Model()):
        if isinstance(compiled, Model):
            compiled.compile(backend="eager")
        whole = select_modules(NamedModel(compiled), Config(modules=1))
        assert (whole.unopened, whole.all_levels) == ([], True)


def test_automatic_selection_limits_the_number_of_timed_modules() -> None:
    """A large model is timed on fewer levels, and a broad one only at its root."""
    assert names(Model(), "auto", most=4) == ["Model", "stem", "blocks.0", "blocks.1"]
    assert names(Model(), "auto", most=2) == ["Model"]


def test_module_names_do_not_contain_wrappers_of_the_compiler() -> None:
    """A compiled model or block keeps the author's names, and the wrapper is timed."""
    model = Model()
    compiled = torch.compile(model)
    assert names(compiled, "all") == names(model, "all")
    assert (
        select_modules(NamedModel(compiled), Config(modules="none")).modules[0].module is compiled
    )

    model.blocks[0] = torch.compile(model.blocks[0])
    chosen = {
        each.name: each.module
        for each in select_modules(NamedModel(model), Config(modules="all")).modules
    }
    assert list(chosen) == names(Model(), "all")
    assert chosen["blocks.0"] is model.blocks[0]


def test_submodule_that_the_user_named_module_keeps_its_name() -> None:
    """The attribute `module` belongs to a wrapper only around the whole model."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = Block(), nn.Linear(4, 4)

    assert names(Wrapped(), 1) == ["Wrapped", "module", "head"]


def test_model_that_was_not_passed_is_found_by_its_optimizer(tmp_path: Path) -> None:
    """The outermost module with parameters of the optimizer is timed after the second step."""
    model, bystander = nn.Sequential(Model()), Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, **EVERYTHING) as recording:
        for _ in range(3):
            run(model)
            bystander(torch.randn(2, 4))
            optimizer.step()

    assert [(each.name, each.step) for each in recording.of(Kind.FORWARD)] == [
        ("forward Sequential", 2)
    ]


def test_nested_watch_adds_its_models_to_the_outer_one(tmp_path: Path) -> None:
    """The end of the nested watch does not end the outer one."""
    outer, inner = Block(), Model()
    with recorded(tmp_path, outer, **EVERYTHING) as recording:
        with watch(inner) as joined:
            assert joined.run_dir == recording.watch.run_dir
            run(inner)
            joined.step()
        run(inner)
        with watch([inner, outer]):
            run(outer)

    assert recording.names(Kind.FORWARD) == ["forward Model", "forward Model", "forward Block"]
    assert recording.steps[0].flags & Flag.MANUAL


def test_new_model_at_the_address_of_a_deleted_one_is_not_watched(tmp_path: Path) -> None:
    with recorded(tmp_path, Block(), **EVERYTHING) as recording:
        addresses = set()
        for _ in range(20):
            model = nn.Linear(4, 4)
            addresses.add(id(model))
            with watch(model):
                run(model)
            del model

    assert len(addresses) < 20
    assert recording.names(Kind.FORWARD) == ["forward Linear"] * 20


# -- modules are not changed


def test_modules_and_their_classes_are_unchanged_during_a_watch(tmp_path: Path) -> None:
    """The dictionaries of modules and of their classes have the same contents."""
    model = Model()
    model.blocks[0].compile(backend="eager")
    run(model)  # Dynamo adds attributes to classes.
    model.zero_grad()
    untouched = {
        kind: dict(vars(kind)) for module in model.modules() for kind in type(module).__mro__
    }

    def contents() -> list[Any]:
        return [
            (
                name,
                {
                    key: copy.copy(value) if key.startswith("_") else value
                    for key, value in vars(module).items()
                },
            )
            for name, module in model.named_modules()
        ]

    before = contents()
    with recorded(tmp_path, model, **EVERYTHING):
        run(model)
        model.zero_grad()
        assert str(before) == str(contents())
        assert [list(one) for _, one in before] == [list(one) for _, one in contents()]
        assert {kind: dict(vars(kind)) for kind in untouched} == untouched

    assert str(before) == str(contents())
    assert dict(vars(nn.Module))["__call__"] is nn.Module._wrapped_call_impl


def test_module_compiled_during_the_watch_is_timed_as_a_whole(tmp_path: Path) -> None:
    model = Model()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)
        model.blocks[0].compile(backend="eager")
        run(model)

    assert recording.names(Kind.MODULE).count("blocks.0") == 2
    assert recording.names(Kind.MODULE).count("blocks.0.linear") == 1
    assert "blocks.0: compiled inside the watch: no inner times since then" in recording.notes


class OwnCall(nn.Module):
    """A class with its own `__call__`, as OptimizedModule and fx.GraphModule have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(OwnCall, id="class with __call__"),
        pytest.param(lambda: torch.fx.symbolic_trace(Block()), id="GraphModule"),
        pytest.param(lambda: torch.compile(Block(), backend="eager"), id="OptimizedModule"),
        pytest.param(lambda: torch.jit.script(Block()), id="ScriptModule"),
        pytest.param(lambda: nn.LSTM(4, 4), id="LSTM"),
        pytest.param(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), id="parametrization"
        ),
    ],
)
def test_module_call_counts_once_if_the_class_overrides_call(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """The overriding `__call__` calls that of nn.Module."""
    model = nn.Sequential(make())
    with recorded(tmp_path, model, modules=("0",)) as recording:
        for _ in range(3):
            model(torch.randn(2, 4))

    assert recording.names(Kind.FORWARD) == ["forward Sequential"] * 3
    assert recording.names(Kind.MODULE) == ["0"] * 3


def test_module_calls_are_timed_after_another_tool_patched_and_restored_them(
    tmp_path: Path,
) -> None:
    """torch.fx replaces nn.Module.__call__ while it traces and restores it afterwards."""
    model = Block()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        run(model)
        torch.fx.symbolic_trace(Block())
        run(model)

    assert recording.names(Kind.FORWARD) == ["forward Block"] * 2
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(False, id="given"),
        pytest.param(True, id="found by its optimizer"),
    ],
)
def test_deleted_watched_model_is_freed_without_garbage_collection(
    found: bool, tmp_path: Path
) -> None:
    """The memory must be free at once, because the next model may need it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    references = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        with recorded(tmp_path, None if found else model, optimizer, **EVERYTHING):
            for _ in range(3):
                run(model)
                optimizer.step()
            del model
            left = [reference() for reference in references if reference() is not None]
            assert left == []
    finally:
        gc.enable()


def test_copy_of_a_watched_model_is_not_watched(tmp_path: Path) -> None:
    """A deep copy or an unpickled copy works and is not recorded."""
    torch.manual_seed(0)  # One model in some hundreds has zeros after its ReLU.
    model = Model()
    batch = torch.randn(2, 4)
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        nn.init.zeros_(copies[0].stem.weight)
        nn.init.zeros_(copies[0].stem.bias)
        changed = copies[0](batch)
        copies[1](batch)
        unchanged = run(model, batch)

    assert not torch.equal(changed, unchanged)
    assert recording.names(Kind.FORWARD) == ["forward Model"]


def test_dataparallel_replicas_compute_with_their_own_parameters(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with recorded(tmp_path, model, **EVERYTHING):
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(4, 4), torch.ones(4)
        result = replica(torch.randn(2, 4))

    assert torch.equal(result, torch.ones(2, 4))
