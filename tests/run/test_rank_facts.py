"""Facts in ring files of this version and of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.errors import RingError
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_facts import RankFacts, SidecarSettings
from torchlens_perf.run.ring import RingReader
from torchlens_perf.sidecar.node import Sidecar


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def metadata_of(rank: Rank) -> dict[str, Any]:
    reader = RingReader(rank.ring_path)
    found = reader.read_metadata()
    reader.close()
    return found


def sidecar_of(run: RunDirectory) -> Sidecar:
    return Sidecar(run, HOST, None, lambda run, facts: None)


def test_published_facts_are_read_back_unchanged(run: RunDirectory) -> None:
    rank = Rank(run, 0)
    facts = rank.session.facts
    facts.trainings, facts.device = [(3, "GPT")], {"clock": "CUDA events", "error_ns": None}
    rank.session.metadata.add_group("0", range(2), "default_pg")

    assert RankFacts.from_metadata(metadata_of(rank)) == facts
    rank.close()


def test_fields_that_another_version_lacks_or_adds_do_no_harm() -> None:
    found = RankFacts.from_metadata({"threads": 4, "settings": {"later": 1}, "later": [{}]})

    assert found == RankFacts(threads=4)
    assert found.settings == SidecarSettings()


@pytest.mark.parametrize(
    "metadata", [{"threads": "many"}, {"gpus": [{"uuid": 3}]}, {"job_store": ["host"]}]
)
def test_field_of_another_type_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(RingError, match="another version"):
        RankFacts.from_metadata(metadata)


def test_ring_with_facts_of_another_version_is_noted_and_others_are_read(run: RunDirectory) -> None:
    ranks = [Rank(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.steps(5, forward=1)
    ranks[0].ring.set_metadata({**metadata_of(ranks[0]), "threads": "many"})
    sidecar = sidecar_of(run)
    sidecar.read_rings()
    (note,) = [each for each in sidecar.state.notes if "another version" in each]

    assert ranks[0].ring_path.name in note
    assert [each.identity.rank for each in sidecar.state.processes.values()] == [1]
    sidecar.close()
    for rank in ranks:
        rank.close()


def test_earlier_facts_stay_if_later_ones_cannot_be_read(run: RunDirectory) -> None:
    rank = Rank(run, 0)
    rank.steps(5, forward=1)
    sidecar = sidecar_of(run)
    for _ in range(2):
        sidecar.read_rings()
        sidecar.count_records()
        rank.ring.set_metadata({**metadata_of(rank), "groups": "none", "folder": "elsewhere"})
        rank.steps(5, forward=1)
    sidecar.read_rings()
    sidecar.count_records()
    (process,) = sidecar.state.processes.values()

    assert process.facts.folder == rank.session.facts.folder
    assert process.statistics.counted_steps >= 10
    assert any("another version" in each for each in sidecar.state.notes)
    sidecar.close()
    rank.close()


@pytest.mark.parametrize(
    ("variables", "prefix", "port"),
    [
        ({}, "/home/me/.cache/torch/comm_lib_trace_rank_", 28028),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/torch/comm_lib_trace_rank_", 28028),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a_", "NCCL_RAS_ADDR": "[::1]:7"}, "/a_", 7),
        (
            {"TORCH_FR_DUMP_TEMP_FILE": "/b_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a_"},
            "/b_",
            28028,
        ),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/b_", "NCCL_RAS_ENABLE": "0"}, "/b_", 0),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/b_", "NCCL_RAS_ADDR": "host"}, "/b_", 0),
    ],
)
def test_rank_publishes_where_torch_and_nccl_record_hangs(
    variables: dict[str, str], prefix: str, port: int, run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NCCL is used once a process group has tensors on a GPU."""
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    rank, alone = Rank(run, 0, 2), Rank(run, 1, 1)
    metadata = rank.session.metadata
    assert (metadata.facts.dump_prefix, metadata.facts.nccl_ras_port) == (prefix, 0)
    assert alone.session.facts.dump_prefix == ""
    metadata.device_groups.add(("0", "cuda"))
    metadata.publish()
    assert metadata.facts.nccl_ras_port == port
    rank.close()
    alone.close()
