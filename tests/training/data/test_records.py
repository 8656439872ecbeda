"""Records of JSONL, Parquet and Arrow: the same texts whatever the file, and what is broken is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.records import Record, are_records, records

TEXTS = ["first\nof two lines", "", "zweiter: äöü 𝄞", *(f"number {number}" for number in range(600))]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": number, field: text}) + "\n" for number, text in enumerate(texts)))
    return path


def write_arrow(folder: Path, texts: list[str], **state: object) -> Path:
    """A folder as ``save_to_disk`` of datasets 4 and 5 writes it, its rows in two files."""
    folder.mkdir()
    halves = [texts[:100], texts[100:]]
    for number, half in enumerate(halves):
        table = pa.table({"id": range(len(half)), "text": half})
        with pa.ipc.new_stream(folder / f"data-0000{number}-of-00002.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=37)
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_texts_are_the_same_in_every_format(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS, "id": range(len(TEXTS))}), tmp_path / "a.parquet", row_group_size=50)
    places = [write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "a.parquet", write_arrow(tmp_path / "saved", TEXTS)]
    for place in places:
        assert are_records(place)
        assert [record.text.decode() for record in records(place, "text")] == TEXTS
    assert next(records(places[0], "text")) == Record("a.jsonl:1", TEXTS[0].encode())
    assert [record.name for record in records(places[2], "text")][99:101] == [
        "data-00000-of-00002.arrow:100",
        "data-00001-of-00002.arrow:1",
    ]


@pytest.mark.parametrize("name", ["a.parquet", "saved/data-00000-of-00002.arrow"])
def test_a_text_that_is_no_utf8_any_more_is_named(name: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    write_arrow(tmp_path / "saved", TEXTS)
    path = tmp_path / name
    whole = path.read_bytes()
    assert "äöü".encode() in whole
    path.write_bytes(whole.replace("äöü".encode(), b"\xf8" * 6))
    with pytest.raises(RunError, match=r"is damaged or not .* \(.*UTF8.*\); restore the file"):
        list(records(path if name == "a.parquet" else path.parent, "text"))


def test_places_of_texts_that_lie_outside_of_an_arrow_file_are_refused_and_not_read(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "saved", TEXTS) / "data-00000-of-00002.arrow"
    whole = path.read_bytes()
    lengths = [0]
    for text in TEXTS[:37]:  # the first batch
        lengths.append(lengths[-1] + len(text.encode()))
    places = np.array(lengths, np.int32).tobytes()
    assert whole.count(places) == 1
    beyond = np.array([*lengths[:-1], 1 << 30], np.int32).tobytes()
    path.write_bytes(whole.replace(places, beyond))
    with pytest.raises(RunError, match=r"is damaged or not an Arrow stream \(.*; restore the file"):
        list(records(path.parent, "text"))


def test_each_text_is_a_document_of_the_corpus_and_empty_ones_are_said(tmp_path: Path) -> None:
    corpus = read_corpus([write_jsonl(tmp_path / "a.jsonl", TEXTS, "body")], text_field="body")
    assert corpus.skipped == {"empty": 1}
    found = [
        text.file(index)[1:].numpy().tobytes().decode()
        for text in (corpus.training, corpus.held_out)
        for index in range(len(text.file_starts))
    ]
    assert sorted(found) == sorted(filter(None, TEXTS))
    assert 5 < len(corpus.held_out.file_starts) < 90


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl, line 3 is not valid JSON \(Invalid control character"),
        ('["text"]', r"a\.jsonl, line 3: expected one JSON object per line, got list"),
        ('{"body": "x"}', r"line 3 has no 'text'; it has 'body'; name the one that holds the text with --text-field"),
        ('{"text": 5}', r"line 3: 'text' is 5, not text"),
        ('{"text": "a\\ud800"}', r"line 3: 'text' is not valid UTF-8"),
        ('{"text": "a\\u0000"}', r"line 3: 'text' holds a zero character"),
    ],
)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(RunError, match=message):
        list(records(path, "text"))


def test_what_is_wrong_with_a_table_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", None], "id": [1, 2]}), path)
    with pytest.raises(RunError, match=r"a\.parquet, row 2: 'text' is None, not text"):
        list(records(path, "text"))
    with pytest.raises(RunError, match=r"the column 'id' of .* holds int64, not text; name another with --text-field"):
        list(records(path, "id"))
    with pytest.raises(RunError, match=r"has no column 'body'; it has 'text', 'id'"):
        list(records(path, "body"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"a\.parquet is damaged or not a Parquet file"):
        list(records(path, "text"))
    folder = write_arrow(tmp_path / "saved", TEXTS)
    cut = folder / "data-00001-of-00002.arrow"
    cut.write_bytes(cut.read_bytes()[:3000])
    with pytest.raises(RunError, match=r"data-00001-of-00002\.arrow .*(damaged|cannot be read)"):
        list(records(folder, "text"))


def test_folders_of_splits_and_of_selected_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        write_arrow(tmp_path / "both" / split, TEXTS)
    with pytest.raises(RunError, match=r"both holds several splits \(test, train\); name one, as .*/both/train"):
        list(records(tmp_path / "both", "text"))
    selected = write_arrow(tmp_path / "selected", TEXTS, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(RunError, match=r"rows that are only selected; call flatten_indices\(\) and save it again"):
        list(records(selected, "text"))
