"""Publish facts about a rank that the sidecar needs in addition to the records.

The facts are JSON in the ring file.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.config import public_fields
from torchlens_perf.errors import guard
from torchlens_perf.interruption import suppress
from torchlens_perf.output import logger
from torchlens_perf.recorder import torch_private
from torchlens_perf.run.identity import digest_module_names, job_store_address
from torchlens_perf.run.processes import main_thread_cpu_wait_ns, process_age_s
from torchlens_perf.run.rank_facts import RankFacts, ReportRequest, SidecarSettings, encode_path
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.ring import MAX_GROUPS

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.failure import Failure
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.ring import RingFile

# Notes share 8 KB with all other metadata.
_MAX_NOTES = 24
_MAX_VARIABLES, _MAX_VALUE_LENGTH = 16, 60
_SPEED_VARIABLE = re.compile(
    r"(TORCH_)?NCCL_\w+|(OMP|MKL)_NUM_THREADS|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|NVIDIA_TF32_OVERRIDE"
)
# Settings of watch() that do not change what is measured.
_PLACES = ("dir", "exchange", "prometheus", "report", "share")
_FRAMEWORKS = (
    "accelerate", "colossalai", "composer", "deepspeed", "fastai", "ignite", "lightning", "megatron", "nemo",
    "pytorch_lightning", "ray.train", "torchtitan", "torchtune", "transformers.trainer", "trl.trainer",
    "verl", "vllm",
)  # fmt: skip
"""Modules that a program loads if it trains with these frameworks."""

_start_reported_by = 0
"""Id of the process whose first watch has already reported the process's start time."""


class StepCounter(Protocol):
    """The recorder whose facts are published: the native one, or that of a simulated rank."""

    @property
    def closed(self) -> bool:
        """True after the end of the watch."""

    @property
    def step(self) -> int:
        """Number of the step in progress."""


