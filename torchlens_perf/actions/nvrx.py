"""Exclude a node from the next rendezvous of NVIDIA's ft_launcher (nvidia-resiliency-ext), by a message to
the launcher on this node. Its ranks have the path of the socket as FT_LAUNCHER_IPC_SOCKET."""

from __future__ import annotations

import importlib.util
import os
import socket
from pickle import PickleError

from torchlens_perf.actions.nodes import NamedNode
from torchlens_perf.actions.targets import TIMEOUT_S, NotSentError
from torchlens_perf.errors import DAMAGED_DATA, require


class FaultTolerantLauncher:
    """The ft_launcher of this node. The node stays in the job until the next rendezvous, as after a failure."""

    drains, while_live, attribute = True, True, ""

    def __init__(self, path: str) -> None:
        require(
            importlib.util.find_spec("nvidia_resiliency_ext") is not None,
            "--to nvrx: nvidia-resiliency-ext is not installed here: pip install nvidia-resiliency-ext",
        )
        self._path = path

    def describe(self, node: NamedNode) -> str:
        if (here := socket.gethostname()) != node.host:
            raise NotSentError(f"this is {here}: run this command on {node.host}")
        return f"exclude {node.host} from the next rendezvous, by {self._path}"

    def send(self, node: NamedNode) -> str:
        # The answer is a pickle, which can run any code.
        if os.lstat(self._path).st_uid != os.geteuid():
            raise NotSentError(f"{self._path} belongs to another user")
        # IpcConnector waits without a limit of its own. Other sockets have none here.
        socket.setdefaulttimeout(TIMEOUT_S)
        try:
            from nvidia_resiliency_ext import fault_tolerance
            from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector

            request = fault_tolerance.WorkloadControlRequest(
                fault_tolerance.WorkloadAction.ExcludeThisNode, node.reason
            )
            IpcConnector(self._path).send((node.ranks[0], request))
        except (ImportError, RuntimeError, EOFError, PickleError, *DAMAGED_DATA) as error:
            raise NotSentError(f"{type(error).__name__}: {error}") from None
        finally:
            socket.setdefaulttimeout(None)
        return "the launcher has the request"
