"""A head on embeddings of slides: which of several classes a slide is of, from the files that `embed` writes.

    dilated-attention embed features/ --checkpoint slide_encoder.pth --output embeddings/
    python examples/slide_head.py embeddings/ labels.csv --layers 5 11 --output head.pt

labels.csv has the columns slide (the name of the feature file without its ending), label, and optionally patient:
slides of one patient are then either all trained on or all held out. Needs torch and h5py.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import h5py
import torch
from torch import Tensor, nn
from torch.nn import functional


def read_embedding(file: Path, layers: list[int]) -> Tensor:
    """Embeddings of some layers behind each other; 0 is that of the tiles before the first layer."""
    with h5py.File(file, "r") as content:
        if "layers" not in content:
            raise SystemExit(f"{file} holds no embedding: name the folder that `dilated-attention embed` wrote")
        found = torch.from_numpy(content["layers"][()])
    if not all(-len(found) <= layer < len(found) for layer in layers):
        raise SystemExit(f"--layers must be from {-len(found)} to {len(found) - 1} for {file}, got {layers}")
    return found[layers].flatten()


def read_labels(file: Path) -> list[dict[str, str]]:
    """The rows of the table."""
    if not file.is_file():
        raise SystemExit(f"there is no file {file}: name a CSV file with the columns slide and label")
    with file.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if not rows or not {"slide", "label"} <= rows[0].keys():
        raise SystemExit(f"{file} must have the columns slide and label, got {list(rows[0]) if rows else 'no row'}")
    return rows


def split(rows: list[dict[str, str]], held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train on and of those held out, patient by patient."""
    patients = sorted({row.get("patient") or row["slide"] for row in rows})
    random.Random(seed).shuffle(patients)
    kept_back = set(patients[: max(1, round(held_out * len(patients)))])
    held = [index for index, row in enumerate(rows) if (row.get("patient") or row["slide"]) in kept_back]
    return [index for index in range(len(rows)) if index not in set(held)], held


class Head(nn.Module):
    """Embeddings, standardised as those it was trained on, to the scores of classes."""

    def __init__(self, embeddings: Tensor, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", embeddings.mean(dim=0))
        self.register_buffer("deviation", embeddings.std(dim=0).clamp(min=1e-6))
        self.linear = nn.Linear(embeddings.shape[1], num_classes)
        nn.init.zeros_(self.linear.weight)

    def forward(self, embeddings: Tensor) -> Tensor:
        """``[S, width]`` to ``[S, classes]``."""
        return self.linear((embeddings - self.mean) / self.deviation)


def train(
    head: Head, embeddings: Tensor, labels: Tensor, epochs: int, learning_rate: float, weight_decay: float
) -> None:
    """All slides at once, every class weighing the same however many slides it has."""
    counts = labels.bincount(minlength=head.linear.out_features)
    weights = len(labels) / (counts.clamp(min=1) * (counts > 0).sum())
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        loss = functional.cross_entropy(head(embeddings), labels, weight=weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def balanced_accuracy(scores: Tensor, labels: Tensor) -> float:
    """The mean over the classes of the part of each that is found; guessing gives one over their number."""
    is_right = scores.argmax(dim=1) == labels
    return float(torch.stack([is_right[labels == one].float().mean() for one in labels.unique()]).mean())


def main() -> None:
    """Read, train, say how well slides that were held out are told, and save the head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[-1], help="0 is before the first layer, -1 the last")
    parser.add_argument("--held-out", type=float, default=0.25, help="part of the patients")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("head.pt"))
    given = parser.parse_args()
    if not 0 < given.held_out < 1:
        parser.error(f"--held-out must be above 0 and below 1, got {given.held_out}")
    if given.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {given.epochs}")
    rows = read_labels(given.labels)
    missing = [row["slide"] for row in rows if not (given.embeddings / f"{row['slide']}.h5").exists()]
    if missing:
        print(f"{len(missing)} slides have no embedding and are left out, the first {missing[0]}")
    rows = [row for row in rows if row["slide"] not in set(missing)]
    classes = sorted({row["label"] for row in rows})
    if len(classes) < 2:
        raise SystemExit(f"a head tells classes apart, and the slides with an embedding are of {classes}")
    embeddings = torch.stack([read_embedding(given.embeddings / f"{row['slide']}.h5", given.layers) for row in rows])
    labels = torch.tensor([classes.index(row["label"]) for row in rows])
    trained, held = split(rows, given.held_out, given.seed)
    told = sorted({rows[index]["label"] for index in trained})
    if len(trained) < 2 or len(told) < 2:
        raise SystemExit(
            f"a head is trained on two slides of two classes at least, got {len(trained)} of {told} with {len(held)} "
            "held out; label more slides or patients, or lower --held-out"
        )
    head = Head(embeddings[trained], len(classes))
    train(head, embeddings[trained], labels[trained], given.epochs, given.learning_rate, given.weight_decay)
    with torch.no_grad():
        accuracy = balanced_accuracy(head(embeddings[held]), labels[held])
    torch.save({"head": head.state_dict(), "classes": classes, "layers": given.layers}, given.output)
    print(
        f"{len(trained)} slides trained on, {len(held)} held out: balanced accuracy {accuracy:.3f} (guessing: "
        f"{1 / len(classes):.3f}); written: {given.output}"
    )


if __name__ == "__main__":
    main()
