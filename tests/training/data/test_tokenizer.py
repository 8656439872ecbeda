"""Tokens join to the very bytes of a text; a tokenizer whose tokens do not is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.data.tokenizer import (
    BYTES,
    byte_lengths,
    bytes_of,
    load_tokenizer,
    train_tokenizer,
)

LINES = [f"def f{number}(x): return x * {number % 7}  # äö <|endoftext|>\n".encode() for number in range(300)]


TRAINED = train_tokenizer(LINES, 400)


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"])))
def test_tokens_join_to_the_bytes_of_any_text(text: str) -> None:
    (ids,) = TRAINED.encode([text.encode()])
    assert b"".join(TRAINED.token_bytes[token] for token in ids) == text.encode()
    assert TRAINED.separator not in ids


def test_the_same_texts_give_the_same_tokenizer_of_the_size_that_was_told() -> None:
    assert train_tokenizer(LINES, 400).text == TRAINED.text
    assert TRAINED.vocab_size == len(TRAINED.token_bytes) == 400
    (ids,) = TRAINED.encode([LINES[0]])
    assert len(ids) < len(LINES[0]) / 2


def test_what_is_saved_is_loaded_again_here_and_by_transformers(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.digest, loaded.separator) == (TRAINED.digest, TRAINED.separator)
    assert load_tokenizer(tmp_path / "tokenizer.json").digest == TRAINED.digest
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f7(x): return 3"
    (ids,) = TRAINED.encode([text.encode()])
    assert theirs(text)["input_ids"] == ids.tolist()
    assert theirs.eos_token_id == TRAINED.separator


def test_a_separator_counts_as_one_byte() -> None:
    (ids,) = TRAINED.encode([LINES[3]])
    tokens = torch.tensor([TRAINED.separator, *ids.tolist()])
    assert bytes_of(TRAINED, tokens) == b"\0" + LINES[3]
    assert int(byte_lengths(TRAINED)[tokens].sum()) == 1 + len(LINES[3])
    assert bytes_of(BYTES, torch.tensor([0, *LINES[3]])) == b"\0" + LINES[3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "NFC"}}, r"changes texts before it cuts them \(normalizer NFC\)"),
        ({"decoder": None}, r"its tokens do not stand for bytes \(decoder none, not ByteLevel\)"),
        ({"decoder": {"type": "Fuse"}}, r"its tokens do not stand for bytes \(decoder Fuse, not ByteLevel\)"),
        (
            {"added_tokens": []},
            r"nothing says which of its special tokens \(none\) stands between texts; put it as eos",
        ),
        ({"model": 3}, r"tokenizer\.json is damaged or not a tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(TRAINED.text) | change))
    with pytest.raises(RunError, match=message):
        load_tokenizer(tmp_path)


def test_one_that_adds_to_a_text_is_refused_at_the_text(tmp_path: Path) -> None:
    parts = json.loads(TRAINED.text)
    parts["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(RunError, match=r"its tokens of the text 'def f0.* do not stand for all of its bytes"):
        load_tokenizer(tmp_path).encode([LINES[0]])
