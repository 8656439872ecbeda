"""Run under torchrun: several training runs over the processes that it started, one after the other.

    torchrun --nproc-per-node N tests/training/spread_runs.py FOLDER TEXTS CASES [parts]

CASES is JSON: a list of ``[name, changes of the settings, step to stop after and resume from, or null]``; a run whose
name says "damaged" finds a bit of its last checkpoint flipped when it is resumed, and one whose name says "overflowing"
begins with a scale of the loss with which every gradient overflows in float16. In one whose name says "sleeping" the
last rank sleeps in every forward pass, and its messages are printed. Beside what a run leaves, the first process writes
how it wrapped the model, and with "parts" how far parts of matrices are from whole ones.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Trainer

from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM, LongNetLM, token_loss
from dilated_attention_pytorch.terminal import plain_console
from dilated_attention_pytorch.training import TrainSettings, resume, run_trainer, train
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.distribution import Distribution, leaving_together
from dilated_attention_pytorch.training.optimizer import ShardedMuon
from dilated_attention_pytorch.training.tensor_parallel import order_of, row_orders, split_matrices
from training.runs import quiet, stopped_run


def small_settings(texts: Path, **changes: Any) -> TrainSettings:
    """Grouped heads, groups below, at and above the rows of a process, and a length that 4 processes do not divide."""
    recomputing, dropout = changes.pop("recomputing", False), changes.pop("dropout", 0.0)
    embed_dim, ffn_dim = changes.pop("widths", (32, 56))
    model = LongNetConfig(
        embed_dim=embed_dim,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=ffn_dim,
        segment_lengths=(13, 48, 97),
        dilation_rates=(1, 2, 3),
        layer_segment_shifts=(0, 24),
        gradient_checkpointing=recomputing,
        dropout=dropout,
    )
    given: dict[str, Any] = {
        "model": model, "data": (texts,), "context_length": 97, "steps": 20, "batch_size": 2, "threads": 1,
        "optimizer": "adamw", "precision": "float32", "device": "cpu", "log_steps": 1, "eval_steps": 10,
        "eval_windows": 5, "final_eval_windows": 7, "quarter_files": 2, "save_steps": 10, "sample_length": 9,
        **changes,
    }  # fmt: skip
    return TrainSettings(**given)


def _sleep_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Trainer.compute_loss

    def sleep_and_compute(self: Trainer, *args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return compute(self, *args, **options)

    monkeypatch.setattr(Trainer, "compute_loss", sleep_and_compute)


def _record_wrapping(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    wrap = Distribution.wrap

    def wrap_and_record(self: Distribution, model: LongNetForCausalLM, *on_gradients: Any) -> nn.Module:
        wrapped = wrap(self, model, *on_gradients)
        weights = list(model.parameters())
        local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        record = {
            "type": type(wrapped).__name__,
            "weights": sum(map(torch.numel, weights)),
            "local_weights": sum(map(torch.numel, local)),
        }
        if dist.get_rank() == 0:
            (folder / "wrapped.json").write_text(json.dumps(record))
        return wrapped

    monkeypatch.setattr(Distribution, "wrap", wrap_and_record)


def _record_muon(folder: Path) -> None:
    """The largest difference between Muon's steps with whole matrices and with parts of them."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(4, 11))]
    parts = [nn.Parameter(distribute_tensor(weight.detach().clone(), mesh, [Shard(0)])) for weight in whole]
    options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    muon, sharded = torch.optim.Muon(whole, **options), ShardedMuon(parts, **options)
    for _ in range(3):
        for weight, part in zip(whole, parts, strict=True):
            weight.grad = torch.randn_like(weight)
            part.grad = distribute_tensor(weight.grad.clone(), mesh, [Shard(0)])
        muon.step()
        sharded.step()
        sharded.load_state_dict(copy.deepcopy(sharded.state_dict()))
    difference = max(float((a - b.full_tensor()).abs().max()) for a, b in zip(whole, parts, strict=True))
    if dist.get_rank() == 0:
        (folder / f"muon-{dist.get_world_size()}.json").write_text(json.dumps(difference))


def _record_split(folder: Path) -> None:
    """The largest difference of logits and gradients between a model and its matrices split, in float64."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    differences = []
    for changes in ({"activation": "gelu"}, {"tie_embeddings": False, "num_kv_heads": 4}):
        torch.manual_seed(0)
        config = LongNetConfig(
            **{
                "vocab_size": 28,
                "embed_dim": 48,
                "num_layers": 2,
                "num_heads": 8,
                "ffn_dim": 20,
                "segment_lengths": (7, 23),
                "dilation_rates": (1, 3),
                "offset_rule": "block",
                **changes,
            }
        )
        model = LongNetLM(config).double()
        split = copy.deepcopy(model)
        orders = row_orders(config, size)
        split_matrices(split, mesh)
        ids = torch.randint(28, (2, 31))
        expected, found = model(ids), split(ids)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        differences.append(float((expected - found).detach().abs().max()))
        for (name, whole), part in zip(model.named_parameters(), split.parameters(), strict=True):
            assert whole.grad is not None
            assert isinstance(part.grad, DTensor)
            order = order_of(name, orders)
            grad = whole.grad if order is None else whole.grad[order]
            differences.append(float((grad - part.grad.full_tensor()).abs().max()))
    if dist.get_rank() == 0:
        (folder / f"split-{size}.json").write_text(json.dumps(max(differences)))


def _flip_a_bit(run: Path) -> None:
    latest = latest_checkpoint(run)
    assert latest is not None
    weights = latest / "model.safetensors"
    dist.barrier()
    if dist.get_rank() == 0:
        found = bytearray(weights.read_bytes())
        found[-1] ^= 1
        weights.write_bytes(found)
    dist.barrier()


def _record_averages(folder: Path, texts: Path) -> None:
    """Steps in which gradients of the same rows and weights were averaged to other bits than in the first."""
    settings = small_settings(texts)
    torch.manual_seed(0)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    wrapped = Distribution(settings, "cpu").wrap(model)
    torch.manual_seed(1 + dist.get_rank())
    rows = torch.randint(256, (2, 97))
    gradients = []
    for _ in range(4):
        model.zero_grad()
        wrapped(input_ids=rows, labels=rows).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    other = [step for step, found in enumerate(gradients) if not all(map(torch.equal, found, gradients[0]))]
    if dist.get_rank() == 0:
        (folder / f"averages-{dist.get_world_size()}.json").write_text(json.dumps(other))


def main() -> None:
    """Do them."""
    folder, texts, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    # One process has all logits at once, these a block of rows' at a time.
    token_loss.LOGITS_AT_ONCE, token_loss.LEAST_ROWS = 256 * 30, 1
    with leaving_together():
        for name, changes, stop in cases:
            settings = small_settings(texts, **changes)
            with pytest.MonkeyPatch.context() as monkeypatch:
                _record_wrapping(monkeypatch, folder / name)
                if "sleeping" in name and dist.get_rank() == dist.get_world_size() - 1:
                    _sleep_in_forward(monkeypatch)
                if "overflowing" in name:
                    monkeypatch.setattr(run_trainer, "_SCALE", 2.0**40)
                if stop is None:
                    train(settings, folder / name, plain_console() if "sleeping" in name else quiet())
                else:
                    stopped_run(monkeypatch, settings, folder / name, stop)
                    if "damaged" in name:
                        _flip_a_bit(folder / name)
                    torch.manual_seed(12345)
                    resume(folder / name, quiet())
        if "parts" in sys.argv[4:]:
            _record_muon(folder)
            _record_split(folder)
            _record_averages(folder, texts)


if __name__ == "__main__":
    main()
