"""Run as a program: ranks are stopped in a pass, on one axis and on two; the seconds until all others say which.

python tests/parallel/stop_trials.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from failing import CASES, TIMEOUT_SECONDS, TRIALS

MOST_SECONDS = TIMEOUT_SECONDS + 5.0
AT_ONCE = 5
"""Trials that wait beside each other."""


def main() -> None:
    """Exit with 1 if a rank hung, named another one, or took too long."""
    missed, slowest, names = 0, 0.0, list(TRIALS)
    for start in range(0, len(names), AT_ONCE):
        cases = names[start : start + AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            program = Path(__file__).with_name("failing.py")
            subprocess.run(
                [sys.executable, program, folder, *cases], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            results = json.loads((Path(folder) / "results.json").read_text())
        for case, ranks in zip(cases, results, strict=True):
            culprit = CASES[case].culprit
            fault = next(report["fault"] for report in ranks[culprit]["reports"] if "fault" in report)
            said = [report for number, rank in enumerate(ranks) if number != culprit for report in rank["reports"]]
            named = [report for report in said if f": rank {culprit} does not answer" in report["message"]]
            seconds = max((report["at"] - fault for report in said), default=float("inf"))
            is_good = len(said) == len(named) == len(ranks) - 1 and seconds <= MOST_SECONDS
            missed, slowest = missed + (not is_good), max(slowest, seconds)
            print(f"{case}: named by {len(named)} of {len(ranks) - 1} after {seconds:.1f} s", flush=True)
    print(f"{len(names) - missed} of {len(names)} within {MOST_SECONDS:g} s; the slowest {slowest:.1f} s")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
