"""The warning about rows that the LongNet authors' code misplaces."""

from __future__ import annotations

import warnings

from dilated_attention_pytorch.patterns import DilatedPattern


def warn_of_displaced_rows(pattern: DilatedPattern, longest: int, known: set[tuple[int, int]], stacklevel: int) -> None:
    """Warn, once per pair (w, r) not in ``known``, about lengths for which the authors' code gives other results.

    Their code pads every segment to a multiple of r and never removes the padding, so that rows of the second and
    later segments are shifted.

    Args:
        pattern: only patterns with ``tail="zero_padded"``, which is for weights of that code, can warn.
        longest: number of rows of the longest sequence.
        known: pairs that were warned about; updated.
        stacklevel: of the warning, relative to the caller of this function.
    """
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        if pattern.tail != "zero_padded" or longest <= length or length % rate == 0 or (length, rate) in known:
            continue
        known.add((length, rate))
        warnings.warn(
            f"the authors' code shifts the rows of segment j of {length} rows by {-length % rate} j rows where the "
            f"dilated ratio {rate} does not divide the segment length; here they stay at their positions, so results "
            f"for a sequence of {longest} rows differ from that code's",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
