"""What a result file says of where it comes from, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, threads, versions and the command."""
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        names = [value.strip() for key, _, value in fields if key.strip() == "model name"]
        families = [value.strip() for key, _, value in fields if key.strip() == "cpu family"]
        processor = f"{names[0]} (family {families[0]})" if names and families else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(file)
    print(f"written: {file}")
