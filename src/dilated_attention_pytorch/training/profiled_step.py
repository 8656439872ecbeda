"""The profile of training steps of a new model in this process, by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.memory import check_training_memory
from dilated_attention_pytorch.machine import choose_device, set_threads
from dilated_attention_pytorch.output import check_free_folder, make_output, write_text

from .autocast import autocast
from .data.corpus import check_same_corpus
from .data.run_data import read_data, read_tokenizer, verify_tokenizer
from .optimizer import build_optimizer
from .preflight import check_optimizer, choose_precision
from .record import recorded, train_settings
from .settings import TrainSettings

TRACE_NAME, TABLE_NAME = "trace.json", "profile.txt"
_REMEDY = "name the --output of a `train` command"
_STEPS, _MOST_STEPS = 3, 100
_ROWS, _NAME_WIDTH = 15, 60


def profile_run(run: Path, output: Path, *, steps: int = _STEPS) -> str:
    """Profile steps of a run on its own data, with a new model in this process, by :mod:`torch.profiler`.

    Distribution, torch.compile, float8 and windows drawn at random are ignored.

    Args:
        run: run folder of `train`, finished or not.
        output: folder to create for the trace and the table.
        steps: number of profiled steps of one batch, after a warm-up step.

    Returns:
        The table: time and memory of the operators that take longest by themselves.

    Raises:
        RunError: the folder holds no run of `train`, the run's batch needs several processes, the data has changed,
            memory does not suffice, or the output is not free. Nothing is written.
    """
    check_free_folder(output)
    if not 1 <= steps <= _MOST_STEPS:
        raise RunError(f"profile: --steps must be from 1 to {_MOST_STEPS}, got {steps}")
    with recorded(run, "profile", _REMEDY) as record:
        settings = train_settings(record)
    if settings is None:
        raise RunError(f"profile takes steps of runs of `train`, and {run} is one of `extend`; {_REMEDY}")
    if settings.context_parallel > 1 or settings.tensor_parallel > 1 or settings.max_tokens:
        raise RunError(
            f"profile takes steps in one process, and {run} splits its sequences or matrices over several, or has "
            "batches of any length (--max-tokens); name another run"
        )
    device = choose_device(settings.device)
    choose_precision(settings.precision, device)
    check_optimizer(settings.optimizer)
    set_threads(settings.threads)
    check_training_memory(settings, device, 1)
    verify_tokenizer(run, record)
    data = read_data(settings, read_tokenizer(settings, run), lambda line: None)
    check_same_corpus(data.figures, record["corpus"], run)
    samples = data.training(settings.batch_size * settings.gradient_accumulation)
    batch = data.collate([samples[len(samples) - 1 - row] for row in range(settings.batch_size)])  # type: ignore[arg-type]
    torch.manual_seed(settings.seed)
    make_gradients, update = new_step(settings, dict(batch), device)
    is_cuda = device == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=True,
        acc_events=True,
    ) as profiler:
        for _ in range(1 + steps):
            make_gradients()
            update()
            if is_cuda:
                torch.cuda.synchronize()
            profiler.step()
    by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
    make_output(output)
    profiler.export_chrome_trace(str(output / TRACE_NAME))
    write_text(output / TABLE_NAME, table)
    return table


def new_step(
    settings: TrainSettings, batch: Mapping[str, Tensor], device: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two halves of a training step of a new model on one batch: its gradients, and the update of the weights."""
    from dilated_attention_pytorch.models import LongNetForCausalLM

    model = LongNetForCausalLM.from_longnet_config(settings.model)
    torch.nn.Module.to(model, device).train()
    optimizer = build_optimizer(model, settings)
    inputs = {name: value.to(device) for name, value in batch.items()}

    def make_gradients() -> None:
        with record_function("forward"), autocast(settings.precision, device):
            loss = model(**inputs, skip_logits=True).loss
        with record_function("backward"):
            loss.backward()

    def update() -> None:
        with record_function("optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    return make_gradients, update
