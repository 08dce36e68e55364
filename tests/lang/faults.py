"""The rows of the table in docs/errors.md, all of them in its order.

python -m tests.lang.faults    # how long each takes to raise, the slowest first
"""

from __future__ import annotations

from tests.lang import faults_of_lines, faults_of_runs
from tests.lang.fault import Fault, outcome_of

FAULTS: tuple[Fault, ...] = (*faults_of_lines.ROWS, *faults_of_runs.ROWS)


if __name__ == "__main__":
    for seconds, what in sorted(((outcome_of(row.act).seconds, row.what) for row in FAULTS), reverse=True):
        print(f"{seconds * 1000:7.1f} ms  {what}")
