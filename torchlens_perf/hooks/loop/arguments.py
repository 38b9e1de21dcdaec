"""Check the models and optimizers passed to watch(), and name several models."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.hooks.loop.selection import NamedModel


def parse_models(model: Any) -> list[NamedModel] | None:
    """Return the models passed as `model`, or None to time all models that are trained.

    Raises ConfigError for an object that is not a model.
    """
    if model is None:
        return None
    from torch.nn import Module

    from torchlens_perf.hooks.loop.selection import NamedModel, name_models

    given: Sequence[str] = ()
    if isinstance(model, Mapping):
        found, given = list(model.values()), [str(name) for name in model]
    else:
        found = (
            list(model)
            if isinstance(model, (list, tuple)) and not isinstance(model, Module)
            else [model]
        )
    if not found:
        raise ConfigError(
            f"model={model!r}: must be a torch.nn.Module, or a list or dict of modules; omit it to"
            " time all models"
        )
    for each in found:
        if not isinstance(each, Module):
            hint = "a torch.nn.Module, or a list or dict of them"
            if hasattr(each, "param_groups"):
                hint += (
                    ", and this is an optimizer; write watch(model, optimizer) or"
                    " watch(optimizer=...)"
                )
            elif isinstance(each, types.FunctionType):
                hint += ", and this is a function; write @watch() with parentheses"
            raise ConfigError(f"model={type(each).__name__}: must be {hint}")
    if len(found) < 2 and not given:
        return [NamedModel(each) for each in found]
    return name_models(found, given)


def check_module_patterns(models: Sequence[NamedModel], config: Config) -> None:
    """Raise ConfigError for a name pattern that matches no module of any model."""
    if isinstance(config.modules, tuple):
        from torchlens_perf.hooks.loop.selection import describe_unmatched_patterns, select_modules

        for message in describe_unmatched_patterns(select_modules(each, config) for each in models):
            raise ConfigError(message)


def parse_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers passed as `optimizer`. An empty list means all optimizers.

    Raises ConfigError for an object that has no step() method.
    """
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if not callable(getattr(each, "step", None)):
            hint = (
                "; this is a model: write watch(model, optimizer)"
                if hasattr(each, "named_modules")
                else ""
            )
            raise ConfigError(
                f"optimizer={type(each).__name__}: must have a step() method, or be a list of"
                f" such{hint}"
            )
    return found
