"""``dilated-attention info``."""

from __future__ import annotations

import platform
from dataclasses import dataclass

EXTRAS = {
    "bench": ("matplotlib", "rich", "tyro"),
    "docs": ("mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"),
    "plot": ("matplotlib",),
    "train": ("accelerate", "matplotlib", "numpy", "rich", "safetensors", "tensorboard", "transformers", "tyro"),
    "dev": ("hypothesis", "mypy", "pytest", "pytest-xdist", "ruff"),
}
"""What each extra of the package brings."""


@dataclass(kw_only=True, slots=True)
class Info:
    """Show versions, devices, and which implementations of attention can run here and why the others cannot."""

    def run_command(self) -> None:
        """Print the tables."""
        import torch
        from rich.console import Console
        from rich.table import Table

        from dilated_attention_pytorch.kernels.select import IMPLS, refusal
        from dilated_attention_pytorch.machine import devices, package_version, processor

        console = Console()
        here = Table("what", "here", title="machine", title_justify="left")
        here.add_row("dilated-attention-pytorch", package_version("dilated-attention-pytorch") or "from source")
        here.add_row("Python", platform.python_version())
        here.add_row("PyTorch", torch.__version__)
        here.add_row("CUDA of this PyTorch", torch.version.cuda or "none: built for CPUs only")
        here.add_row("processor", processor())
        here.add_row("threads", str(torch.get_num_threads()))
        here.add_row("CUDA devices", "\n".join(devices()) or "none")
        console.print(here)

        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        names = {
            "float16": torch.float16,
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "float64": torch.float64,
        }
        table = Table("impl", "device", "dtypes", "runs", title="implementations of attention", title_justify="left")
        for impl in (name for name in IMPLS if name != "auto"):
            for kind in kinds:
                refusals: dict[str | None, list[str]] = {}
                for name, dtype in names.items():
                    refusals.setdefault(refusal(impl, torch.device(kind), dtype, 64), []).append(name)
                for reason, dtypes in refusals.items():
                    table.add_row(impl, kind, ", ".join(dtypes), "yes" if reason is None else f"no: {reason}")
            if "cuda" not in kinds:
                table.add_row(impl, "cuda", "", "no: PyTorch finds no CUDA device here")
        console.print(table)

        packages = Table("package", "version", "extra that brings it", title="optional packages", title_justify="left")
        for name in sorted({name for brought in EXTRAS.values() for name in brought}):
            extras = [extra for extra, brought in EXTRAS.items() if name in brought]
            packages.add_row(name, package_version(name) or "not installed", ", ".join(extras))
        console.print(packages)
        console.print("an extra is installed with: pip install 'dilated-attention-pytorch\\[train]'", highlight=False)
