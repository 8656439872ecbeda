"""What makes far text pay: texts repeat where they say, pairs are those of the patterns, the page has the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.far_text import CONTESTANTS, HEADS, LENGTHS, LONGNET, config_of, met_pairs
from benchmarks.head_lags import lagged_attend
from benchmarks.options import RESULTS
from benchmarks.repeating_text import ALIGNED, ANY, LONG, OCTAVES, PASSAGE, RATE, Kind, draw_texts, in_pieces

from dilated_attention_pytorch import DilatedPattern, local_window

PAGE = (Path(__file__).parents[2] / "docs" / "length.md").read_text()
RECORDS = {record["contestant"]: record for record in json.loads((RESULTS / "far_text.json").read_text())["results"]}


@pytest.mark.parametrize("kind", [ANY, ALIGNED])
def test_a_token_that_comes_again_and_the_one_before_it_are_those_of_so_many_tokens_earlier(kind: Kind) -> None:
    tokens, distances = draw_texts(3, 7, kind)
    texts, columns = distances.nonzero(as_tuple=True)
    earlier = columns - distances[texts, columns]
    assert len(columns) > LONG // 2
    assert torch.equal(tokens[texts, columns], tokens[texts, earlier])
    assert torch.equal(tokens[texts, columns - 1], tokens[texts, earlier - 1])
    found = distances[texts, columns]
    assert int(found.min()) >= PASSAGE
    assert set((found % RATE).tolist()) == (set(range(RATE)) if kind.remainder is None else {kind.remainder})


def test_what_can_be_copied_from_within_a_piece_comes_with_the_token_before_it_from_there() -> None:
    texts = draw_texts(2, 11, ANY)
    for length in LENGTHS:
        pieces, inside = in_pieces(texts, length)
        for piece, column in inside.nonzero().tolist():
            earlier = column - int(pieces.distances[piece, column])
            assert earlier >= 1
            assert pieces.tokens[piece, earlier - 1 : earlier + 1].equal(pieces.tokens[piece, column - 1 : column + 1])
    assert torch.equal(inside, texts.distances > 0)


def test_beyond_its_first_segments_longnet_meets_the_row_to_copy_at_one_remainder_of_the_largest_rate() -> None:
    met = met_pairs(CONTESTANTS["LongNet"])
    query = torch.arange(768, 1023)[:, None]
    for remainder in range(RATE):
        distance = torch.arange(300 // RATE * RATE + remainder, 700, RATE)
        found = met[query, query + 1 - distance]
        assert bool(found.all() if remainder == 1 else (~found).all())


def test_with_lags_by_head_every_row_is_met() -> None:
    every = torch.ones(LONG, LONG).tril(-1).bool()
    lagged = CONTESTANTS["rate 2 with lags, then window"]
    assert bool(met_pairs(lagged)[every].all())
    assert not bool(met_pairs(lagged._replace(lags=(0,) * HEADS))[every].all())


def test_lagged_attention_is_a_dense_softmax_over_keys_that_lie_some_rows_later() -> None:
    torch.manual_seed(3)
    rows, width, lags = 41, 6, (0, 1, 2, 0)
    query, key, value = torch.randn(3, 2, rows, HEADS, width, dtype=torch.float64)
    pattern = local_window(4) + DilatedPattern([37], [2])
    found = lagged_attend(lags, query, key, value, pattern, is_causal=True)
    places = torch.arange(rows)
    counts = pattern.counts(places, places, HEADS, is_causal=True).double()
    for head, lag in enumerate(lags):
        moved = [torch.zeros_like(one[:, :, head]) for one in (key, value)]
        for place in range(lag, rows):
            for into, one in zip(moved, (key, value), strict=True):
                into[:, place] = one[:, place - lag, head]
        scores = query[:, :, head] @ moved[0].mT / width**0.5 + counts[head].log()
        torch.testing.assert_close(found[:, :, head], scores.softmax(-1) @ moved[1], rtol=0, atol=1e-13)


def test_all_contestants_of_a_vocabulary_have_as_many_weights_and_took_as_many_operations() -> None:
    sizes = {(one.text.vocab_size, config_of(one).num_parameters) for one in CONTESTANTS.values()}
    assert len(sizes) == len({vocab_size for vocab_size, _ in sizes})
    flops = [record["flops"] for record in RECORDS.values()]
    assert max(flops) < 1.02 * min(flops)
    assert {tuple(record["patterns"]) for record in RECORDS.values()} >= {(LONGNET, LONGNET)}


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_row_of_the_page_has_the_figures_of_the_results(name: str) -> None:
    record = RECORDS[name]
    bits = [f"{record['bits_by_length'][str(length)]:.2f}" for length in LENGTHS]
    met = f"{record['met_by_octave'][str(OCTAVES[-1])]:.2f}"
    far = f"{record['bits_by_octave'][str(OCTAVES[-1])]:.2f}"
    assert f"| {' | '.join([name, str(record['steps']), *bits, met, far])} |" in PAGE
