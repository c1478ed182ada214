"""Runs streams under random faults; counts lost streams and measures recoveries.

There must be no lost stream. `make chaos` runs it with `--streams 10000 --faults 1000`, which takes
about ten minutes. With --jobs each stream is a job, brokers die more often, and each job must be
done exactly once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from chaos.job_storm import JobStorm
from chaos.storm import Plan, Storm
from mlxpool.bench import report


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=1000)
    options.add_argument("--faults", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--at-once", type=int, default=48)
    options.add_argument("--replicas", type=int, default=3)
    options.add_argument("--step-us", type=int, default=2000, help="time of a decode step")
    options.add_argument("--pause", type=float, default=0.3, help="mean seconds between two faults")
    options.add_argument("--jobs", action="store_true", help="a storm of jobs")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    plan = Plan(
        streams=given.streams,
        faults=given.faults,
        seed=given.seed,
        at_once=given.at_once,
        replicas=given.replicas,
        step_us=given.step_us,
        pause=given.pause,
    )
    with tempfile.TemporaryDirectory() as folder:
        storm = (JobStorm if given.jobs else Storm)(plan, Path(folder))
        outcome = storm.run()
    print(report.machine())
    rows = [(key, json.dumps(value)) for key, value in outcome.figures.items()]
    print(report.table(("what", f"seed {plan.seed}"), rows))
    report.save(given.json, {"chaos": outcome.figures})
    sound = outcome.findings.sound and not outcome.hit_twice_and_not_done
    if isinstance(storm, JobStorm):
        print(json.dumps(storm.report()))
        sound = outcome.findings.sound and storm.done_once
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
