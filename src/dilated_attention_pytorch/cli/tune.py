"""The command ``dilated-attention tune``."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dilated_attention_pytorch.machine import choose_device, require, set_threads
from dilated_attention_pytorch.training.run_settings import DeviceChoice

if TYPE_CHECKING:
    from rich.table import Table

    from dilated_attention_pytorch.selection.profile import Profile, Rates
    from dilated_attention_pytorch.selection.tuning import Timing

DtypeName = Literal["float16", "bfloat16", "float32", "float64"]
_KEEP_SECONDS = 2.0


@dataclass(kw_only=True, slots=True)
class Tune:
    """Measure this machine for the selection of segments.

    Attention is timed for a dozen shapes with several patterns each, forward and with gradients. Rates are fitted to
    the times and stored in the user's cache folder; from then on DynamicSegmentSelector, DynamicDilatedAttention and
    DynamicMultiheadDilatedAttention predict times from them, on this machine and with this version of PyTorch. The
    table shows how well predictions rank patterns of shapes held out of the fit, next to the formula that needs no
    measurement: 1 means the measured order. Rates that predict those worse than the formula are not used.

    Running the command again adds rounds to the stored times, also after it was stopped. Keep the machine otherwise
    idle.

    Float32 only, in half a minute:

        dilated-attention tune --dtypes float32 --seconds 30

    For programs of one thread:

        dilated-attention tune --threads 1
    """

    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """Number formats to measure. Rates of others in the stored profile are kept."""
    seconds: float = 180.0
    """Seconds of measuring, beside the start and the fit. What too few times were taken of is left to the formula."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch. A profile is valid for one number of threads."""
    output: Path = Path("runs/tune")
    """Folder for tune.json and report.txt. An existing tune.json of this machine is continued."""
    dry_run: bool = False
    """Run a few short sequences as a smoke test, and store no profile."""

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise ValueError("dtypes must name at least one dtype, got none")
        if not math.isfinite(self.seconds) or self.seconds < 0:
            raise ValueError(f"seconds must be at least 0, got {self.seconds}")
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")

    def run_command(self) -> None:
        """Run the measurements.

        Raises:
            RunError: an unavailable device, or files that cannot be read or written.
        """
        require("tuning", ("rich",), "bench")
        import torch

        from dilated_attention_pytorch.output import check_makeable, check_new_file, make_output
        from dilated_attention_pytorch.progress import progress_bar
        from dilated_attention_pytorch.selection import read_hardware, tuning
        from dilated_attention_pytorch.selection.profile import load_profile, store_profile
        from dilated_attention_pytorch.terminal import plain_console

        console = plain_console(width=120)
        device = torch.device(choose_device(self.device))
        set_threads(self.threads)
        hardware = read_hardware(device)
        names = list(dict.fromkeys(self.dtypes))
        record = self.output / ("dry-run.json" if self.dry_run else "tune.json")
        cases = tuning.cases([getattr(torch, name) for name in names], hardware, is_dry=self.dry_run)
        check_makeable(self.output)
        report = self.output / "report.txt"
        if report.exists() and not record.exists() and not self.dry_run:
            check_new_file(report, "--output")  # without tune.json it is not a report of this command
        timings = tuning.kept_timings(record, cases, hardware)
        make_output(self.output)
        kept = sum(len(timing.samples) for timing in timings)
        console.print(
            f"{hardware.name}, {hardware.processors} {'threads' if hardware.kind == 'cpu' else 'multiprocessors'}: "
            f"{len(timings)} cases" + (f", going on after {kept} times in {record}" if kept else ""),
            highlight=False,
            soft_wrap=True,
        )
        command, last = shlex.join(["dilated-attention", *sys.argv[1:]]), time.monotonic()
        with progress_bar(console, "cases") as show:

            def finished(timing: Timing) -> None:
                nonlocal last
                done = sum(len(one.samples) >= len(timing.samples) for one in timings)
                show(f"round {len(timing.samples)}, {_short(timing)}", done, len(timings))
                if time.monotonic() - last > _KEEP_SECONDS:
                    tuning.keep_timings(record, timings, hardware, command=command)
                    last = time.monotonic()

            tuning.measure(
                timings,
                device,
                seconds=math.inf if self.dry_run else self.seconds,
                finished=finished,
                is_once=self.dry_run,
            )
            show("fitting", len(timings), len(timings))
            fits = tuning.fit_rates(timings, hardware)
        tuning.keep_timings(record, timings, hardware, command=command, fits=[asdict(one) for one in fits])
        before = None if self.dry_run else load_profile(hardware)
        profile = tuning.profile_of(fits, before)
        found = [*([_table(fits, timings)] if fits else []), *_unused(fits, timings, profile)]
        console.print(*found, sep="\n", highlight=False, soft_wrap=True)
        written = [record]
        if not self.dry_run:
            with report.open("w", encoding="utf-8") as stream:
                plain_console(120, stream).print(*found, sep="\n", highlight=False, soft_wrap=True)
            written.append(report)
            if profile.rates or before is not None:
                written.append(store_profile(profile, hardware))
        console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
        if self.dry_run:
            console.print("this was a dry run: the figures are meaningless, and no profile was stored")


def _short(timing: Timing) -> str:
    workload = timing.workload
    mode = "with gradients" if workload.is_training else "forward"
    return f"{workload.dtype_name} {mode}, {workload.sequence_length:,} positions"


def _unused(fits: Sequence[Rates], timings: Sequence[Timing], profile: Profile) -> list[str]:
    """A sentence for every dtype and mode whose rates of this run are not in use."""
    fitted, stored = {one.mode: one for one in fits}, {entry.mode: entry for entry in profile.rates}
    sentences = []
    for mode in dict.fromkeys((one.workload.dtype_name, one.workload.is_training) for one in timings):
        one, kept = fitted.get(mode), stored.get(mode)
        if one is not None and kept is one and one.is_better:
            continue
        if one is None:
            reason = "too few times to fit and judge rates"
        elif one.is_better:
            reason = f"fitted to {one.samples:,} times"
        else:
            reason = (
                f"the fitted rates predict held-out shapes no better (rank correlation {one.fitted.correlation:.3f}, "
                f"error {one.fitted.error:.1%}) than the formula ({one.formula.correlation:.3f}, "
                f"{one.formula.error:.1%})"
            )
        in_use = "the formula stays"
        if kept is not None and kept.is_better:
            in_use = f"the stored rates ({kept.samples:,} times) stay"
        sentences.append(
            f"{mode[0]}, {'forward + backward' if mode[1] else 'forward'}: {reason}, so {in_use} in use; run the "
            "command again, or give more --seconds, to add times"
        )
    return sentences


def _table(fits: Sequence[Rates], timings: Sequence[Timing]) -> Table:
    from rich.table import Table

    rounds = [len(timing.samples) for timing in timings]
    table = Table(
        "dtype",
        "mode",
        "rank correlation\nfitted",
        "\nformula",
        "median error\nfitted",
        "\nformula",
        title=f"predictions for held-out shapes, {min(rounds)} to {max(rounds)} times of every case",
        title_justify="left",
    )
    for one in fits:
        table.add_row(
            one.dtype,
            "forward + backward" if one.is_training else "forward",
            f"{one.fitted.correlation:.3f}",
            f"{one.formula.correlation:.3f}",
            f"{one.fitted.error:.1%}",
            f"{one.formula.error:.1%}",
        )
    return table
