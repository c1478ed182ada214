"""The effects of faults on streams: the streams that moved, wrong output, and waiting times."""

from __future__ import annotations

import signal

import pytest

from mlxpool.bench.deaths import BROKER, KILL, STOP, Kind, Outcome, Watched, kinds, lines

KINDS = kinds([KILL, STOP], 2)


def test_the_wait_of_a_stream_is_the_longest_since_the_fault() -> None:
    """Tokens that were under way at the fault do not count as the end of the wait."""
    stream = Watched(0, times=[1.0, 2.0, 2.5, 9.0, 9.5])
    assert stream.wait_after(2.4) == 6.5
    assert stream.wait_after(3.0) == 6.0
    assert stream.wait_after(9.6) is None


def test_faults_vary_signal_moment_and_rank() -> None:
    assert len(set(KINDS)) == 8
    assert kinds([BROKER], 2) == [Kind(signal.SIGKILL, "decode", -1)]
    assert str(KINDS[0]) == "SIGKILL of rank 1 of a worker in prefill"
    with pytest.raises(ValueError, match=r"--faults hang: unknown, .* of kill, stop, broker"):
        kinds([KILL, "hang"], 1)


def test_an_outcome_tells_moved_streams_from_wrong_ones() -> None:
    kind = KINDS[0]
    whole = Watched(0, times=[1.0, 1.1], text="1, 2.", attempts=1)
    moved = Watched(1, times=[1.0, 2.5, 2.6], text="1, 2.", attempts=2)
    lost = Watched(2, times=[1.0], text="1,", attempts=2)
    refused = Watched(3, error="Busy: no place")
    outcome = Outcome.of(kind, [whole, moved, lost, refused], ["1, 2."] * 4, 1.5)
    assert (outcome.streams, outcome.waits) == (4, (1.0,))
    assert outcome.wrong == (f"{kind}: '1,'", f"{kind}: Busy: no place")
    assert str(outcome) == f"{kind}: 2 of 4 streams are right, 1 were moved, longest wait 1.000 s"


def test_the_death_of_the_broker_moves_all_streams() -> None:
    streams = [Watched(n, times=[1.0, 2.0 + n], text="1", attempts=1) for n in range(2)]
    outcome = Outcome.of(Kind(signal.SIGKILL, "decode", -1), streams, ["1", "1"], 1.5)
    assert outcome.waits == (0.5, 1.5) and not outcome.wrong


def test_a_line_has_the_waits_of_all_faults_of_a_kind() -> None:
    met = Outcome(KINDS[0], 8, (), (0.25, 0.5))
    missed = Outcome(KINDS[1], 8, (), ())
    (line,) = lines([met, missed, met])
    assert line.name == str(KINDS[0])
    assert line.sides == {"p50": (375.0,), "p99": (500.0,), "max": (500.0,)}
    assert line.note == f"{KINDS[0]}: 2 times, 16 of 16 streams were right, 4 were moved."
