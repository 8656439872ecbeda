"""Programs of ranks: training runs over several processes, and what is recorded of them. See ``support.forked``."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Trainer

from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM, LongNetLM, token_loss
from dilated_attention_pytorch.terminal import plain_console
from dilated_attention_pytorch.training import RunError, TrainSettings, offload_files, resume, run_trainer, train
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.distribution import Distribution, leaving_together
from dilated_attention_pytorch.training.optimizer import ShardedMuon
from dilated_attention_pytorch.training.tensor_parallel import order_of, row_orders, split_matrices
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from dilated_attention_pytorch.training.zero import ZeroEngine
from training.runs import leave_out_figures, quiet, record_samples, small_settings, stop_after, stopped_run


def spread(folder: str, cases: list[tuple[str, dict[str, Any], int | None]], with_parts: bool) -> None:
    """Runs on ``folder/texts``, one after the other.

    A case is a name, changes of the settings, and a step to stop after and resume from. A run whose name says "damaged"
    finds a bit of its last checkpoint flipped when it is resumed, one that says "left" is not resumed, and one that
    says "broken" ends with the loss of its third step. One that says "overflowing" begins with a scale of the loss with
    which every gradient overflows in float16. In one that says "sleeping" the last rank sleeps in every forward pass,
    and its messages are printed. The first process writes how each run wrapped the model, and with parts how far parts
    of matrices are from whole ones.
    """
    place = Path(folder)
    # One process has all logits at once, these a block of rows' at a time.
    token_loss.LOGITS_AT_ONCE, token_loss.LEAST_ROWS = 256 * 30, 1
    offload_files.SUBGROUP = 700_000  # three groups of matrices
    leave_out_figures(pytest.MonkeyPatch())
    with leaving_together():
        for name, changes, stop in cases:
            with pytest.MonkeyPatch.context() as patch:
                _run(patch, small_settings(place / "texts", **changes), place / name, stop)
        if with_parts:
            _record_muon(place)
            _record_split(place)
            _record_averages(place)


def _run(patch: pytest.MonkeyPatch, settings: TrainSettings, run: Path, stop: int | None) -> None:
    _record_wrapping(patch, run)
    if "sleeping" in run.name and dist.get_rank() == dist.get_world_size() - 1:
        _sleep_in_forward(patch)
    if "overflowing" in run.name:
        patch.setattr(run_trainer, "_SCALE", 2.0**40)
    if settings.offload_folder is not None:
        _record_files(patch, settings.offload_folder, run)
    if "broken" in run.name:
        _break_loss(patch, 3)
        with pytest.raises(RunError) as raised:
            train(settings, run, quiet())
        if dist.get_rank() == 0:
            run.with_suffix(".txt").write_text(str(raised.value))
    elif stop is None:
        train(settings, run, plain_console() if "sleeping" in run.name else quiet())
    else:
        stopped_run(patch, settings, run, stop)
        if "damaged" in run.name:
            _flip_a_bit(run)
        if "left" not in run.name:
            torch.manual_seed(12345)
            resume(run, quiet())


def go_on(run: str, stop: int | None, changes: dict[str, Any], samples: str) -> None:
    """Resume a run, spread in another way, and stop it after a step; each process writes what it trains on."""
    with leaving_together(), pytest.MonkeyPatch.context() as patch:
        leave_out_figures(patch)
        record_samples(patch, Path(samples))
        if stop is not None:
            stop_after(patch, stop, signal.SIGINT)
        resume(Path(run), quiet(), changes)


def prolong(folder: str, cases: dict[str, dict[str, Any]]) -> None:
    """Runs of 4 steps that are then trained to 7, and the same runs with 7 steps at once."""
    place = Path(folder)
    leave_out_figures(pytest.MonkeyPatch())
    same = {"schedule": "constant", "warmup_fraction": 0.0, "save_steps": 3, "dropout": 0.1}
    with leaving_together():
        for name, changes in cases.items():
            run = train(small_settings(place / "texts", steps=4, **same, **changes), place / name, quiet()).run
            resume(run, quiet(), {"steps": 7})
            train(small_settings(place / "texts", steps=7, **same, **changes), place / f"{name} at once", quiet())


def train_and_stop(folder: str, texts: str, changes: dict[str, Any]) -> None:
    """A run whose last rank stops itself (SIGSTOP) in the backward pass of its third step.

    Every rank leaves what it said in ``folder/said-RANK.json``, the last one before it stops.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    said = Path(folder) / f"said-{rank}.json"
    compute_loss, done = LongNetTrainer.compute_loss, [0]

    def stop(grad: Tensor) -> None:
        said.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}))
        os.kill(os.getpid(), signal.SIGSTOP)

    def compute_and_stop(*args: Any, **options: Any) -> Any:
        loss = compute_loss(*args, **options)
        done[0] += 1
        if rank == size - 1 and done[0] == 3:
            loss.register_hook(stop)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        leave_out_figures(patch)
        patch.setattr(LongNetTrainer, "compute_loss", compute_and_stop)
        with pytest.raises(RunError) as raised:
            train(small_settings(Path(texts), **changes), Path(folder) / "run", quiet())
    said.write_text(json.dumps({"message": str(raised.value), "at": time.monotonic()}))


def _sleep_in_forward(patch: pytest.MonkeyPatch) -> None:
    compute = Trainer.compute_loss

    def sleep_and_compute(self: Trainer, *args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return compute(self, *args, **options)

    patch.setattr(Trainer, "compute_loss", sleep_and_compute)


def _break_loss(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let the loss of ``step`` become NaN in the second process."""
    compute = LongNetTrainer.compute_loss

    def compute_and_break(self: LongNetTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        is_broken = dist.get_rank() == 1 and self.state.global_step == step - 1
        return loss * math.nan if is_broken else loss

    patch.setattr(LongNetTrainer, "compute_loss", compute_and_break)


def _record_files(patch: pytest.MonkeyPatch, offloaded: Path, run: Path) -> None:
    """Write names and bytes of all files of ``offloaded`` after every step."""
    take = ZeroEngine.clip_and_step

    def take_and_record(self: ZeroEngine) -> float:
        norm = take(self)
        dist.barrier()
        if dist.get_rank() == 0:
            found = {str(path.relative_to(offloaded)): path.stat().st_size for path in offloaded.rglob("*.swp")}
            run.with_suffix(".json").write_text(json.dumps(found))
        return norm

    patch.setattr(ZeroEngine, "clip_and_step", take_and_record)


def _record_wrapping(patch: pytest.MonkeyPatch, run: Path) -> None:
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
            (run / "wrapped.json").write_text(json.dumps(record))
        return wrapped

    patch.setattr(Distribution, "wrap", wrap_and_record)


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
    hybrid = {"head_gates": True, "key_convolution": 3, "layer_scale_lengths": (5, 0)}
    for changes in ({"activation": "gelu"}, {"tie_embeddings": False, "num_kv_heads": 4, **hybrid}):
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


def _record_averages(folder: Path) -> None:
    """Steps in which gradients of the same rows and weights were averaged to other bits than in the first."""
    settings = small_settings(folder / "texts")
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
