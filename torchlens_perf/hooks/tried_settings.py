"""Change settings of torch in a job that `torchlens-perf try` starts, to measure what they gain.

The job's own code is not changed: constructors get other keyword arguments, and switches of torch are
set when torch has been imported. Nothing of this runs in other jobs.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf.errors import ConfigError, unknown_word_text
from torchlens_perf.run.settings_to_try import SETTINGS

_CLASSES = {
    "loader": ("torch.utils.data.DataLoader",),
    "ddp": ("torch.nn.parallel.DistributedDataParallel",),
}


def apply_tried_settings(text: str) -> None:
    """Apply settings, given as a JSON object such as {"loader.num_workers": 4}.

    Raise ConfigError for an unknown setting.
    """
    settings: Mapping[str, Any] = json.loads(text)
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(unknown_word_text("setting", name, SETTINGS))
    import torch

    for owner, classes in _CLASSES.items():
        for name in classes:
            _change_arguments(_find_class(name), _values_of(settings, owner))
    for optimizer in _optimizer_classes():
        _change_arguments(optimizer, _values_of(settings, "optimizer"))
    switches: Mapping[str, Callable[[Any], object]] = {
        "torch.num_threads": lambda value: torch.set_num_threads(int(value)),
        "torch.float32_matmul_precision": torch.set_float32_matmul_precision,
        "cudnn.benchmark": lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        "gc.freeze": lambda value: gc.freeze() if value else None,
        "gc.threshold": lambda value: gc.set_threshold(int(value)),
    }
    for name, switch in switches.items():
        if name in settings:
            switch(settings[name])


def _values_of(settings: Mapping[str, Any], owner: str) -> dict[str, Any]:
    return {
        name.partition(".")[2]: value
        for name, value in settings.items()
        if name.partition(".")[0] == owner
    }


def _find_class(path: str) -> Any:
    import importlib

    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _optimizer_classes() -> list[Any]:
    import torch

    found = (getattr(torch.optim, name) for name in dir(torch.optim))
    return [
        each
        for each in found
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
    ]  # fmt: skip


def _change_arguments(owner: Any, values: Mapping[str, Any]) -> None:
    """Make a class's constructor ignore its callers' values for these parameters."""
    construct = owner.__init__
    known = inspect.signature(construct)
    values = {name: value for name, value in values.items() if name in known.parameters}
    if not values:
        return

    @functools.wraps(construct)
    def construct_changed(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = known.bind(self, *args, **kwargs)
        changed = dict(values)
        # A loader without workers rejects these parameters.
        if not changed.get("num_workers", bound.arguments.get("num_workers", 1)):
            for name in ("persistent_workers", "prefetch_factor"):
                changed.pop(name, None)
        bound.arguments.update(changed)
        construct(*bound.args, **bound.kwargs)

    owner.__init__ = construct_changed
