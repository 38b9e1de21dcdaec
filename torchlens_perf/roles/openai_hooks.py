"""Events of requests to an OpenAI-compatible server, seen from the client.

A request is a generation of the server. In a rollout of TRL, it is a sample, or continues the sample
of an earlier request: one of the same thread or task with the first of its messages.

A process without a role that continues a chat is a tool: it has answered the model. One that has
imported torch or JAX may be a trainer, and one that continues none may be a judge: they have no role.
"""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from torchlens_perf.roles import recording, trl_hooks
from torchlens_perf.roles.event_file import NOT_GIVEN
from torchlens_perf.roles.recording import record

Following = Generator[None, Any, None]


_last_turn: contextvars.ContextVar[tuple[str, str, list[int], int]] = contextvars.ContextVar(
    "last turn", default=("", "", [], 0)
)
"""Batch, sample, hashes of messages and end of the last request of this thread or task."""


class _Request:
    """A request to a server."""

    def __init__(self, resource: Any, messages: Sequence[Any]) -> None:
        mine = trl_hooks.rollout
        self.batch = mine.batch if mine.is_generating else ""
        self.server = "rollout", urlsplit(str(resource._client.base_url)).netloc.rpartition("@")[2]
        self.began_ns, self.first_ns = time.monotonic_ns(), 0
        self.messages = list(map(_hash_message, messages))
        self.usage: Any = None
        batch, self.sample, earlier, end_ns = _last_turn.get()
        count = len(earlier)
        if batch == self.batch and earlier and self.messages[:count] == earlier != self.messages:
            # A conversation continues with what a tool or the environment has answered.
            if not recording.current_role() and not {"torch", "jax"} & sys.modules.keys():
                recording.detect_role("tool")
            mate = None if recording.current_role() == "tool" else trl_hooks.BETWEEN_TURNS
            record("tool_begin", self.sample, of=mate, time_ns=end_ns)
            record("tool_end", self.sample, of=mate, time_ns=self.began_ns)
            return
        self.sample = recording.make_id()
        if mine.is_generating:
            mine.ids.append(self.sample)
            record("sample_sent", self.sample, batch=self.batch, time_ns=self.began_ns)

    def add(self, part: Any) -> None:
        """Note a part of a streamed answer, the first of which ends the wait."""
        self.first_ns = self.first_ns or time.monotonic_ns()
        self.usage = getattr(part, "usage", None) or self.usage

    def end(self) -> None:
        """Record the generation."""
        end_ns = time.monotonic_ns()
        record(
            "generation_begin",
            self.sample,
            of=self.server,
            time_ns=self.first_ns or self.began_ns,
        )
        record(
            "generation_end",
            self.sample,
            tokens_in=self._read_tokens("prompt_tokens"),
            tokens_out=self._read_tokens("completion_tokens"),
            of=self.server,
            time_ns=end_ns,
        )
        _last_turn.set((self.batch, self.sample, self.messages, end_ns))

    def _read_tokens(self, name: str) -> int:
        # Servers may leave a number out, or send null.
        tokens = getattr(self.usage, name, None)
        return tokens if isinstance(tokens, int) else NOT_GIVEN


def _hash_message(message: Any) -> int:
    # Python keeps the hash of a text. Other contents, such as images, are large.
    content = message.get("content") if isinstance(message, dict) else None
    return hash(content) if isinstance(content, str) else 0


def _follow_parts(request: _Request, parts: Iterator[Any]) -> Iterator[Any]:
    for each in parts:
        request.add(each)
        yield each
    request.end()


async def _follow_async_parts(request: _Request, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for each in parts:
        request.add(each)
        yield each
    request.end()


def _end_at_close(request: _Request, stream: Any) -> None:
    name = "aclose" if hasattr(stream, "aclose") else "close"
    close = getattr(stream, name)

    def end_and_close() -> Any:
        request.end()
        return close()

    setattr(stream, name, end_and_close)


def _follow_create(resource: Any, *args: Any, **kwargs: Any) -> Following:
    messages = kwargs.get("messages", ())
    request = _Request(resource, messages if isinstance(messages, (list, tuple)) else ())
    result = yield
    response = getattr(result, "http_response", None)
    if response is not None and not response.is_closed:
        # with_streaming_response: the program reads the answer itself.
        _end_at_close(request, response.stream)
    elif not kwargs.get("stream"):
        request.usage = getattr(result, "usage", None)
        request.end()
    elif hasattr(result, "_iterator"):
        is_async = hasattr(result, "__aiter__")
        follow: Any = _follow_async_parts if is_async else _follow_parts
        result._iterator = follow(request, result._iterator)


_CREATE: dict[str, Callable[..., Following]] = {
    "Completions.create": _follow_create,
    "AsyncCompletions.create": _follow_create,
}
FOLLOWERS = {
    "openai.resources.completions": _CREATE,
    "openai.resources.chat.completions.completions": _CREATE,
}
