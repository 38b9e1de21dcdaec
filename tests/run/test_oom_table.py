"""Tests of the table of live blocks, from snapshots as torch 2.13 documents them.

The stacks in these snapshots were recorded by torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.device.fake_allocator import block, frames, segment, snapshot
from torchlens_perf.cuda.out_of_memory import find_forward_methods
from torchlens_perf.run.oom_table import AllocationSites, LiveMemoryTable, build_live_table

TORCH = str(Path(torch.__file__).parent)
KB = 1024


class Mlp(nn.Module):
    """A module that keeps the stack of its activation's allocation."""

    def forward(self, stacks: list[Any]) -> list[Any]:
        stacks.append(frames())
        return stacks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, stacks: list[Any]) -> list[Any]:
        return self.mlp(stacks)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, stacks: list[Any]) -> list[Any]:
        for each in self.blocks:
            each(stacks)
        return stacks


def table_of(held: dict[str, Any], **limits: int) -> LiveMemoryTable:
    return build_live_table(held, 0, AllocationSites(find_forward_methods(), (TORCH,)), **limits)


def test_blocks_are_grouped_by_module_and_stack() -> None:
    """The activations of three blocks are one row, with their classes.

    Memory of the script itself is another row.
    """
    stacks = Net()([])
    own = frames()
    blocks = [block(100 * KB, stack=stack) for stack in stacks] + [
        block(50 * KB, stack=own),
        block(9 * KB),
    ]
    table = table_of(snapshot([segment([*blocks, block(3 * KB, "inactive")])]))

    activations, script, unknown = table["rows"]
    assert activations["module"] == "Net > Block > Mlp"
    assert (activations["bytes"], activations["blocks"], activations["largest_bytes"]) == (
        300 * KB,
        3,
        100 * KB,
    )
    assert activations["stack"][0].startswith(f"{__file__}:")
    assert [line.split()[-1] for line in activations["stack"][:3]] == [
        "forward"
        # The stack contains no frame of torch between the modules.
    ] * 3
    assert (script["module"], script["bytes"]) == ("", 50 * KB)
    assert "test_blocks_are_grouped_by_module_and_stack" in script["stack"][0]
    assert (unknown["stack"], unknown["bytes"]) == ([], 9 * KB)
    assert (table["other_bytes"], table["other_blocks"]) == (0, 0)
    assert activations["new_blocks"] is None


def test_equal_stacks_of_different_snapshots_are_one_row() -> None:
    """Frames of different snapshots are different objects, so rows are compared by content."""
    blocks = [block(KB, stack=stack) for stack in (Net()([])[0] for _ in range(4))]
    assert [
        (row["module"], row["blocks"]) for row in table_of(snapshot([segment(blocks)]))["rows"]
    ] == [("Net > Block > Mlp", 4)]


def test_blocks_without_stacks_are_grouped_by_size() -> None:
    """Blocks have no stacks if torch's memory history was off."""
    blocks = [block(size * KB) for size in (4, 4, 4, 10, 1)]
    rows = table_of(snapshot([segment(blocks)]))["rows"]
    assert [(row["bytes"], row["blocks"], row["largest_bytes"]) for row in rows] == [
        (12 * KB, 3, 4 * KB), (10 * KB, 1, 10 * KB), (KB, 1, KB),
    ]  # fmt: skip
    assert {(row["module"], *row["stack"]) for row in rows} == {("",)}


def test_memory_of_allocator_segments_is_counted_for_one_device_only() -> None:
    """The table shows allocated memory, memory in use by another stream, and free pieces."""
    first = [
        block(4 * KB),
        block(KB, "inactive"),
        block(2 * KB, "active_pending_free"),
        block(3 * KB, "inactive"),
    ]
    table = table_of(
        snapshot(
            [
                segment(first),
                segment([block(8 * KB)], is_expandable=True),
                segment([block(99 * KB)], device=1),
            ]
        )
    )
    assert (table["allocated_bytes"], table["reserved_bytes"]) == (12 * KB, 18 * KB)
    assert (table["inactive_bytes"], table["largest_inactive_bytes"]) == (4 * KB, 3 * KB)
    assert (table["segments"], table["expandable"]) == (2, True)
    assert sum(row["bytes"] for row in table["rows"]) == 14 * KB


def test_table_of_an_empty_device_is_empty() -> None:
    table = table_of(snapshot([]))
    assert (table["rows"], table["reserved_bytes"], table["segments"], table["history_s"]) == (
        [],
        0,
        0,
        None,
    )


def test_omitted_blocks_and_rows_are_counted() -> None:
    """Blocks below a size limit and rows above a number limit are omitted."""
    blocks = [block(size * KB) for size in range(1, 101)]
    table = table_of(snapshot([segment(blocks)]), max_blocks=50, max_rows=10)

    assert [row["bytes"] for row in table["rows"]] == [size * KB for size in range(100, 90, -1)]
    assert table["other_blocks"] == 90
    assert table["other_bytes"] == sum(range(1, 91)) * KB
    assert table["allocated_bytes"] == sum(range(1, 101)) * KB


def test_blocks_allocated_within_the_history_are_marked_as_new() -> None:
    """An address that was freed and allocated again is new."""
    stack = frames()
    blocks = [block(KB, stack=stack) for _ in range(4)]
    held = snapshot([segment(blocks)])
    old, freed_and_taken, new, _ = (each["address"] for each in blocks)

    def entry(action: str, address: int, time_us: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": address,
            "size": KB,
            "stream": 0,
            "time_us": time_us,
            "frames": stack,
        }

    held["device_traces"] = [
        [
            entry("alloc", 7, 1_000_000), entry("free_requested", 7, 1_100_000), entry("free_completed", 7, 1_100_000),
            entry("free_completed", freed_and_taken, 1_200_000), entry("alloc", freed_and_taken, 1_300_000),
            entry("alloc", new, 3_500_000), entry("segment_alloc", old, 9_000_000),
        ]
    ]  # fmt: skip
    (row,) = (table := table_of(held))["rows"]

    assert (row["blocks"], row["new_blocks"]) == (4, 2)
    assert (table["history_events"], table["history_s"]) == (5, 2.5)


def test_stack_of_a_deep_model_shows_outermost_and_innermost_classes() -> None:
    """The number of frames is limited."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, stacks: list[Any]) -> list[Any]:
            return self.inner(stacks)

    (row,) = table_of(snapshot([segment([block(KB, stack=Outer(Outer(Outer(Block())))([])[0])])]))[
        "rows"
    ]
    assert row["module"] == "Outer > ... > Outer > Block > Mlp"
    assert len(row["stack"]) == 6


def test_class_that_inherits_forward_is_shown_as_its_defining_class() -> None:
    """Frames contain only the class that defines forward()."""

    class Child(Mlp):
        pass

    methods = find_forward_methods()
    mine = [name for _, name in methods[__file__]]
    assert {"Mlp", "Block", "Net"} <= set(mine)
    assert "Child" not in mine
    assert mine == [name for _, name in sorted(methods[__file__])]
    (row,) = table_of(snapshot([segment([block(KB, stack=Child()([])[0])])]))["rows"]
    assert row["module"] == "Mlp"
