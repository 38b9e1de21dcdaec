"""Publish and find the address of node 0's sidecar.

The address is in a setting, in the run directory, or in the job's store. The other nodes use the
first address that answers with a proof of the job's token. The job's store is a
torch.distributed.TCPStore, whose client may block without a limit. A child process (job_store.py)
therefore accesses the store, and is killed after a timeout.
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
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming

_RECORD = re.compile(r"2 (\d{1,5}) ([0-9a-f]{32}) ([^\s]+(?: [^\s]+)*)")
_MAX_RECORD_BYTES = 4096
_NOT_YET = "it has not published its address yet"
_ANY_TIME_S = float("-inf")


def store_key_of_watch(watch: int) -> str:
    """Return the key of node 0's address in the job's store.

    watch: number of earlier watches of the processes. The key has no run id and no restart count,
    because they may differ between nodes. The store belongs to one job only.
    """
    return f"torchlens_perf/{watch}/exchange"


class NotPublishedYet(ConnectionError):
    """Node 0 has not published its address yet. This error is normal at the start of a job."""


@dataclasses.dataclass(frozen=True)
class ExchangeAddress:
    """The address of node 0's sidecar, and the token that allows other nodes to send reports."""

    port: int
    token: str
    hosts: tuple[str, ...]
    """Names and addresses under which other nodes may reach node 0, likeliest first."""

    def encode(self) -> bytes:
        return " ".join(["2", str(self.port), self.token, *self.hosts]).encode()

    @classmethod
    def decode(cls, data: bytes) -> ExchangeAddress:
        """Decode an address. Raises ConnectionError for invalid data."""
        found = _RECORD.fullmatch(data[:_MAX_RECORD_BYTES].decode("utf-8", "replace"))
        if found is None or not 0 < int(found[1]) < 1 << 16:
            raise ConnectionError("the published address of node 0 is invalid")
        return cls(int(found[1]), found[2], tuple(found[3].split(" ")))


def create_token(places: Endpoints, key: str) -> str:
    """Return the token of a job.

    If node 0 publishes its address, the token is random. If the address is configured, all nodes
    derive the token from the configured token, the key and the store's address. Without a
    configured token, the result is not a secret. Raises OSError if the token file cannot be read.
    """
    if not places.coordinator:
        return secrets.token_hex(16)
    secret = (
        _read_private_file(Path(places.token_file)) if places.token_file else places.token.encode()
    )
    shared = f"{key} {places.job_store}"
    return hmac.new(secret.strip(), shared.encode(), hashlib.sha256).hexdigest()[:32]


