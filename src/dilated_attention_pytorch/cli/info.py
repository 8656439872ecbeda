"""The command ``dilated-attention info``."""

from __future__ import annotations

import platform
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.installation import EXTRAS, NAME, install_command

_NARROWEST = 24


@dataclass(kw_only=True, slots=True)
class Info:
    """Show versions, devices, and which attention implementations can run here and why the others cannot."""

    def run_command(self) -> None:
        """Print the tables. Needs only torch, so that it runs where other packages are missing."""
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

    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
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
