"""A file of labels is read as it is written, or refused in a sentence that names file and line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.slides.finetune.labels import LabelledCase, Labels, read_labels

SURVIVAL = {"task": "survival"}
PATIENTS = {"by_patient": True}


def read(folder: Path, content: str | bytes, name: str = "labels.csv", **options: Any) -> Labels:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_labels(path, **{"task": None, **options})


def is_same(one: Labels, other: Labels) -> bool:
    same = (one.task, one.cases, one.classes) == (other.task, other.cases, other.classes)
    return same and one.targets.dtype == other.targets.dtype and one.targets.equal(other.targets)


def test_a_slide_a_line_is_a_case_and_patients_and_splits_are_optional(tmp_path: Path) -> None:
    labels = read(tmp_path, "slide,label\ns2,tumour\ns1,normal\n")
    assert labels.task == "classification"
    assert labels.cases == (LabelledCase("s2", "s2", ("s2",), None), LabelledCase("s1", "s1", ("s1",), None))
    assert (labels.classes, labels.targets.tolist(), labels.targets.dtype) == (
        ("normal", "tumour"),
        [1, 0],
        torch.int64,
    )
    labels = read(tmp_path, "split,patient,slide,x,label\ntrain,p,s2,,b\ntest,q,s1,,a\n")
    assert labels.cases == (LabelledCase("s2", "p", ("s2",), "train"), LabelledCase("s1", "q", ("s1",), "test"))


def test_classes_that_are_numbers_are_in_numerical_order(tmp_path: Path) -> None:
    labels = read(tmp_path, "slide,label\na,10\nb,2\nc,10\nd,0\n")
    assert (labels.classes, labels.targets.tolist(), labels.num_outputs) == (("0", "2", "10"), [2, 1, 2, 0], 3)


def test_numbers_are_read_for_the_other_tasks(tmp_path: Path) -> None:
    labels = read(tmp_path, "slide,er,pr\na,1,0\nb,0,1.0\n", label_columns=("pr", "er"))
    assert (labels.task, labels.classes, labels.targets.tolist()) == ("multilabel", ("pr", "er"), [[0, 1], [1, 0]])
    labels = read(tmp_path, "slide,age\na,-1.5e1\nb,+.5\n", task="regression", label_columns=("age",))
    assert (labels.targets.tolist(), labels.targets.dtype, labels.num_outputs) == ([[-15], [0.5]], torch.float32, 1)
    labels = read(
        tmp_path, "slide,months,dead\na,0,0\nb,12.5,1\n", time_column="months", event_column="dead", **SURVIVAL
    )
    assert (labels.classes, labels.targets.tolist(), labels.num_outputs) == (("months", "dead"), [[0, 0], [12.5, 1]], 1)


def test_the_slides_of_a_patient_are_one_case_by_patient(tmp_path: Path) -> None:
    labels = read(tmp_path, "slide,patient,label\ns3,p,a\ns1,q,b\ns2,p,a\n", by_patient=True)
    assert labels.cases == (LabelledCase("p", "p", ("s3", "s2"), None), LabelledCase("q", "q", ("s1",), None))
    assert labels.targets.tolist() == [0, 1]


WRONG: list[tuple[str | bytes, dict[str, Any], str]] = [
    ("", {}, r"labels.csv is empty; its first line must name the columns, 'slide' among them"),
    ("slide,label\n\n", {}, r"holds a header and no slides"),
    ("s1,a\ns2,b\n", {}, r"has no column 'slide'; its first line, read with commas between the names, has 's1', 'a'"),
    ("slide;label\ns1;a\n", {}, r"has 'slide;label': name the column that is meant, or rename it"),
    ("slide,label\na,b\n", {"label_columns": ("grade",)}, r"has no column 'grade'"),
    ("slide,label\na,b\n", {"patient_column": "who"}, r"has no column 'who'"),
    ("slide,label\na,b\n", {"split_column": "fold"}, r"has no column 'fold'"),
    ("slide,label\na,b\n", PATIENTS, r"has no column 'patient'"),
    ("slide,label\na,b\n", SURVIVAL, r"has no column 'time'"),
    ("slide,label,label\na,b,c\n", {}, r"has 2 columns 'label'; rename all but one"),
    ("slide,label\na,b\n", {"label_columns": ()}, r"must each have a column of their own, got 'slide', \[\]"),
    ("slide,label\na,b\n", {"label_columns": ("slide",)}, r"must each have a column of their own"),
    ("slide,label\na,b\n", {"task": "segmentation"}, r"task must be one of classification, .* got 'segmentation'"),
    (b"slide,label\na,x\nb,\xe4\n", {}, r"labels.csv, line 3 is not UTF-8; save the file as CSV in UTF-8"),
    ("slide,label\na,x\n".encode("utf-16"), {}, r"line 1 is not UTF-8"),
    ('slide,label\na,x\n"b,y\n', {}, r"is not a line of a CSV file \(unexpected end of data\)"),
    ("slide,label\na,x\nb,y,z\n", {}, r"line 3 has 3 cells, the header 2; put a cell that contains a comma"),
    ("slide,label\na,x\na,y\n", {}, r"line 3: slide 'a' also stands in .*line 2; remove one of the lines"),
    ("slide,label\na,x\n,y\n", {}, r"line 3 has an empty slide"),
    ("slide,label,patient\na,x,p\nb,y,\n", {}, r"line 3 has an empty patient"),
    ("slide,label\na,x\nb, \n", {}, r"line 3 has no label \(got ''\); fill it in, or remove the line"),
    ("slide,label\na,x\nb,NaN\n", {}, r"line 3 has no label \(got 'NaN'\)"),
    ("slide,label\na,x\nb,NaN\nc,y\nd,\ne,n/a\n", {}, r"line 3 has no label .* the line; also wrong: line 5, 6$"),
    ("slide,label\n" + "".join(f"{n},\n" for n in range(40)), {}, r"; also wrong: line 3, .*, 22 and 19 more$"),
    ("slide,label\na,A\nb,a\nc,A\nd,a\n", {}, r"line 3: label 'a' is written 'A' .*; also wrong: line 5$"),
    ("slide,time,event\na,x,1\nb,1,2\nc,1,1\nd,-1,1\n", SURVIVAL, r"line 2: time must be a number .*line 3, 5$"),
    ("slide,label,split\na,x,tr\nb,y,train\nc,y,te\n", {}, r"line 2: split must be .*got 'tr'; also wrong: line 4$"),
    ("slide,label\na,x\nb,x\u200b\n", {}, r"line 3: label .* has an unprintable character"),
    ("slide,label\na,x\nb,x\n", {}, r"has one class, 'x'; a classification needs two or more"),
    ("slide,label\na,1\nb,0\nc,1.0\n", {}, r"line 4: label '1.0' is written '1' in .*line 2"),
    ("slide,label\na,Tumour\nb,x\nc,tumour\n", {}, r"line 4: label 'tumour' is written 'Tumour' in .*line 2"),
    ("slide,label\na,1\nb,0.5\n", {}, r"holds numbers with decimals.*name the task, regression or classification"),
    ("slide,a,b\nx,0,1\ny,2,1\n", {"label_columns": ("a", "b")}, r"line 3: a must be 0 or 1, got '2'; name"),
    ("slide,a,b\nx,0,1\n", {"label_columns": ("a", "b"), "task": "classification"}, r"takes one label column"),
    ("slide,a,b\nx,0,1\ny,1,1\n", {"label_columns": ("a", "b")}, r"column 'b' is 1 in all 2 cases; leave it out"),
    ("slide,label\na,1\nb,1,5\n", {"task": "regression"}, r"line 3 has 3 cells, the header 2"),
    ("slide,label\na,1\nb,high\n", {"task": "regression"}, r"line 3: label must be a number such as .*'high'"),
    ("slide,label\na,1\nb,1_000\n", {"task": "regression"}, r"line 3: label must be a number"),
    ("slide,label\na,1\nb,1e39\n", {"task": "regression"}, r"line 3: label must be a number .*within float32"),
    ("slide,label\na,1\nb,inf\n", {"task": "regression"}, r"line 3: label must be a number"),
    ("slide,label\na,2\nb,2\n", {"task": "regression"}, r"column 'label' is 2 in all 2 cases"),
    ("slide,time,event\na,-1,1\n", SURVIVAL, r"line 2: time must be a time of at least 0, got '-1'"),
    ("slide,time,event\na,1,2\n", SURVIVAL, r"line 2: event must be 0 or 1, got '2'"),
    ("slide,time,event\na,1,0\nb,2,0\n", SURVIVAL, r"has no event: all 2 cases are censored"),
    ("slide,label,split\na,x,train\nb,y,val\n", {}, r"line 3: split must be train, validation, test, got 'val'"),
    ("slide,label,patient,split\na,x,p,train\nb,y,p,test\n", {}, r"line 3: patient 'p' is in test, and in train by .*"),
    ("slide,label,patient\na,x,p\nb,y,p\n", PATIENTS, r"line 3: the label of patient 'p' differs from .*line 2"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "options", "sentence"), WRONG)
def test_a_wrong_file_is_refused_with_file_and_line(
    tmp_path: Path, content: str | bytes, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, content, **options)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path, sentence in (
        (tmp_path / "none.csv", "does not exist; pass a CSV or TSV file"),
        (tmp_path, "is a folder or a device"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_labels(path, task=None)


Table = list[dict[str, str]]
TASKS: dict[str, dict[str, Any]] = {
    "classification": {},
    "multilabel": {"label_columns": ("er", "pr")},
    "regression": {"task": "regression", "label_columns": ("age",)},
    "survival": SURVIVAL,
}


def made_table(draw: random.Random, task: str, *, by_patient: bool) -> Table:
    """Twelve slides of six patients, three in each part, with all that a task needs."""
    table = []
    for patient in range(6):
        two = [str((patient + k) % 2) for k in range(2)] if by_patient else ["", ""]
        for slide in range(2):
            zero, one = two if by_patient else (str(slide), str(1 - slide))
            number = patient + 1 if by_patient else draw.random() * 100
            table.append(
                {
                    "slide": f"slide {patient}-{slide}, é",
                    "patient": f"p{patient}",
                    "split": ("train", "validation", "test")[patient // 2],
                    "label": ("normal", "tumour")[int(zero)],
                    "er": zero,
                    "pr": one,
                    "age": f"{number:.3g}",
                    "time": f"{number:.3g}",
                    "event": zero,
                    "note": "not read" * 9,
                }
            )
    return table


def as_csv(table: Table, draw: random.Random, *, is_tsv: bool) -> bytes:
    """The table in one of the ways that programs write it."""
    names = draw.sample(list(table[0]), len(table[0]))
    separator, end = "\t" if is_tsv else ",", draw.choice(["\n", "\r\n", "\r"])
    quotes, spaces = draw.random() < 0.5, draw.random() < 0.3

    def cell(text: str) -> str:
        if quotes or separator in text or '"' in text:
            return '"' + text.replace('"', '""') + '"'
        return f" {text} " if spaces else text

    lines = [separator.join(map(cell, names)), *(separator.join(cell(row[n]) for n in names) for row in table)]
    if draw.random() < 0.3:
        lines.insert(draw.randrange(1, len(lines)), draw.choice(["", separator * (len(names) - 1)]))
    text = end.join(lines) + draw.choice(["", end, end * 3])
    return text.encode("utf-8-sig" if draw.random() < 0.3 else "utf-8")


def mangle_cells(table: Table, draw: random.Random, task: str, *, by_patient: bool) -> bool:
    """Change cells of the table in place; whether it must be refused now."""
    row, other = draw.sample(table, 2)
    used = {"classification": ["label"], "multilabel": ["er", "pr"], "regression": ["age"]}.get(task, ["time", "event"])
    column = draw.choice(used)
    match draw.randrange(9):
        case 0:
            row["slide"] = other["slide"]
        case 1:
            row[draw.choice(["slide", "patient", "split", column])] = draw.choice(["", "  "])
        case 2:
            row[column] = draw.choice(["nan", "NA", "", "null", "\x00", "a\nb", "\u200bx"])
        case 3:
            row[column] = draw.choice(["-1e400", "0x1", "1,5,", "½", "1_0", "one", "infinity"])
            return task != "classification"
        case 4:
            for line in table:
                line[used[-1]] = "0"
        case 5:
            row["split"] = draw.choice(["training", "val", "1", "Train"])
        case 6:
            row["patient"] = next(line["patient"] for line in table if line["split"] != row["split"])
        case 7 if by_patient:
            row["label"], row["er"], row["pr"] = ("normal", "tumour")[row["er"] == "0"], row["pr"], row["er"]
            row["age"], row["time"] = "77", "77"
        case _:
            name = draw.choice(["slide", *used])
            for line in table:
                line[f"{name} x"] = line.pop(name)
    return True


def mangle_bytes(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    match draw.randrange(8):
        case 0:
            return content[: draw.randrange(len(content))]
        case 1:
            return content[: draw.randrange(len(content))] + content[draw.randrange(len(content)) :]
        case 2:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(500)))
    for _ in range(draw.choice([1, 1, 3, 30])):
        changed[draw.randrange(len(changed))] = draw.choice([*b'",\n\r\t 019abcdefghijklm', draw.randrange(256)])
    return bytes(changed)


@pytest.mark.parametrize(("seed", "number"), [(0, 100), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_a_mangled_file_is_read_as_it_is_written_or_refused(tmp_path: Path, seed: int, number: int) -> None:
    draw, taken, sentences = random.Random(seed), 0, list[str]()
    for trial in range(number):
        task, by_patient, is_tsv = draw.choice(list(TASKS)), draw.random() < 0.5, draw.random() < 0.3
        options = {**TASKS[task], "by_patient": by_patient}
        table = made_table(draw, task, by_patient=by_patient)
        name = "labels.tsv" if is_tsv else "labels.csv"
        whole = read(tmp_path, as_csv(table, draw, is_tsv=is_tsv), name, **options)
        assert is_same(whole, read(tmp_path, as_csv(table, draw, is_tsv=is_tsv), name, **options)), trial
        assert [slide for case in whole.cases for slide in case.slides] == [row["slide"] for row in table], trial
        must_fail = draw.random() < 0.6 and mangle_cells(table, draw, task, by_patient=by_patient)
        content = as_csv(table, draw, is_tsv=is_tsv)
        content = content if must_fail else mangle_bytes(content, draw)
        try:
            labels = read(tmp_path, content, name, **options)
        except ValueError as error:
            sentences.append(str(error))
        else:
            taken += 1
            assert not must_fail, (trial, content)
            slides = [slide for case in labels.cases for slide in case.slides]
            assert len(set(slides)) == len(slides), trial
            assert all(slide in content.decode() for slide in slides), trial
            assert len(labels.targets) == len(labels.cases), trial
            assert labels.targets.isfinite().all(), trial
    assert all(sentence.isprintable() and len(sentence) < 1000 for sentence in sentences)
    assert len(sentences) > number / 3
    assert taken > number / 25