class Rendezvous:
    """Access to the places where node 0 publishes its address. Methods do not block."""

    def __init__(
        self,
        places: Endpoints,
        key: str,
        timing: ExchangeTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places
        self.key = key
        self.timing = timing or ExchangeTiming()
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._child_until_s = 0.0
        self._not_before_s = _ANY_TIME_S
        self._store_from_s = clock() + self.timing.store_after_s * random.uniform(1.0, 2.0)
        self._in_store: ExchangeAddress | None = None
        self._published_file: ExchangeAddress | None = None
        self._published_store: ExchangeAddress | None = None
        self._store_error = ""

    @property
    def address_file(self) -> Path | None:
        """File for the address in the run directory, or None without a run directory."""
        name = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        return self.places.folder / f"exchange-{name}" if self.places.folder is not None else None

    def publish_address(self, address: ExchangeAddress) -> str:
        """Publish node 0's address in all places that lack it. Return an error, or ""."""
        error = ""
        if self._published_file != address and self.address_file is not None:
            try:
                _write_private_file(self.address_file, address.encode())
                self._published_file = address
            except OSError as failed:
                error = f"the address cannot be written to the run directory: {failed}"
        if self.places.job_store is None or self._published_store == address:
            return error
        # Do not wait for the child process. A later call reads its result.
        if self._child is None and self._clock() >= self._not_before_s:
            self._start_store_process(publish=address)
        answer = self._poll_store_process()
        if answer == address.encode():
            self._published_store = address
            return error
        return self._store_error or error

    def find_addresses(self) -> list[tuple[str, ExchangeAddress]]:
        """Return the published addresses of node 0, each with its source.

        Raises NotPublishedYet if there is no address yet, and OSError after an error.
        """
        found, error = [], ""
        if self.places.coordinator:
            host, port = split_address(self.places.coordinator)
            found.append(
                (
                    "the setting `exchange`",
                    ExchangeAddress(port, create_token(self.places, self.key), (host,)),
                )
            )
        if self.address_file is not None:
            try:
                found.append(
                    (
                        "the run directory",
                        ExchangeAddress.decode(_read_private_file(self.address_file)),
                    )
                )
            except FileNotFoundError:
                pass  # Node 0 has not written the file, or its run directory is on another disk.
            except OSError as failed:
                error = f"{self.address_file}: {failed}"
        if self.places.job_store is not None:
            self._poll_job_store()
            if self._in_store is not None:
                found.append(("the job's store", self._in_store))
        if not found:
            error = self._store_error or error
            raise ConnectionError(error) if error else NotPublishedYet(_NOT_YET)
        return found

    def stop_search(self) -> None:
        """Stop the search after node 0 was found. The next find_addresses() restarts it."""
        self._kill_store_process()
        self._not_before_s = _ANY_TIME_S
        self._store_from_s = self._clock() + self.timing.store_after_s * random.uniform(1.0, 2.0)

    def close(self, *, unpublish: ExchangeAddress | None = None) -> None:
        """Kill the child process. unpublish: remove the file with this address."""
        self._kill_store_process()
        if unpublish is not None and self.address_file is not None:
            with contextlib.suppress(OSError):
                # The file may contain the address of a later sidecar.
                if ExchangeAddress.decode(_read_private_file(self.address_file)) == unpublish:
                    self.address_file.unlink()

    # -- the job's store

    def _poll_job_store(self) -> None:
        if self._child is None and self._clock() >= max(self._store_from_s, self._not_before_s):
            self._start_store_process(publish=None)
        answer = self._poll_store_process()
        if answer:
            try:
                self._in_store = ExchangeAddress.decode(answer)
            except ConnectionError as error:
                self._store_error = str(error)

    def _start_store_process(self, publish: ExchangeAddress | None) -> None:
        assert self.places.job_store is not None
        host, port = self.places.job_store
        known = self._in_store.encode().decode() if self._in_store else ""
        order = {
            "host": host, "port": port, "key": self.key, "lives_s": self.timing.store_child_s, "known": known,
            "publish": publish.encode().decode() if publish else "",
        }  # fmt: skip
        # Make the child process record nothing, load no device plugin, and print no warnings of
        # torch.
        environment = {
            **children.build_environment(),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        self._child = subprocess.Popen(
            children.build_command("job-store"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._child.stdin is not None
        # The request contains the token. All users of the machine can read arguments, so pass the
        # request through a pipe. Writing does not block, because the request fits the pipe's
        # buffer.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(order).encode())
            self._child.stdin.close()
        self._child_until_s = self._clock() + self.timing.store_child_s

    def _poll_store_process(self) -> bytes:
        """Return the value that the child has found or published. b"" means no value yet."""
        if self._child is None:
            return b""
        if self._child.poll() is None:
            if self._clock() < self._child_until_s:
                return b""
            lives_s = self.timing.store_child_s
            answer = f"error the job's store did not answer within {lives_s:.0f} s".encode()
        else:
            assert self._child.stdout is not None
            answer = self._child.stdout.read(_MAX_RECORD_BYTES)
        self._kill_store_process()
        kind, _, value = answer.partition(b" ")
        if kind == b"found" and value:
            self._store_error = ""
            return value
        failed = (
            value.decode(errors="replace") or "the process that asks the job's store has failed"
        )
        self._store_error = failed if kind != b"nothing" else ""
        self._not_before_s = self._clock() + self.timing.store_again_s * random.uniform(0.5, 1.0)
        return b""

    def _kill_store_process(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None


def _write_private_file(path: Path, data: bytes) -> None:
    """Write a file atomically. Only this user can read it."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read_private_file(path: Path) -> bytes:
    """Return the content of a file that only this user can read. Raises OSError for other files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o077
        ):
            raise PermissionError("it is not a file that belongs to this user alone (mode 0600)")
        return file.read(_MAX_RECORD_BYTES)
