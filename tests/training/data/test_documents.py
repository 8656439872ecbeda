"""Documents in rows and batches: none sees another, each is read once an epoch, and sample i depends on (seed, i)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training.data.corpus import SEPARATOR, Text
from dilated_attention_pytorch.training.data.documents import BucketedBatches, PackedRows, as_one_row, packed
from dilated_attention_pytorch.training.data.run_data import Mixture
from dilated_attention_pytorch.training.data.windows import IGNORED, TrainingWindows
from dilated_attention_pytorch.training.measures import ByteCount, bits_per_byte

LENGTHS = [3, 17, 5, 5, 2, 41, 7, 150, 13, 2, 29, 8, 8, 8, 61, 4, 97, 11, 3, 6]
CONTEXT = 37


@pytest.fixture
def text() -> Text:
    """Documents whose tokens say which of them they are of, the separator first."""
    data = torch.cat([torch.tensor([SEPARATOR] + [number + 1] * (length - 1)) for number, length in enumerate(LENGTHS)])
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    return Text(data.to(torch.uint8), starts)


def parts_of(row: dict[str, Tensor]) -> list[Tensor]:
    boundaries = row["cu_seqlens"].tolist()
    assert boundaries[0] == 0
    assert boundaries[-1] == len(row["input_ids"])
    return [row["input_ids"][first:after] for first, after in pairwise(boundaries)]


def test_an_epoch_of_rows_reads_every_token_once_but_a_last_part_of_a_row(text: Text) -> None:
    per_epoch = len(text) // CONTEXT
    rows = PackedRows(text, CONTEXT, 3 * per_epoch, seed=3)
    epochs = [[rows[epoch * per_epoch + row] for row in range(per_epoch)] for epoch in range(3)]
    for epoch in epochs:
        assert {len(row["input_ids"]) for row in epoch} == {CONTEXT}
        assert rows.lengths_in(0) == [len(part) for part in parts_of(rows[0])]
        read = Counter(torch.cat([row["input_ids"] for row in epoch]).tolist())
        left = Counter(text.data.tolist()) - read
        assert not read - Counter(text.data.tolist())
        assert left.total() == len(text) - per_epoch * CONTEXT
        for part in (part for row in epoch for part in parts_of(row)):
            assert len(set(part.tolist()) - {SEPARATOR}) <= 1  # of one document
    assert not torch.equal(epochs[0][0]["input_ids"], epochs[1][0]["input_ids"])


def test_without_a_seed_rows_follow_the_text(text: Text) -> None:
    rows = PackedRows(text, CONTEXT, len(text) // CONTEXT, seed=None)
    read = torch.cat([rows[index]["input_ids"] for index in range(len(rows))])
    assert torch.equal(read, text.data[: len(read)].long())


def test_nothing_is_predicted_across_a_boundary(text: Text) -> None:
    row = PackedRows(text, CONTEXT, 9, seed=1)[4]
    first = row["cu_seqlens"][:-1].long()
    assert (row["labels"][first] == IGNORED).all()
    others = torch.ones(CONTEXT, dtype=torch.bool).index_fill(0, first, False)
    assert torch.equal(row["labels"][others], row["input_ids"][others])


def test_the_loss_of_rows_of_documents_is_that_of_every_document_alone(text: Text) -> None:
    torch.manual_seed(0)
    config = LongNetConfig(
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        segment_lengths=(5, 16),
        dilation_rates=(1, 2),
        layer_segment_shifts=(0, 3),
    )
    model = LongNetForCausalLM.from_longnet_config(config).double()
    rows = PackedRows(text, CONTEXT, 9, seed=2)
    parts = [part for index in range(3) for part in parts_of(rows[index])]
    together = model(**as_one_row([rows[index] for index in range(3)]), num_items_in_batch=1).loss
    alone = sum(model(part[None], labels=part[None], num_items_in_batch=1).loss for part in parts if len(part) > 1)
    assert torch.allclose(together, alone, rtol=1e-12)


def test_a_batch_within_the_budget_holds_documents_of_like_length_each_once_an_epoch(text: Text) -> None:
    batches = BucketedBatches(text, CONTEXT, max_tokens=80, max_batch_size=3, num_batches=500, seed=0)
    per_epoch = batches.per_epoch
    expected = Counter[tuple[int, ...]]()
    for number, length in enumerate(LENGTHS):
        tokens = [SEPARATOR] + [number + 1] * (length - 1)
        cut = [tokens[first : first + CONTEXT] for first in range(0, length, CONTEXT)]
        expected.update(tuple(part) for part in cut if len(part) > 1)
    orders = []
    for epoch in range(3):
        found = [parts_of(batches[epoch * per_epoch + place]) for place in range(per_epoch)]
        assert Counter(tuple(part.tolist()) for batch in found for part in batch) == expected
        for place, batch in enumerate(found):
            lengths = [len(part) for part in batch]
            assert lengths == batches.lengths_in(epoch * per_epoch + place)
            assert sum(lengths) <= 80
            assert len(batch) <= 3
            assert max(lengths) < 1.19 * min(lengths)
        orders.append([tuple(part.tolist()) for batch in found for part in batch])
    assert orders[0] != orders[1]
    assert max(len(parts_of(batches[place])) for place in range(per_epoch)) == 3


def drawn_from(text: Text, kind: str, seed: int) -> Any:
    windows = TrainingWindows(text, CONTEXT, 300, seed=seed, file_start_fraction=0.3)
    rows = PackedRows(text, CONTEXT, 300, seed=seed)
    batches = BucketedBatches(text, CONTEXT, max_tokens=50, max_batch_size=0, num_batches=300, seed=seed)
    mixture = Mixture([windows, rows], [3.0, 1.0], seed=seed)
    return {"windows": windows, "rows": rows, "batches": batches, "mixture": mixture}[kind]


@pytest.mark.parametrize("kind", ["windows", "rows", "batches", "mixture"])
def test_a_sample_is_a_function_of_seed_and_index(kind: str, text: Text) -> None:
    first, second, other = (drawn_from(text, kind, seed) for seed in (5, 5, 6))
    indices = torch.randperm(300).tolist()
    found = {index: second[index] for index in indices}
    assert all(torch.equal(first[index]["input_ids"], found[index]["input_ids"]) for index in range(300))
    assert any(not torch.equal(first[index]["input_ids"], other[index]["input_ids"]) for index in range(300))


def test_a_mixture_draws_in_the_proportions_that_were_told() -> None:
    members = [["a"] * 20_000, ["b"] * 20_000, ["c"] * 20_000]
    counts = Counter(Mixture(members, [7.0, 2.0, 1.0], seed=0)[index] for index in range(20_000))  # type: ignore[type-var]
    for name, share in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        # Five standard deviations of a binomial count.
        assert abs(counts[name] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_bits_per_byte_are_those_of_the_bytes_that_were_predicted() -> None:
    lengths = torch.tensor([1, 2, 5, 3])
    labels = torch.tensor([[2, 1, 3, IGNORED], [0, 2, 2, 0]])
    counts = [ByteCount(lengths, torch.device("cpu")) for _ in range(2)]
    for count, nats in zip(counts, (7.0, 9.0), strict=True):  # what two processes say, whose mean is the sum
        count.add(torch.tensor(nats), labels)
    taken = torch.cat([count.take() for count in counts])
    num_bytes = (2 + 3) + (5 + 5 + 1)
    assert bits_per_byte(taken, copies=2) == pytest.approx(8.0 / num_bytes / 0.6931471805599453, rel=1e-15)
    assert bits_per_byte(taken, copies=1) == pytest.approx(4.0 / num_bytes / 0.6931471805599453, rel=1e-15)
    assert not counts[0].take().any()


def test_rows_joined_into_one_keep_their_boundaries() -> None:
    rows = [packed([torch.arange(3), torch.arange(4)]), packed([torch.arange(2)])]
    joined = as_one_row(rows)
    assert joined["cu_seqlens"].tolist() == [0, 3, 7, 9]
    assert joined["input_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    assert joined["labels"].tolist() == [[IGNORED, 1, 2, IGNORED, 1, 2, 3, IGNORED, 1]]
