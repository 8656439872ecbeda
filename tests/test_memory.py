"""What is free is what the kernel, the control groups and the process's own limit leave; more is refused in words."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import memory
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import MOST_THREADS, set_threads
from dilated_attention_pytorch.memory import check_memory, free_memory
from support.processes import fork


def test_more_than_is_free_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 12_300_000_000)
    check_memory(12_300_000_000, "cpu", what="the run", remedy="wait")
    with pytest.raises(RunError, match=r"^the run needs at least 12\.4 GB of memory, and 12\.3 GB are free; wait$"):
        check_memory(12_400_000_000, "cpu", what="the run", remedy="wait")
    with pytest.raises(RunError, match=r"needs at least 6\.20 GB of memory in each of 2 processes, and 12\.3 GB"):
        check_memory(6_200_000_000, "cpu", what="the run", remedy="wait", sharing=2)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is free")
def test_the_limit_of_addresses_of_the_process_is_a_limit() -> None:
    def limited() -> None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = free_memory("cpu")
        resource.setrlimit(resource.RLIMIT_AS, (taken + (100 << 20),) * 2)
        print(before, free_memory("cpu"))

    before, after = map(int, fork(limited).ended().stdout.split())
    assert after <= 100 << 20 < before


_FREED = """
import sys
import torch
from dilated_attention_pytorch.memory import resident, return_freed_blocks
if sys.argv[1] == "returned":
    assert return_freed_blocks()
torch.ones(7 << 20)  # of a size up to which malloc keeps what is freed, by default
before = resident("VmRSS")
# Blocks that are freed, and small ones between them that are not.
both = [(torch.ones(2 << 20), torch.ones(50_000)) for _ in range(40)]
kept = [small for _, small in both]
del both
print(resident("VmRSS") - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_blocks_are_returned_to_the_system() -> None:
    default, returned = (
        int(subprocess.run([sys.executable, "-c", _FREED, way], capture_output=True, text=True, check=True).stdout)
        for way in ("default", "returned")
    )
    assert returned < 50e6 < 200e6 < default


def test_threads_are_set_up_to_what_the_runtime_starts() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1
        assert set_threads(0) == 1
        with pytest.raises(RunError, match=rf"must be at most 1,024, got {MOST_THREADS + 1}; this machine has"):
            set_threads(MOST_THREADS + 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