class RankMetadata:
    """Publishes facts about the rank. Methods may be called on any thread."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        ring: RingFile,
        recorder: StepCounter,
        anchor: Anchor,
        *,
        reports_start: bool = False,
        simulated: bool = False,
    ) -> None:
        """anchor: the start of the recording by both clocks. reports_start: True if the process's
        start is part of the run.
        """
        self._ring = ring
        self._recorder = recorder
        self._identity = identity
        self._anchor = anchor
        self._may_have_store = config.exchange != "off"
        self._module_names: set[str] = set()
        self.groups: set[str] = set()
        """Names of used process groups."""
        self.device_groups: set[tuple[str, str]] = set()
        """(name, device type) of process groups with tensors on a device."""
        self.facts = RankFacts(
            settings=SidecarSettings.from_config(config),
            simulated=simulated,
            run_settings={} if simulated else _collect_run_settings(config),
            total_steps=config._total_steps,
            folder="" if simulated else encode_path(_find_program_folder()),
            thread_id=0 if simulated else threading.get_native_id(),
            error_file=(
                "" if simulated else _encode_absolute(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
            ),
            dump_prefix="" if simulated or not identity.has_other_ranks else _find_dump_prefix(),
            interactive=hasattr(sys, "ps1") or bool(sys.flags.interactive),
            process_began_ns=_compute_process_start_ns(identity) if reports_start else 0,
            model=digest_module_names(()),
        )
        """The facts. After a change, call publish()."""

    def note(self, text: str) -> None:
        """Add a note on data quality to the report, for example what is not measured and why."""
        notes = self.facts.notes
        if text not in notes and len(notes) < _MAX_NOTES:
            full = len(notes) == _MAX_NOTES - 1
            notes.append("further notes are left out: see the job's log" if full else text)
            if full:
                logger.warning("torchlens_perf: %s", text)
            self.publish()

    def note_threads(self, text: str) -> None:
        """Note that several threads run models."""
        self.facts.thread_id = 0
        self.note(text)

    def note_unmeasured_part(self, part: str) -> None:
        """Note that a part of the step cannot be measured separately."""
        if part not in self.facts.not_measured:
            self.facts.not_measured.append(part)
            self.publish()

    def set_model_steps(self, model_steps: int, steps: int) -> None:
        """Publish how many steps the model had made before this process. The first call counts.

        model_steps: the model's step counter after `steps` steps of this process.
        """
        if self.facts.step_offset is None:
            self.facts.step_offset = max(0, model_steps - steps)
            self.publish()

    def forget_model_steps(self) -> None:
        """Publish that it is not known how many steps the model had made before this process."""
        if self.facts.step_offset is not None:
            self.facts.step_offset = None
            self.publish()

    def add_group(self, name: str, members: Sequence[int], description: str) -> None:
        self.groups.add(name)
        if len(self.facts.groups) < MAX_GROUPS:
            self.facts.groups[name] = {"ranks": format_ranges(members), "description": description}
        self.publish()

    def computes_on(self, device: str) -> bool:
        """Return True if watched models or tensors of a process group are on a device
        of this type.
        """
        return self.facts.compute_device == device or any(
            kind == device for _, kind in self.device_groups
        )

    def add_modules(
        self,
        are_roots: Mapping[str, bool],
        *,
        device: str,
        all_levels: bool,
        unopened: Iterable[str],
    ) -> None:
        """Publish timed modules that are new. are_roots: True for each name of a whole model.

        device: device type of the modules' model, or "" if unknown. all_levels: True if all inner
        modules are also timed.
        unopened: timed modules whose inner modules are not timed.
        """
        facts = self.facts
        new = are_roots.keys() - self._module_names
        if not new:
            return
        self._module_names.update(new)
        # The digest of many names takes milliseconds.
        facts.model = digest_module_names(self._module_names)
        facts.root_modules += [
            name for name, is_root in are_roots.items() if is_root and name in new
        ]
        facts.unopened_modules += unopened
        facts.deeper_modules |= not all_levels
        facts.compute_device = facts.compute_device or device
        self.publish()

    def publish(self) -> None:
        """Write all facts into the ring file."""
        facts, recorder = self.facts, self._recorder
        if recorder.closed:
            return
        # Measure CPU contention of the start-up, which includes compilation in the first step.
        if recorder.step <= 1 and facts.process_began_ns:
            facts.start_cpu_wait_ns = main_thread_cpu_wait_ns(os.getpid())
        if any(device == "cuda" for _, device in self.device_groups):
            facts.nccl_ras_port = _find_ras_port()
        if not facts.simulated:
            facts.run_settings["framework"] = _name_frameworks()
        facts.threads = _count_torch_threads(has_computed=recorder.step > 0)
        facts.job_store = job_store_address(os.environ) if self._may_have_store else None
        with guard("asking torch how long it compiled"):
            facts.compile_s = torch_private.read_compile_s()
        self._ring.set_metadata(
            {
                "identity": vars(self._identity),
                "anchor": self._anchor._asdict(),
                "run_dir": self._ring.run_dir,
                **vars(facts),
            }
        )

    def publish_end(self, report: ReportRequest | None, failure: Failure | None) -> None:
        """Publish all facts for the last time. report: the report that rank 0 requests."""
        self.facts.report, self.facts.failure = report or self.facts.report, failure
        self.publish()


def _compute_process_start_ns(identity: Identity) -> int:
    """Return the start time of this process, in ns of CLOCK_MONOTONIC.

    Return 0 for a later watch of the process, because earlier training is not part of its start.
    """
    global _start_reported_by
    if not identity.process_started or _start_reported_by == os.getpid():
        return 0
    _start_reported_by = os.getpid()
    return max(1, time.monotonic_ns() - int(process_age_s(identity.process_started) * 1e9))


def _collect_run_settings(config: Config) -> dict[str, str]:
    """Return versions, settings and variables that runs are compared by, as text by name."""
    torch = sys.modules.get("torch")
    variables = sorted(filter(_SPEED_VARIABLE.fullmatch, os.environ))[:_MAX_VARIABLES]
    return {
        "python": sys.version.split()[0],
        **({"torch": str(torch.__version__)} if torch is not None else {}),
        **{
            f"watch {field.name}": str(value)[:_MAX_VALUE_LENGTH]
            for field in public_fields()
            if field.name not in _PLACES and (value := getattr(config, field.name)) != field.default
        },
        **{
            name: os.environ[name].encode(errors="replace").decode()[:_MAX_VALUE_LENGTH]
            for name in variables
        },
    }


def _name_frameworks() -> str:
    """Return the training frameworks that the program has loaded so far, such as "deepspeed"; "none"
    without one.
    """
    # transformers loads accelerate for any model, and accelerate loads an installed deepspeed to unwrap
    # any model. Only a program that uses them fills their state.
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    used = {
        "accelerate": getattr(state, "_shared_state", None),
        "deepspeed": getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None),
    }
    return (
        ", ".join(each for each in _FRAMEWORKS if used.get(each, sys.modules.get(each))) or "none"
    )


def _find_program_folder() -> str:
    """Return the folder of the program, or the working directory for one that is installed."""
    with suppress(OSError):
        script = os.path.abspath(str(sys.argv[0]) if sys.argv else "")
        return os.getcwd() if script.startswith(sys.prefix) else os.path.dirname(script)
    return ""


def _encode_absolute(path: str) -> str:
    """Return encode_path() of an absolute path; "" for "" or without a working directory.

    A path may be relative to a working directory that the sidecar does not share.
    """
    with suppress(OSError):
        return encode_path(os.path.abspath(path) if path else "")
    return ""


def _find_dump_prefix() -> str:
    """Return RankFacts.dump_prefix, as DebugInfoWriter::getWriter() of torch chooses it."""
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/tmp')}/.cache"
    chosen = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    )
    return _encode_absolute(chosen or f"{cache}/torch/comm_lib_trace_rank_")


def _find_ras_port() -> int:
    """Return the port of the RAS service that NCCL_RAS_ADDR chooses, or 0 if it is off."""
    port = os.environ.get("NCCL_RAS_ADDR", "").rpartition(":")[2] or "28028"
    return int(port) if port.isdecimal() and os.environ.get("NCCL_RAS_ENABLE") != "0" else 0


def _count_torch_threads(*, has_computed: bool) -> int:
    """Return the number of threads that a torch operation uses, or 0 if unknown.

    Before the first operation torch is not queried, because the query would fix the number.
    """
    torch = sys.modules.get("torch")
    if has_computed and torch is not None:
        return int(torch.get_num_threads())
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdecimal() else 0
