"""Libraries that record events without a call of their users, in a process that has a role.

The functions of a library are replaced when it has been imported, or when it will be. A replaced
function has the same signature, name, result and exceptions. All private names of libraries that a
hook needs are here and in the module of the hook.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.config import OFF, SWITCH
from torchlens_perf.errors import guard
from torchlens_perf.output import logger

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

Follower = Callable[..., Generator[None, Any, None]]
"""Generator function with the arguments of a function. It runs until its `yield` before the function,
and then receives the result. It is closed if the function raises."""


class Library(NamedTuple):
    """A module whose functions are followed."""

    distribution: str
    tested: str
    """The version that the hooks were tested with."""
    hooks: str
    """Module of this package whose FOLLOWERS has a follower for each function."""


LIBRARIES = {
    "trl.trainer.grpo_trainer": Library("trl", "1.16", "trl_hooks"),
    "trl.extras.profiling": Library("trl", "1.16", "trl_hooks"),
    "trl.generation.vllm_generation": Library("trl", "1.16", "trl_hooks"),
    "transformers.trainer_callback": Library("transformers", "5.24", "trl_hooks"),
    "transformers.generation.utils": Library("transformers", "5.24", "generate_hooks"),
    "openai.resources.completions": Library("openai", "3.57", "openai_hooks"),
    "openai.resources.chat.completions.completions": Library("openai", "3.57", "openai_hooks"),
}


_followed: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


@functools.cache
def attach() -> None:
    """Follow the libraries that are imported, and those that will be. Further calls do nothing."""
    if os.environ.get(SWITCH, "1").strip().lower() in OFF:
        return
    sys.meta_path.insert(0, _Finder())
    for name in LIBRARIES:
        if name in sys.modules:
            _attach_to(sys.modules[name])


class _Finder:
    """Import finder that attaches the hooks to a library after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a known module, whose loader then attaches; None for other modules."""
        if fullname not in LIBRARIES:
            return None
        # The finders behind this one may be of other tools, which change the module too.
        behind = itertools.dropwhile(lambda each: each is not self, [*sys.meta_path])
        specs = (
            each.find_spec(fullname, path, target)
            for each in itertools.islice(behind, 1, None)
            if hasattr(each, "find_spec")
        )
        spec = next((each for each in specs if each is not None), None)
        with guard("following a library"):
            if spec is not None and hasattr(spec.loader, "exec_module"):
                vars(spec.loader)["exec_module"] = _attach_after(spec.loader)
        return spec


def _attach_after(loader: Any) -> Callable[[ModuleType], None]:
    load = loader.exec_module

    def load_and_attach(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # Restore the loader to its earlier state.
        load(module)
        _attach_to(module)

    return load_and_attach


@guard("following a library")
def _attach_to(module: ModuleType) -> None:
    """Replace all functions of a module, or none of them if one is missing."""
    followers = _followers(module.__name__)
    missing = find_missing(module, followers)
    if missing:
        library = LIBRARIES[module.__name__]
        logger.warning(
            "torchlens_perf: events of %s are not recorded: %s %s has no %s",
            library.distribution,
            library.distribution,
            importlib.metadata.version(library.distribution),
            ", ".join(missing),
        )
    else:
        for name, follower in followers.items():
            owner, _, function = name.partition(".")
            _follow(getattr(module, owner), function, follower)


def _followers(module: str) -> Mapping[str, Follower]:
    hooks = import_module(f"torchlens_perf.roles.{LIBRARIES[module].hooks}")
    found: Mapping[str, Follower] = hooks.FOLLOWERS[module]
    return found


def find_missing(module: ModuleType, names: Mapping[str, object]) -> list[str]:
    """Return the names of functions, such as "Class.method", that a module lacks."""
    return [
        each
        for each in names
        if not callable(
            getattr(getattr(module, each.partition(".")[0], None), each.partition(".")[2], None)
        )
    ]


def find_problems() -> Iterator[str]:
    """Yield a text for each library here with another version than the tested one. Import none."""
    for library in dict.fromkeys(each._replace(hooks="") for each in LIBRARIES.values()):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(library.distribution)
            if version.split(".")[:2] != library.tested.split("."):
                yield f"{library.distribution} {version} is not the tested version {library.tested}"


def _follow(owner: type, name: str, follower: Follower) -> None:
    function = getattr(owner, name)
    if function in _followed:
        # A finder of another tool has asked _Finder once more.
        return

    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> Any:
        following = _begin(follower, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            _end(following)
            raise
        if hasattr(result, "__await__"):
            return _await(result, following)
        _end(following, [result])
        return result

    _followed.add(followed)
    setattr(owner, name, followed)


async def _await(awaitable: Any, following: Generator[None, Any, None] | None) -> Any:
    try:
        result = await awaitable
    except BaseException:
        _end(following)
        raise
    _end(following, [result])
    return result


@guard("following the begin of a call")
def _begin(
    follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[None, Any, None]:
    following = follower(*args, **kwargs)
    next(following, None)
    return following


@guard("following the end of a call")
def _end(following: Generator[None, Any, None] | None, results: Sequence[Any] = ()) -> None:
    """Let a follower go on with the result, if the call has one, and close it."""
    if following is not None:
        with suppress(StopIteration):
            for result in results:
                following.send(result)
        following.close()
