"""Events of requests to an OpenAI-compatible server, seen from the client.

A request is a generation of the server. In a rollout of TRL, it is a sample, or continues the sample
of an earlier request: one of the same thread or task with fewer messages.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchlens_perf.errors import guard
from torchlens_perf.roles import recording, trl_hooks
from torchlens_perf.roles.recording import record

Following = Generator[None, Any, None]


class _Turn(NamedTuple):
    """A request that has ended."""

    batch: str
    sample: str
    messages: int
    end_ns: int


_last_turn: contextvars.ContextVar[_Turn | None] = contextvars.ContextVar("turn", default=None)


class _Request:
    """A request to a server."""

    def __init__(self, resource: Any, messages: int) -> None:
        mine = trl_hooks.rollout
        self.batch = mine.batch if mine.is_open else ""
        self.server = "rollout", urlsplit(str(resource._client.base_url)).netloc
        self.messages, self.began_ns = messages, time.monotonic_ns()
        last = _last_turn.get()
        if last is not None and last.batch == self.batch and 0 < last.messages < messages:
            # A conversation continues with what a tool or the environment has answered.
            self.sample = last.sample
            record("tool_begin", self.sample, of=("tool", "between turns"), time_ns=last.end_ns)
            record("tool_end", self.sample, of=("tool", "between turns"), time_ns=self.began_ns)
            return
        self.sample = recording.make_id()
        if mine.is_open:
            mine.requests.append(self.sample)
            record("sample_sent", self.sample, batch=self.batch, time_ns=self.began_ns)

    def end(self, usage: Any, first_ns: int = 0) -> None:
        """Record the generation. first_ns: time of the first part of a stream."""
        end_ns = time.monotonic_ns()
        record("generation_begin", self.sample, of=self.server, time_ns=first_ns or self.began_ns)
        record(
            "generation_end",
            self.sample,
            tokens_in=getattr(usage, "prompt_tokens", None),
            tokens_out=getattr(usage, "completion_tokens", None),
            of=self.server,
            time_ns=end_ns,
        )
        _last_turn.set(_Turn(self.batch, self.sample, self.messages, end_ns))


class _Stream:
    """The parts of a streamed answer, with their usage and times."""

    def __init__(self, request: _Request, parts: Any) -> None:
        self._request, self._parts = request, parts
        self._first_ns, self._usage = 0, None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            part = next(self._parts)
        except StopIteration:
            self._end()
            raise
        self._add(part)
        return part

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            part = await self._parts.__anext__()
        except StopAsyncIteration:
            self._end()
            raise
        self._add(part)
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts, name)

    @guard("following a stream")
    def _add(self, part: Any) -> None:
        self._first_ns = self._first_ns or time.monotonic_ns()
        self._usage = getattr(part, "usage", None) or self._usage

    @guard("following the end of a stream")
    def _end(self) -> None:
        self._request.end(self._usage, self._first_ns)


def _follow_create(resource: Any, *args: Any, **kwargs: Any) -> Following:
    messages = kwargs.get("messages", ())
    request = _Request(resource, len(messages) if isinstance(messages, (list, tuple)) else 0)
    result = yield
    if not kwargs.get("stream"):
        request.end(getattr(result, "usage", None))
    elif hasattr(result, "_iterator"):
        result._iterator = _Stream(request, result._iterator)


_CREATE: dict[str, Callable[..., Following]] = {
    "Completions.create": _follow_create,
    "AsyncCompletions.create": _follow_create,
}
FOLLOWERS = {
    "openai.resources.completions": _CREATE,
    "openai.resources.chat.completions.completions": _CREATE,
}
