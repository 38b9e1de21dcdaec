"""How the nodes of a job find node 0's sidecar: where the user said, in the run directory, or in the job's store.

Node 0 publishes its address wherever it can, and the others take what answers first and proves to have the address's
token. The job's store is a torch.distributed.TCPStore, whose client cannot be bounded in time: only a child process
asks it (job_store.py), which is killed where it takes too long, so that no sidecar imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import random
import re
import secrets
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from torchlens_perf.run import children
from torchlens_perf.sidecar.nodes.endpoints import Endpoints, split_address
from torchlens_perf.sidecar.nodes.timing import Timing

_RECORD = re.compile(r"2 (\d{1,5}) ([0-9a-f]{32}) ([^\s]+(?: [^\s]+)*)")
_MAX_RECORD_BYTES = 4096
_NOT_YET = "it has not published its address yet"
_ANY_TIME_S = float("-inf")


def exchange_key(watch: int) -> str:
    """The key in the job's store under which the nodes meet. watch: how many watches their processes ran before.

    The store is the job's alone, and what one node calls the run, or its restarts, another may call otherwise.
    """
    return f"torchlens_perf/{watch}/exchange"


class NotYet(ConnectionError):
    """Node 0 has not published its address: at the start of a job that is no error."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where node 0's sidecar listens, and the token of who may send to it."""

    port: int
    token: str
    hosts: tuple[str, ...]
    """The same node, by the names and addresses that others may know it by; the likeliest first."""

    def encode(self) -> bytes:
        return " ".join(["2", str(self.port), self.token, *self.hosts]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Raises ConnectionError for anything that is not an address."""
        found = _RECORD.fullmatch(data[:_MAX_RECORD_BYTES].decode("utf-8", "replace"))
        if found is None or not 0 < int(found[1]) < 1 << 16:
            raise ConnectionError("what was published for us is not an address")
        return cls(int(found[1]), found[2], tuple(found[3].split(" ")))


def new_token(places: Endpoints, key: str) -> str:
    """Return the token of a job: random, if it is published.

    If node 0's address is configured, all nodes derive the token from the configured one, or its file, and from what
    they share, or from the latter alone, which is no secret. Raises OSError for the file.
    """
    if not places.coordinator:
        return secrets.token_hex(16)
    secret = _private_file(Path(places.token_file)) if places.token_file else places.token.encode()
    shared = f"{key} {places.job_store}"
    return hmac.new(secret.strip(), shared.encode(), hashlib.sha256).hexdigest()[:32]


class Rendezvous:
    """Publishes node 0's address, or looks for it. Returns at once from every call. All from one thread."""

    def __init__(
        self,
        places: Endpoints,
        key: str,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._key = key
        self._timing = timing or Timing()
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._child_until_s = 0.0
        self._not_before_s = _ANY_TIME_S
        self._look_from_s = clock() + self._timing.store_after_s * random.uniform(1.0, 2.0)
        self._in_store: Address | None = None
        self._published_file: Address | None = None
        self._published_store: Address | None = None
        self._store_error = ""

    @property
    def file(self) -> Path | None:
        """In the run directory, that of this key."""
        name = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        return self._places.folder / f"exchange-{name}" if self._places.folder is not None else None

    def publish(self, address: Address) -> str:
        """Says where node 0's sidecar is, as far as that has not been done. Returns what is wrong; "" for nothing."""
        error = ""
        if self._published_file != address and self.file is not None:
            try:
                _write(self.file, address.encode())
                self._published_file = address
            except OSError as failed:
                error = f"the run directory does not hold our address: {failed}"
        if self._places.job_store is None or self._published_store == address:
            return error
        if self._child is None and self._clock() >= self._not_before_s:
            self._start_child(publish=address)
        answer = self._child_answer()
        if answer == address.encode():
            self._published_store = address
            return error
        return self._store_error or error

    def known(self) -> list[tuple[str, Address]]:
        """Where node 0's sidecar may be, with who says so. Raises NotYet if nobody does, else OSError."""
        found, error = [], ""
        if self._places.coordinator:
            host, port = split_address(self._places.coordinator)
            found.append(("the setting `exchange`", Address(port, new_token(self._places, self._key), (host,))))
        if self.file is not None:
            try:
                found.append(("the run directory", Address.decode(_private_file(self.file))))
            except FileNotFoundError:
                pass  # node 0 has not written it yet, or its run directory is on another disk
            except OSError as failed:
                error = f"{self.file}: {failed}"
        if self._places.job_store is not None:
            self._look_into_store()
            if self._in_store is not None:
                found.append(("the job's store", self._in_store))
        if not found:
            error = self._store_error or error
            raise ConnectionError(error) if error else NotYet(_NOT_YET)
        return found

    def found(self) -> None:
        """Node 0 has been found: nothing is looked for before known() is called again."""
        self._end_child()
        self._not_before_s = _ANY_TIME_S
        self._look_from_s = self._clock() + self._timing.store_after_s * random.uniform(1.0, 2.0)

    def close(self, *, unpublish: Address | None = None) -> None:
        """Ends a child that runs. unpublish: removes the file of this address."""
        self._end_child()
        if unpublish is not None and self.file is not None:
            with contextlib.suppress(OSError):
                if Address.decode(_private_file(self.file)) == unpublish:  # else a later sidecar's
                    self.file.unlink()

    # -- the job's store

    def _look_into_store(self) -> None:
        if self._child is None and self._clock() >= max(self._look_from_s, self._not_before_s):
            self._start_child(publish=None)
        answer = self._child_answer()
        if answer:
            try:
                self._in_store = Address.decode(answer)
            except ConnectionError as error:
                self._store_error = str(error)

    def _start_child(self, publish: Address | None) -> None:
        assert self._places.job_store is not None
        host, port = self._places.job_store
        known = self._in_store.encode().decode() if self._in_store else ""
        order = {
            "host": host, "port": port, "key": self._key, "lives_s": self._timing.store_child_s, "known": known,
            "publish": publish.encode().decode() if publish else "",
        }  # fmt: skip
        # Neither ourselves nor a device's plugin; and no device is looked for.
        environment = {**children.environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self._child = subprocess.Popen(
            children.command("job-store"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._child.stdin is not None
        # Not by its arguments, which everybody on the machine can read: the token is among it. It fits into the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(order).encode())
            self._child.stdin.close()
        self._child_until_s = self._clock() + self._timing.store_child_s

    def _child_answer(self) -> bytes:
        """What the child has found or published; b"" while it looks, and where it failed."""
        if self._child is None:
            return b""
        if self._child.poll() is None:
            if self._clock() < self._child_until_s:
                return b""
            self._end_child()
            self._store_error = f"the job's store did not answer within {self._timing.store_child_s:.0f} s"
            self._not_before_s = self._clock() + self._timing.store_again_s * random.uniform(0.5, 1.0)
            return b""
        assert self._child.stdout is not None
        kind, _, value = self._child.stdout.read(_MAX_RECORD_BYTES).partition(b" ")
        self._end_child()
        if kind == b"found" and value:
            self._store_error = ""
            return value
        failed = value.decode(errors="replace") or "the process that asks the job's store has failed"
        self._store_error = failed if kind != b"nothing" else ""
        self._not_before_s = self._clock() + self._timing.store_again_s * random.uniform(0.5, 1.0)
        return b""

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None


def _write(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _private_file(path: Path) -> bytes:
    """What a file holds that belongs to this user and that nobody else can read. Raises OSError for another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError("it is not a file that belongs to this user alone (mode 0600)")
        return file.read(_MAX_RECORD_BYTES)
