"""Tests of following libraries: what users see of them does not change."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchlens_perf.errors import swallowed
from torchlens_perf.roles import libraries, recording
from torchlens_perf.roles.libraries import Library

SOURCE = '''
class Client:
    def __init__(self):
        self.sent = []

    def send(self, text: str, *, times: int = 1) -> list[str]:
        """Send it."""
        if times < 0:
            raise ValueError(text)
        return [text] * times

    async def ask(self, text):
        return text

    def later(self, text):
        return self.ask(text)
'''
followed: list[tuple[str, Any]] = []


def _follow(client: Any, text: str, **kwargs: Any) -> Iterator[None]:
    followed.append(("begin", text))
    result = yield
    followed.append(("end", result))


def _follow_badly(client: Any, text: str) -> Iterator[None]:
    if text == "before":
        raise KeyError(text)
    yield
    raise KeyError(text)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Return the name of a module that is not imported yet."""
    (tmp_path / "some_client.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCHLENS_PERF_RAISE")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    known = {"some_client": Library("pytest", "1.0", "")}
    monkeypatch.setattr(libraries, "LIBRARIES", known)
    followers = {"Client.send": _follow, "Client.ask": _follow, "Client.later": _follow_badly}
    monkeypatch.setattr(libraries, "_followers", lambda name: followers)
    followed.clear()
    libraries.attach.cache_clear()
    yield "some_client"
    libraries.attach.cache_clear()
    sys.modules.pop("some_client", None)


@pytest.mark.parametrize("is_imported", [True, False])
def test_functions_are_followed_and_look_the_same(module: str, is_imported: bool) -> None:
    """The library is imported before the process gets its role, or after."""
    if is_imported:
        importlib.import_module(module)
    libraries.attach()
    Client = importlib.import_module(module).Client

    assert Client().send("a", times=2) == ["a", "a"]
    assert followed == [("begin", "a"), ("end", ["a", "a"])]
    assert (
        str(inspect.signature(Client.send)) == "(self, text: str, *, times: int = 1) -> list[str]"
    )
    assert (Client.send.__doc__, Client.send.__module__) == ("Send it.", module)
    assert pickle.loads(pickle.dumps(Client.send)) is Client.send
    assert pickle.loads(pickle.dumps(Client().send))("b") == ["b"]


def test_finder_of_another_tool_is_asked_too_and_calls_are_followed_once(module: str) -> None:
    """A finder that asks all others, and loads by the loader that they return, is like wrapt."""
    loaded: list[str] = []

    class Loader:
        def __init__(self, loader: Any) -> None:
            self._loader = loader

        def create_module(self, spec: Any) -> Any:
            return self._loader.create_module(spec)

        def exec_module(self, module: Any) -> None:
            self._loader.exec_module(module)
            loaded.append(module.__name__)

    class Finder:
        asks = False

        def find_spec(self, name: str, *_: object) -> Any:
            if self.asks or name != module:
                return None
            self.asks = True
            spec = importlib.util.find_spec(name)
            self.asks = False
            assert spec is not None
            spec.loader = Loader(spec.loader)  # type: ignore[assignment]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    libraries.attach()
    Client = importlib.import_module(module).Client

    assert loaded == [module]
    Client().send("a")
    assert followed == [("begin", "a"), ("end", ["a"])]


def test_exception_of_a_library_is_unchanged_and_ends_nothing(module: str) -> None:
    libraries.attach()
    Client = importlib.import_module(module).Client

    with pytest.raises(ValueError, match=r"^a$") as raised:
        Client().send("a", times=-1)
    assert raised.value.__context__ is None
    assert followed == [("begin", "a")]


def test_coroutines_are_followed_until_their_end(module: str) -> None:
    libraries.attach()
    Client = importlib.import_module(module).Client
    asked = Client().ask("a")

    assert asyncio.run(asked) == "a"
    assert followed == [("begin", "a"), ("end", "a")]


@pytest.mark.parametrize("text", ["before", "after"])
def test_failing_hook_changes_nothing(
    module: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    libraries.attach()
    Client = importlib.import_module(module).Client

    assert asyncio.run(Client().later(text)) == text
    assert "failed and was skipped, training goes on: KeyError" in caplog.text
    swallowed.by_place.clear()


def test_changed_library_is_left_alone(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    followers = {"Client.send": _follow, "Client.post": _follow, "Session.get": _follow}
    monkeypatch.setattr(libraries, "_followers", lambda name: followers)
    libraries.attach()
    Client = importlib.import_module(module).Client

    assert not hasattr(Client.send, "__wrapped__")
    assert "pytest 9" in caplog.text
    assert "has no Client.post, Session.get" in caplog.text


def test_every_library_has_hooks_and_a_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in libraries.LIBRARIES:
        assert libraries._followers(name)
    monkeypatch.setattr(
        libraries,
        "LIBRARIES",
        {"a": Library("pytest", "1.0", ""), "b": Library("absent-x", "1.0", "")},
    )

    assert [each.partition(" is ")[2] for each in libraries.find_problems()] == [
        "not the tested version 1.0"
    ]


def test_explicit_role_wins_over_a_detected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_process", recording._Process())
    recording.detect_role("other", "")
    assert not recording._process.is_detected
    recording.detect_role("trainer", "rank 0")
    assert (recording._process.role, recording._process.is_detected) == ("trainer", True)

    monkeypatch.setenv("TORCHLENS_PERF_ROLE", "rollout/engine-1")
    monkeypatch.setattr(recording, "_process", recording._Process())
    recording.detect_role("trainer", "rank 0")
    assert (recording._process.role, recording._process.name) == ("rollout", "engine-1")
