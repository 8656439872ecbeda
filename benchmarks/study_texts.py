"""Texts of the studies of language models, with their tokenizers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dilated_attention_pytorch.output import replacing
from dilated_attention_pytorch.training.data.sources import Sources
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer

SMALLEST_TEXT = 1 << 15


def folder_texts(package: str) -> Iterator[tuple[str, str]]:
    """Name and Python source, as one text, of every folder of the package that has enough of it."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    for folder in sorted({file.parent for file in root.rglob("*.py")}):
        name = str(folder.relative_to(root.parent))
        files = sorted(folder.glob("*.py"))
        text = "".join(f"# {name}/{file.name}\n{file.read_text(errors='replace')}\n" for file in files)
        if len(text.encode()) >= SMALLEST_TEXT:
            yield name, text


def prepare(folder: Path, texts: Iterable[tuple[str, str]], vocab_size: int) -> tuple[Path, Path]:
    """Write the texts as JSONL and train their byte-level BPE, unless that is done.

    Args:
        folder: where.
        texts: names and texts.
        vocab_size: tokens of the BPE.

    Returns:
        The file of the texts and the folder of the tokenizer.
    """
    file, tokenizer = folder / "texts.jsonl", folder / "tokenizer"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as staged, staged.open("w") as stream:
            for name, text in texts:
                stream.write(json.dumps({"name": name, "text": text}) + "\n")
    if not tokenizer.exists():
        sources = Sources([file], "text", None)
        sources.survey()
        unfinished = folder / "tokenizer.unfinished"
        unfinished.mkdir(exist_ok=True)
        train_tokenizer(sources.texts_to_train_on(), vocab_size).save(unfinished)
        unfinished.rename(tokenizer)
    return file, tokenizer


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.hybrids --help")
