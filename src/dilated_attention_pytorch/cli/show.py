"""The command ``dilated-attention show``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.errors import RunError

_TERMINAL_CELLS = 48
_MOST_HEADS, _MOST_PANELS = 4096, 64
_SHADES = " .:-=+*#%@"


@dataclass(kw_only=True, slots=True)
class Show:
    """Show a pattern: a sketch, and its cost beside dense attention.

    Write the pattern in Python syntax, in quotes. Functions: DilatedPattern([w, ...], [r, ...]),
    SegmentedPattern([[0, b, ...], ...], [r, ...]), local_window(before, after), global_tokens(n),
    strided_blocks(stride), random_blocks(density), hierarchical(near, levels=, factor=), per_head([call, ...]).
    Arguments are literal numbers, lists and strings; the list of per_head has a call, or a sum of calls, per head.
    Sums add counts: a pair shown by two terms counts twice.

        dilated-attention show "DilatedPattern([256, 1024], [1, 4])" --causal
        dilated-attention show "local_window(255) + global_tokens(4) + strided_blocks(8, block_size=64)"
    """

    pattern: tyro.conf.Positional[str]
    """Pattern expression: a sum of calls."""
    sequence_length: int = 4096
    """Sequence length N."""
    heads: int = 1
    """Number of key/value heads."""
    causal: bool = False
    """Apply the causal mask."""
    output_file: Path | None = None
    """Image to write, for example pattern.png; the suffix selects the format. Default: none."""

    def run_command(self) -> None:
        """Print density and a sketch, and write the image.

        Raises:
            RunError: the pattern is invalid, a number is out of range, or the image cannot be written.
        """
        from rich.table import Table

        from dilated_attention_pytorch.patterns import pattern_from_expression
        from dilated_attention_pytorch.terminal import plain_console

        self._check_output()
        if self.heads > _MOST_HEADS:
            raise RunError(f"--heads must be at most {_MOST_HEADS:,}, got {self.heads}; a few show how heads differ")
        try:
            pattern = pattern_from_expression(self.pattern)
            densities = [
                pattern.density(self.sequence_length, num_kv_heads=self.heads, is_causal=x) for x in (False, True)
            ]
        except ValueError as error:
            raise RunError(str(error)) from error
        console = plain_console()
        table = Table("", "all keys", "causal", title=self.pattern, title_justify="left")
        pairs = [self.sequence_length**2, self.sequence_length * (self.sequence_length + 1) // 2]
        table.add_row("density, of dense attention's pairs", *(f"{density:.4%}" for density in densities))
        keys = [f"{d * n / self.sequence_length:,.1f}" for d, n in zip(densities, pairs, strict=True)]
        table.add_row(f"keys a query sees, mean of {self.sequence_length:,}", *keys)
        console.print(table)
        console.print(self._sketch(console.width // 2))
        if self.output_file is None:
            return
        import matplotlib.figure

        from dilated_attention_pytorch.patterns.picture import figure_size

        figure = matplotlib.figure.Figure(figsize=figure_size(self.heads), layout="constrained")
        pattern.plot(self.sequence_length, num_kv_heads=self.heads, is_causal=self.causal, axes=figure.subplots())
        figure.savefig(self.output_file, dpi=150, bbox_inches="tight")
        console.print(f"written: {self.output_file}", soft_wrap=True)

    def _check_output(self) -> None:
        """Raise :class:`RunError` if an image is requested that cannot be drawn or written."""
        from dilated_attention_pytorch.machine import require
        from dilated_attention_pytorch.output import check_new_file

        if self.output_file is None:
            return
        require("drawing a pattern", ["matplotlib"], "plot")
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if self.output_file.suffix[1:].lower() not in kinds:
            raise RunError(f"--output-file {self.output_file}: pictures end in .{', .'.join(sorted(kinds))}")
        if self.heads > _MOST_PANELS:
            raise RunError(
                f"--output-file draws a panel for every head: --heads must be at most {_MOST_PANELS}, got {self.heads}"
            )
        check_new_file(self.output_file)

    def _sketch(self, most_cells: int) -> str:
        """Head 0 in characters, queries downwards; darker cells have a larger mean count."""
        import torch

        from dilated_attention_pytorch.patterns import pattern_from_expression
        from dilated_attention_pytorch.patterns.picture import pooled_pairs

        pattern = pattern_from_expression(self.pattern).for_heads([0], self.heads)
        cells = min(_TERMINAL_CELLS, most_cells, self.sequence_length)
        pairs, bounds = pooled_pairs(pattern, self.sequence_length, cells, is_causal=self.causal)
        means = pairs[0] / (bounds.diff()[:, None] * bounds.diff())
        shares = means / means.max().clamp(min=1)
        shades = torch.where(shares > 0, (shares * (len(_SHADES) - 1)).ceil().long(), 0)
        return "\n".join("".join(2 * _SHADES[shade] for shade in row) for row in shades.tolist())
