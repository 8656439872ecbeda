"""Conversion of a run's settings to transformers' ``TrainingArguments``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from .extension_settings import ExtensionSettings
from .settings import TrainSettings

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}


def arguments(settings: TrainSettings | ExtensionSettings, run: Path, device: str, **own: Any) -> TrainingArguments:
    """A run's settings as ``TrainingArguments``; ``own`` overrides single arguments."""
    if device == "cpu":
        # accelerate imports DeepSpeed if installed, which warns on machines without a GPU unless told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    falling: dict[str, Any] = {}
    if settings.schedule == "wsd":
        falling = {"num_decay_steps": max(1, round(settings.decay_fraction * settings.steps)), "decay_type": "linear"}
    args = TrainingArguments(
        output_dir=str(run),
        max_steps=settings.steps,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.schedule],
        lr_scheduler_kwargs=falling,
        warmup_steps=round(settings.warmup_fraction * settings.steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision in ("bfloat16", "float8"),
        fp16=settings.precision == "float16",
        tf32=settings.precision == "tf32" if device == "cuda" else None,
        use_cpu=device == "cpu",
        seed=settings.seed,
        train_sampling_strategy="sequential",  # the windows are already drawn at random
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=settings.save_steps,
        dataloader_pin_memory=device == "cuda",
        report_to=[],
        disable_tqdm=True,
        **own,
    )
    # A process uses one device; transformers would spread batches over all visible ones.
    args._n_gpu = min(1, args.n_gpu)
    return args
