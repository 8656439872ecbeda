"""Natural breaks, and edges of segments snapped to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.patterns import SegmentedPattern
from dilated_attention_pytorch.selection import find_breaks, snap_boundaries
from support.drawn import examples


@examples(300)
@given(st.integers(1, 60), st.integers(1, 700), st.lists(st.integers(-5, 720), max_size=60), st.floats(0.0, 1.0))
def test_edges_ascend_stay_near_and_lie_at_breaks_or_where_they_were(
    segment_length: int, sequence_length: int, breaks: list[int], tolerance: float
) -> None:
    edges = snap_boundaries(segment_length, sequence_length, breaks, tolerance=tolerance)
    regular = list(range(0, sequence_length, segment_length))
    assert (edges[0], edges[-1]) == (0, sequence_length)
    assert len(edges) == len(regular) + 1
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert max(b - a for a, b in itertools.pairwise(edges)) <= (1 + tolerance) * segment_length
    reach = min(tolerance * segment_length / 2, (segment_length - 1) / 2)
    for edge, before in zip(edges[1:-1], regular[1:], strict=True):
        near = [one for one in breaks if 0 < one < sequence_length and abs(one - before) <= reach]
        assert edge == min(near, key=lambda one: (abs(one - before), one), default=before)


def test_nothing_moves_without_breaks_or_tolerance() -> None:
    assert snap_boundaries(4, 10, [], tolerance=1.0) == (0, 4, 8, 10)
    assert snap_boundaries(4, 10, [3, 9], tolerance=0.0) == (0, 4, 8, 10)
    assert snap_boundaries(20, 10, [3, 9], tolerance=1.0) == (0, 10)


def test_breaks_are_found_after_newlines_blank_lines_and_separators() -> None:
    text = b"a\n\n\nbc\nd\n"
    assert find_breaks(text, "newline") == (2, 3, 4, 7)
    assert find_breaks(text, "paragraph") == (4,)
    assert find_breaks(b"ab\n\n", "paragraph") == ()
    assert find_breaks(torch.tensor([5, 0, 7, 0, 0, 9]), "document", token=0) == (2, 4, 5)
    assert find_breaks([5, 1, 7, 2, 9], "newline", token=(1, 2)) == (2, 4)
    assert find_breaks([], "newline") == ()


def test_breaks_of_a_function_are_those_within_the_sequence() -> None:
    assert find_breaks([1, 2, 3, 4], lambda ids: (i for i, one in enumerate(ids) if one % 2)) == (2,)
    assert find_breaks([1, 2, 3], lambda ids: [3, 1, 0, 1]) == (1,)


def test_breaks_may_be_a_tensor_or_an_array_of_integers() -> None:
    edges = (0, 9, 20)
    assert snap_boundaries(10, 20, [9], tolerance=0.5) == edges
    assert snap_boundaries(10, 20, torch.tensor([9]), tolerance=0.5) == edges
    assert snap_boundaries(10, 20, torch.tensor([9]).numpy(), tolerance=0.5) == edges
    assert snap_boundaries(10, 20, list(torch.tensor([9]).numpy()), tolerance=0.5) == edges
    assert find_breaks(b"a\nb\n\nc", lambda ids: torch.tensor([2])) == (2,)
    assert all(type(edge) is int for edge in snap_boundaries(10, 20, torch.tensor([9]), tolerance=0.5))


def test_the_last_edge_begins_an_empty_segment() -> None:
    pattern = SegmentedPattern([snap_boundaries(4, 10, [3], tolerance=1.0)], [1])
    assert pattern.density(10) == SegmentedPattern([[0, 3, 8]], [1]).density(10)


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: find_breaks([1], "line"), ValueError, "'newline', 'paragraph', 'document', or a function"),  # type: ignore[arg-type]
    (lambda: find_breaks([1], "document"), ValueError, "needs token, the id that separates documents, got None"),
    (lambda: find_breaks([1], lambda ids: [2]), ValueError, "positions from 0 to 1, got 2 to 2"),
    (lambda: find_breaks([1], lambda ids: [0.5]), TypeError, "integer positions, got 0.5"),  # type: ignore[list-item]
    (lambda: find_breaks([1], lambda ids: [], token=3), ValueError, "leave it out, got 3"),
    (lambda: find_breaks([1], lambda ids: [True]), TypeError, "integer positions, got True of type bool"),
    (lambda: find_breaks(b"a\nb", "newline", token="\n"), TypeError, r"token must be .*, got '\\n' of type str"),  # type: ignore[arg-type]
    (lambda: find_breaks([1], "newline", token=True), TypeError, "token must be an integer .*, got True of type bool"),
    (lambda: find_breaks([1], "newline", token=1.0), TypeError, "token must be an integer .*, got 1.0 of type float"),  # type: ignore[arg-type]
    (lambda: find_breaks([1], "newline", token=(1, "2")), TypeError, "token must be .*, got '2' of type str"),  # type: ignore[arg-type]
    (lambda: find_breaks([1], "newline", token=torch.tensor(10)), TypeError, r"got tensor\(10\) of type Tensor"),
    (lambda: find_breaks([1, "b"], "newline"), TypeError, "tokens must be integer ids, got 'b' of type str"),  # type: ignore[list-item]
    (lambda: find_breaks([1, True], "newline"), TypeError, "tokens must be integer ids, got True of type bool"),
    (lambda: find_breaks(torch.ones(2).bool(), "newline"), TypeError, r"integers \[N\], got torch.bool"),
    (lambda: snap_boundaries(10, 50, [3.5, 10.2], tolerance=1), TypeError, "breaks must be integer positions, got 3.5"),  # type: ignore[list-item]
    (lambda: snap_boundaries(10, 50, [3, True], tolerance=1), TypeError, "breaks must be .*, got True of type bool"),
    (lambda: snap_boundaries(10, 50, torch.ones(2), tolerance=1), TypeError, "breaks must be .*, got 1.0 of type"),
    (lambda: snap_boundaries(10, 50, 3, tolerance=1), TypeError, "breaks must be .*, got 3 of type int"),  # type: ignore[arg-type]
    (lambda: find_breaks("text", "newline"), TypeError, "integer ids or a tensor .*, got str"),  # type: ignore[arg-type]
    (lambda: find_breaks(torch.ones(2, 2).int(), "newline"), TypeError, r"integers \[N\], got torch.int32 of shape"),
    (lambda: snap_boundaries(0, 9, [], tolerance=0.1), ValueError, "segment_length must be at least 1, got 0"),
    (lambda: snap_boundaries(3, 9.0, [], tolerance=0.1), TypeError, "sequence_length must be an integer"),  # type: ignore[arg-type]
    (lambda: snap_boundaries(3, 9, [], tolerance=1.5), ValueError, "from 0 to 1, got 1.5"),
]


@pytest.mark.parametrize("wrong", range(len(WRONG)), ids=lambda index: WRONG[index][2][:40])
def test_a_wrong_argument_is_named_with_what_came(wrong: int) -> None:
    call, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        call()
