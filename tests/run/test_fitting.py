"""Tests that a rank's metadata fit into its ring file, however long they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchlens_perf as perf
from tests.support.processes import report, wait_for_sidecar
from tests.support.ranks import Rank, run_without_traces
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.fitting import fit_metadata
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import RankFacts, ReportRequest
from torchlens_perf.run.ring import METADATA_BYTES, RingReader

LONG = "x" * 9000


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metadata that a real session publishes."""
    with run_without_traces(tmp_path_factory.mktemp("run")) as run:
        rank = Rank(run, 0)
        rank.session.note("something is not measured")
        rank.session.facts.report = ReportRequest(mailbox="/a", columns=77)
        rank.session.publish()
        reader = RingReader(rank.ring_path)
        metadata = reader.read_metadata()
        reader.close()
        rank.close()
    return metadata


def changed(usual: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path such as "identity.program"."""
    copy = json.loads(json.dumps(usual))
    *folders, name = path.split(".")
    place = copy
    for folder in folders:
        place = place[folder]
    place[name] = value
    return copy


CASES = [
    ("identity.traceparent", LONG, "identity.traceparent"),
    ("identity.program", LONG, "identity.program"),
    ("identity.host", LONG, "identity.host"),
    ("identity.attributes", {"host.rack": LONG}, "identity.attributes"),
    ("identity.attributes", {f"slurm.{i}": "x" * 90 for i in range(200)}, "identity.attributes ("),
    ("identity.attributes", {"k" * 9000: "v"}, "identity.attributes"),
    ("report.mailbox", "/" + LONG, "report.mailbox"),
    ("stack_file", "/" + LONG, "stack_file"),
    ("memory_source", LONG, "memory_source"),
    ("job_store", [LONG, 1], "job_store"),
    ("device", {f"field {i}": i for i in range(2000)}, "device"),
    (
        "gpus",
        [{"uuid": f"GPU-{i:036d}", "name": "NVIDIA", "index": i} for i in range(200)],
        "gpus (",
    ),
    ("groups", {str(i): {"ranks": "0-7", "description": "x" * 300} for i in range(48)}, "groups ("),
    (
        "groups",
        {"one": {"ranks": ",".join(map(str, range(0, 8000, 3))), "description": ""}},
        "groups",
    ),
    ("notes", ["y" * 400 for _ in range(24)], "notes ("),
    ("notes", ["\N{SNOWMAN}" * 3000], "notes"),
    ("unknown to us", {"deep": [LONG]}, "unknown to us"),
]


@pytest.mark.parametrize(
    ("path", "value", "told"), CASES, ids=[f"{path}-{len(str(v))}" for path, v, _ in CASES]
)
def test_one_field_that_is_too_long_is_left_out_with_a_note(
    usual: dict[str, Any], path: str, value: Any, told: str
) -> None:
    """All other fields are unchanged."""
    text = fit_metadata(changed(usual, path, value), METADATA_BYTES)
    found = json.loads(text)
    field = path.partition(".")[0]

    assert len(text) <= METADATA_BYTES
    assert found["notes"][-1].startswith("too long for the ring file, and left out: ")
    assert told in found["notes"][-1]
    assert {key: value for key, value in found.items() if key not in (field, "notes")} == {
        key: value for key, value in usual.items() if key not in (field, "notes")
    }
    if field != "notes":
        assert found["notes"][:-1] == usual["notes"]
    if path.count(".") == 1:
        inner = path.partition(".")[2]
        assert {**found[field], inner: 0} == {**usual[field], inner: 0}
    kept = found.get(field, type(value)())
    if isinstance(value, (dict, list)) and len(value) > 20 and field != "device":
        assert len(kept if field == path else kept["attributes"]) > 10, (
            "no more is left out than must be"
        )


def test_identity_clock_and_settings_are_kept_if_all_fields_are_too_long(
    usual: dict[str, Any],
) -> None:
    metadata = usual
    for path, value, _ in CASES:
        if path != "identity.host":
            metadata = changed(metadata, path, value)
    found = json.loads(fit_metadata(metadata, METADATA_BYTES))
    who = Identity(**found["identity"])

    assert (who.rank, who.host, who.key) == (
        0,
        usual["identity"]["host"],
        Identity(**usual["identity"]).key,
    )
    assert found["anchor"] == usual["anchor"]
    assert found["settings"] == usual["settings"]
    assert found["report"] == {**usual["report"], "mailbox": ""}
    assert RankFacts.from_metadata(found).notes == found["notes"]
    assert len(found["notes"][-1]) < 400


def test_metadata_that_fit_are_unchanged(usual: dict[str, Any]) -> None:
    """The limit is tested with metadata that use all bytes."""
    room = METADATA_BYTES - len(json.dumps({**usual, "stack_file": ""}, separators=(",", ":")))
    full = {**usual, "stack_file": "x" * room}

    assert len(fit_metadata(full, METADATA_BYTES)) == METADATA_BYTES
    assert json.loads(fit_metadata(full, METADATA_BYTES)) == full
    assert "stack_file" not in json.loads(
        fit_metadata({**full, "stack_file": "x" * (room + 1)}, METADATA_BYTES)
    )


_TEXT = st.text(st.characters(codec=None), max_size=40).flatmap(
    lambda text: st.integers(0, 900).map(lambda times: text * times)
)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(_TEXT, inner, max_size=40),
    max_leaves=30,
)


@given(
    st.dictionaries(
        st.sampled_from(["notes", "groups", "gpus", "device", "job_store", "new"]), _VALUE
    )
)
def test_any_metadata_fit_or_a_note_names_the_missing_fields(metadata: dict[str, Any]) -> None:
    identity = {"rank": 3, "traceparent": "x" * 5000, "attributes": {"a": "b"}}
    metadata = {"identity": identity, **metadata}
    if not isinstance(metadata.get("notes", []), list):
        del metadata["notes"]
    text = fit_metadata(metadata, METADATA_BYTES)
    found = json.loads(text)

    assert len(text) <= METADATA_BYTES
    assert found["identity"]["rank"] == 3
    if json.dumps(found) != json.dumps(metadata):
        assert "left out" in found["notes"][-1]


def test_result_is_empty_if_even_the_identity_does_not_fit() -> None:
    assert fit_metadata({"identity": {str(i): i for i in range(5000)}}, METADATA_BYTES) == b"{}"


def test_watch_with_too_long_variables_records_and_reports_missing_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment variables and the program name are too long."""
    monkeypatch.setenv("TRACEPARENT", LONG)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"host.rack={LONG},host.id=i-1")
    monkeypatch.setenv("SLURM_JOB_NAME", "\N{SNOWMAN}" * 4000)
    monkeypatch.setenv("MASTER_ADDR", LONG)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr("sys.argv", [f"{'train' * 50}.py"])
    with perf.watch(dir=str(tmp_path), report="off") as watch:
        for i in range(30):
            watch._session.note(f"{i} " + "many words " * 40)
            watch.step()
    assert watch.run_dir is not None
    run = RunDirectory(watch.run_dir)
    wait_for_sidecar(run)
    value = report(run)

    assert value["ranks"][0]["steps"] == 30
    assert any(
        "too long for the ring file, and left out: " in note for note in value["quality"]["notes"]
    )
