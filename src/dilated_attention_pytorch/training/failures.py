"""Known failures: their log patterns, causes and remedies."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a run."""

    name: str
    pattern: str
    """Regular expression that matches a line of the log."""
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Found:
    """A failure found in a log."""

    failure: Failure
    line: str
    """The first matching line."""


FAILURES = (
    Failure(
        name="out of memory",
        pattern=(
            r"CUDA out of memory|can't allocate memory|the memory is used up|memory ran out in step"
            r"|MemoryError|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        ),
        cause="A step, or the optimizer's first one, needs more memory than the device has left.",
        remedy=(
            "In order of effect on memory: --model.gradient-checkpointing (activations of a block instead of "
            "all), a smaller --batch-size with more --gradient-accumulation (the same step), --optimizer "
            "adamw-8bit (2 bytes of state a weight instead of 8), --data-parallel fsdp over several processes, a "
            "smaller --context-length. `dilated-attention diagnose RUN --step` measures what recomputation and "
            "smaller moments save."
        ),
    ),
    Failure(
        name="killed by the system",
        pattern=(
            r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|oom[-_ ]kill|Out of memory: Killed process"
            r"|died with <Signals\.SIGKILL"
        ),
        cause=(
            "Something killed a process with SIGKILL: nearly always the kernel, as the memory of the host, or of "
            "its control group, was used up (`dmesg | grep -i kill` tells), or the scheduler at the end of the "
            "time that it gave."
        ),
        remedy=(
            "Give the job more memory of the host, or start fewer processes a host; --no-async-checkpoints keeps "
            "no copy of weights and optimizer on a CPU, --workers 0 loads without processes of their own. Then go"
            " on with --resume RUN."
        ),
    ),
    Failure(
        name="a rank was lost",
        pattern=(
            r"Connection (?:closed|reset) by peer|does not answer: the process (?:was killed|has ended)"
            r"|remote process exited or there was a network error|ncclRemoteError|Broken pipe"
        ),
        cause="A process of the run ended, or its host did; the others noticed when they next exchanged something.",
        remedy=(
            "The cause is in the log of the rank that ended first, not of those that tell of a lost connection: "
            "diagnose that log. Then go on with --resume RUN, on fewer processes too; `torchrun --max-restarts 3`"
            " does it by itself."
        ),
    ),
    Failure(
        name="a collective timed out",
        pattern=(
            r"Timed out waiting \d+ms for|collective operation timeout|is alive, but takes no part"
            r"|waits in the same call: the network lost|Watchdog caught|wait timeout after \d+ms"
            r"|ProcessGroup\w+ .*timed? ?out"
        ),
        cause=(
            "A rank waited longer than --timeout for another: that one computes or writes for longer, stands "
            "still, took another path through the program, or cannot be reached over the network."
        ),
        remedy=(
            "If the log names a rank, look at its log and its machine; `slow rank` in faults.jsonl names one that"
            " was slow before. If a step or a checkpoint just takes long, a larger --timeout. If ranks cannot "
            "reach each other, name the network: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ),
    ),
    Failure(
        name="the disk is full",
        pattern=r"No space left on device|[Dd]isk quota exceeded|the disk is full|the disk quota is used up",
        cause="What the run writes no longer fits on the disk of its folder.",
        remedy=(
            "Make room: --keep-checkpoints 1 keeps fewer checkpoints, an optimizer with smaller moments "
            "(adamw-8bit) makes them smaller, --output on another disk. The last whole checkpoint is kept: go on "
            "with --resume RUN."
        ),
    ),
    Failure(
        name="torchvision does not fit torch",
        pattern=(
            r"operator torchvision::nms does not exist|Couldn't load custom C\+\+ ops"
            r"|torchvision.*undefined symbol"
        ),
        cause=(
            "The installed torchvision was built for another torch. This package needs no torchvision, but "
            "transformers imports it where it is installed."
        ),
        remedy=(
            "Remove it (`pip uninstall torchvision`), or install the release that was built for this torch (`pip "
            "install --upgrade torch torchvision` together)."
        ),
    ),
    Failure(
        name="a checkpoint does not verify",
        pattern=(
            r"broken checkpoint|foreign checkpoint|broken model|Error while deserializing header"
            r"|PytorchStreamReader failed|cannot be gone on with"
        ),
        cause=(
            "A file of a checkpoint is not what was written there (its size or SHA-256 differs), or is of another run."
        ),
        remedy=(
            "A run goes on from the newest checkpoint that verifies. If none does, restore the folder from a "
            "copy, or begin anew into another --output; --keep-checkpoints 3 keeps more of them. A disk that "
            "changes bytes does so again: check it."
        ),
    ),
    Failure(
        name="NaN or infinity",
        pattern=r"NaN or infinity is in|loss is (?:nan|inf)|the model computes NaN",
        cause=(
            "A loss, a gradient or a weight is not finite: the run diverges, or a fault of the machine changed a value."
        ),
        remedy=(
            "Go on once with --resume RUN: what a fault of the machine did is gone. If the same step fails again:"
            " --resume RUN --on-nan skip leaves its batch out; if the next step fails too, begin anew with a "
            "lower --learning-rate, more --warmup-fraction, or --precision float32."
        ),
    ),
    Failure(
        name="the driver is too old",
        pattern=r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old",
        cause="This PyTorch was built for a CUDA that the installed driver does not know.",
        remedy="Install a newer driver, or the PyTorch built for the CUDA that `nvidia-smi` shows.",
    ),
    Failure(
        name="a package is missing",
        pattern=r"not installed here: |ModuleNotFoundError: No module named",
        cause="An option needs a package that is not installed.",
        remedy="Run the install command that the message ends with; `dilated-attention info` lists what is there.",
    ),
)
"""Failures that cause others come first."""


def known_failures(text: str) -> list[Found]:
    """The failures found in a log, each once; causes before their consequences.

    >>> [found.failure.name for found in known_failures("OSError: [Errno 28] No space left on device: 'a'")]
    ['the disk is full']
    """
    found = []
    for failure in FAILURES:
        match = re.search(failure.pattern, text)
        if match is not None:
            start = text.rfind("\n", 0, match.start()) + 1
            found.append(Found(failure, text[start:].partition("\n")[0].strip()))
    return found
