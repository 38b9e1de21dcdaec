"""Tables of events of a job with known times, for tests of iterations and their causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchlens_perf.roles.iterations import Event, Iteration, build_iterations

SAMPLES, ENGINES = 6, 3
Times = Callable[[int, int], float]
"""Returns a time for an iteration and a sample."""


def job_events(
    *,
    iterations: int = 5,
    tokens: Callable[[int, int], int] = lambda iteration, sample: 30,
    token_s: Callable[[str], float] = lambda engine: 0.01,
    engine_of: Callable[[int], int] = lambda sample: sample % ENGINES,
    queue_s: Times = lambda iteration, sample: 0.01,
    tool_s: Times = lambda iteration, sample: 0.02,
    reward_s: Times = lambda iteration, sample: 0.02,
    steps_s: float = 0.2,
    weights_s: float = 0.05,
) -> Iterator[Event]:
    """Yield the events of a job, each stage 0.01 s after the one before.

    engine_of: engine of a sample. queue_s: how long a sample waits for its engine.
    """
    at_s = 100.0
    for iteration in range(iterations):
        batch, done_s = str(iteration), [at_s]
        for sample in range(SAMPLES):
            name, engine = f"{iteration}-{sample}", f"engine-{engine_of(sample)}"
            count = tokens(iteration, sample)
            now_s = at_s
            yield Event(now_s, "lead", "sample_sent", name, batch)
            now_s += queue_s(iteration, sample)
            yield Event(now_s, engine, "generation_begin", name, "")
            now_s += count * token_s(engine)
            yield Event(now_s, engine, "generation_end", name, "", count)
            for stage, times in (("tool", tool_s), ("reward", reward_s)):
                now_s += 0.01
                yield Event(now_s, stage, f"{stage}_begin", name, "")
                now_s += times(iteration, sample)
                yield Event(now_s, stage, f"{stage}_end", name, "")
            done_s.append(now_s)
        at_s = max(done_s) + 0.01
        yield Event(at_s, "lead", "batch_complete", "", batch)
        for process in ("lead", "rank 1"):
            yield Event(at_s, process, "steps_begin", "", batch)
            yield Event(at_s + steps_s, process, "steps_end", "", batch)
        at_s += steps_s
        yield Event(at_s, "lead", "weights_publish_begin", "", batch)
        for engine in range(ENGINES):
            yield Event(at_s, f"engine-{engine}", "weights_take_begin", "", "")
            yield Event(at_s + weights_s / 2, f"engine-{engine}", "weights_take_end", "", "")
        at_s += weights_s
        yield Event(at_s, "lead", "weights_publish_end", "", batch)


def shuffled(events: Sequence[Event]) -> list[Event]:
    """Return the events in the order of their processes, as the processes' files have them."""
    return sorted(events, key=lambda each: (each.process, each.time_s))


def job_iterations(**times: object) -> list[Iteration]:
    return build_iterations(shuffled([*job_events(**times)]))  # type: ignore[arg-type]
