"""The command ``dilated-attention info``."""

from __future__ import annotations

import itertools
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilated_attention_pytorch.installation import EXTRAS, NAME, install_command

if TYPE_CHECKING:
    import torch

_NARROWEST = 24


@dataclass(kw_only=True, slots=True)
class Info:
    """Show versions, devices, and which implementations can run here.

        dilated-attention info

    Check the Triton kernels on every GPU, for a report:

        dilated-attention info --check
    """

    check: bool = False
    """Check the Triton kernels on every GPU instead, and print a record for a report. They are compared with the
    definition, whatever earlier checks found. It takes some minutes; under TRITON_INTERPRET=1 it runs on the CPU."""

    def run_command(self) -> None:
        """Print the tables. Needs only torch, so that it runs where other packages are missing."""
        if self.check:
            _check()
            return
        import torch

        from dilated_attention_pytorch.machine import devices, package_version, processor
        from dilated_attention_pytorch.nn.linear import linear_choice
        from dilated_attention_pytorch.waiting import waiting_in_words

        _print_table(
            "machine",
            ("what", "here"),
            [
                (NAME, package_version(NAME) or "from source"),
                ("Python", platform.python_version()),
                ("PyTorch", torch.__version__),
                ("CUDA of this PyTorch", torch.version.cuda or "none: built for CPUs only"),
                ("processor", processor()),
                ("threads", str(torch.get_num_threads())),
                ("threads that wait", waiting_in_words()),
                ("large float32 products", linear_choice(torch.get_num_threads()).describe()),
                *_choices(),
                *(("CUDA device", device) for device in devices() or ["none"]),
            ],
        )
        _print_table("implementations of attention", ("impl", "device", "dtypes", "runs"), _implementations())
        if checks := _kept_checks():
            _print_table("checks of the Triton kernels", ("device", "dtype", "heads up to", "found"), checks)
        packages = sorted({(_name(word), extra) for extra, words in EXTRAS.items() for word in words})
        names = dict.fromkeys(name for name, _ in packages)
        _print_table(
            "optional packages",
            ("package", "version", "extra that brings it"),
            [
                (
                    name,
                    package_version(name) or "not installed",
                    ", ".join(extra for own, extra in packages if own == name),
                )
                for name in names
            ],
        )
        print(f"an extra is installed with: {install_command('train')}")


def _name(requirement: str) -> str:
    return requirement.partition(">=")[0]


def _choices() -> list[tuple[str, str]]:
    """What ``impl="auto"`` is on the CPU, by dtype; nothing before the native kernels are compiled."""
    import torch

    from dilated_attention_pytorch.kernels import compilation
    from dilated_attention_pytorch.kernels.cpu_choice import cpu_choice

    if not compilation.is_compiled() or compilation.refusal_to_load() is not None:
        return []
    return [
        (f"attention in {name}", cpu_choice(dtype).describe())
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16))
    ]


def _implementations() -> list[tuple[str, ...]]:
    import torch

    from dilated_attention_pytorch.kernels.select import IMPLS, refusal
    from dilated_attention_pytorch.machine import kinds_of_devices

    kinds = kinds_of_devices()
    names = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    rows: list[tuple[str, ...]] = []
    for impl in (name for name in IMPLS if name != "auto"):
        for kind in kinds:
            refusals: dict[str | None, list[str]] = {}
            for name, dtype in names.items():
                refusals.setdefault(refusal(impl, torch.device(kind), dtype, 64), []).append(name)
            for reason, dtypes in refusals.items():
                rows.append((impl, kind, ", ".join(dtypes), "yes" if reason is None else f"no: {reason}"))
        if "cuda" not in kinds:
            rows.append((impl, "cuda", "", "no: PyTorch finds no CUDA device here"))
    return rows


def _devices_of_triton() -> list[torch.device]:
    """A GPU of each kind that the Triton kernels run on; the CPU in Triton's interpreter."""
    import torch

    from dilated_attention_pytorch.kernels.device_check import machine_of
    from dilated_attention_pytorch.kernels.select import is_interpreted, refusal

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if is_interpreted():
        devices = [torch.device("cpu")]
    usable = [device for device in devices if refusal("triton", device, torch.float32, 64) is None]
    return list({str(machine_of(device)): device for device in reversed(usable)}.values())


def _kept_checks() -> list[tuple[str, ...]]:
    from dilated_attention_pytorch.kernels.device_check import kept_check, subjects

    rows: list[tuple[str, ...]] = []
    for subject in itertools.chain.from_iterable(map(subjects, _devices_of_triton())):
        kept = kept_check(subject)
        found = "not checked yet" if kept is None else kept.describe()
        rows.append((subject.machine["device"], subject.dtype_name, str(subject.width), found))
    return rows


def _check() -> None:
    from dilated_attention_pytorch.kernels.device_check import check_again, machine_of, subjects

    devices = _devices_of_triton()
    if not devices:
        print(
            "no GPU that the Triton kernels run on was found (`dilated-attention info` has the reasons); with "
            "TRITON_INTERPRET=1 the kernels are checked on the CPU"
        )
    for device in devices:
        rows: list[tuple[str, ...]] = []
        for subject in subjects(device):
            print(f"checking {subject.describe()}", file=sys.stderr, flush=True)
            check, checked = check_again(subject), (subject.dtype_name, str(subject.width))
            rows += [(*checked, call.name, call.found) for call in check.calls]
            rows.append((*checked, "verdict", check.describe()))
        _print_table("check of the Triton kernels", ("what", "here"), list(machine_of(device).items()))
        _print_table("calls of the check", ("dtype", "heads up to", "call", "largest errors"), rows)


def _print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print aligned columns; the last one is wrapped at the terminal's width."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    left = sum(widths) + 2 * len(widths)
    rest = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns - left)
    print(f"{title}\n{'-' * len(title)}")
    for row in (header, *rows):
        first, *more = textwrap.wrap(row[-1], rest) or [""]
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        print("  ".join([*cells, first]).rstrip())
        for line in more:
            print(" " * left + line)
    print()
