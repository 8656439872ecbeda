"""The trainers of both kinds of runs: of a LongNet, with its distribution, and of a model whose context is extended."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.compiler.config
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.models.token_loss import next_tokens, token_loss_of_hidden
from dilated_attention_pytorch.parent import end_worker_with_trainer

from .checkpoint import OPTIMIZER_NAME, SCHEDULER_NAME, fitting
from .data.run_data import RunData
from .data.windows import Window, WindowShare
from .distribution import Distribution
from .extension_settings import ExtensionSettings
from .finite import is_finite_everywhere
from .lifecycle import OpenRun
from .measures import ByteCount, bits_per_byte
from .optimizer import build_adamw, build_optimizer
from .row_logits import RowLogits
from .run_trainer import RunTrainer
from .settings import TrainSettings
from .zero import zero_stage

_EXTENSION_BETAS = (0.9, 0.999)
_GRAPHS_OF_PATTERNS = 8
"""Most graphs of the model under one set of patterns, for example of windows of other lengths."""


class LongNetTrainer(RunTrainer):
    """Trains a :class:`LongNetForCausalLM` in a run folder.

    Args:
        model: the model to train.
        args: see :func:`.run_trainer.training_arguments`.
        settings: settings of the run.
        distribution: this process's role.
        run: see :class:`RunTrainer`.
        data: data of the run.
        training: training samples, one per window of the longest length in a batch.
        evaluation: windows of the evaluations during training.
    """

    model: LongNetForCausalLM

    def __init__(
        self,
        *,
        model: LongNetForCausalLM,
        args: TrainingArguments,
        settings: TrainSettings,
        distribution: Distribution,
        run: OpenRun,
        data: RunData,
        training: Dataset[Window],
        evaluation: Dataset[Window],
    ) -> None:
        self.settings: TrainSettings = settings
        self.distribution = distribution
        self.stages = settings.stages_by_step
        self._collate = data.collate
        if settings.compile:
            # Beyond the limit PyTorch computes a function without compiling it; every drawn window has its own graphs.
            limit = _GRAPHS_OF_PATTERNS * (1 + len(set(self.stages.drawn)))
            torch.compiler.config.recompile_limit = max(limit, torch.compiler.config.recompile_limit)
        lengths = data.byte_lengths
        self.trained, self.evaluated = (None if lengths is None else ByteCount(lengths, args.device) for _ in range(2))
        super().__init__(
            model=model,
            args=args,
            settings=settings,
            run=run,
            training=training,
            evaluation=evaluation,
            data_collator=data.collate_held_out,
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """See :func:`build_optimizer`; called after sharding, since it steps this process's shards."""
        if self.optimizer is None:
            self.distribution.apply(self.model)
            self.optimizer = build_optimizer(self.model, self.settings)
        return self.optimizer

    def _wrap_model(
        self, model: torch.nn.Module, training: bool = True, dataloader: DataLoader[Window] | None = None
    ) -> torch.nn.Module:
        if not training or self.distribution.mesh is None or self.model_wrapped is not self.model:
            return super()._wrap_model(model, training, dataloader)
        # accelerate only applies autocast; it does not know the mesh.
        prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        prepared._is_accelerate_prepared = True
        if not zero_stage(self.settings):
            return self.distribution.wrap(prepared, self.own_time.mark)
        stepped = self.distribution.hand_over(prepared, self.create_optimizer())
        # Wrapped here, since accelerate would otherwise reload its state into groups of its own.
        wrapped: Any = self.accelerator.prepare_optimizer(stepped, device_placement=False)
        wrapped._is_accelerate_prepared = True
        self.optimizer = wrapped
        return stepped.engine

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        engine = self.distribution.engine
        if engine is None:
            return super()._clip_grad_norm(model)
        step = self.state.global_step + 1
        is_finite = is_finite_everywhere(*self._step_losses)
        if is_finite:
            self.guard.check_loss(self._step_losses)
        norm = torch.tensor(engine.clip_and_step() if is_finite else math.nan)
        if not norm.isfinite():
            self.guard.break_off(
                f"step {step} is not taken: NaN or infinity is in the losses or the gradients", batch_of=step
            )
        return norm

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        engine = self.distribution.engine
        return super()._weights() if engine is None else engine.weights(self.model)

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        engine = self.distribution.engine
        if engine is None:
            return super()._states()
        return ((f"{key} of {name}", moment) for name, key, moment in engine.moments(self.model))

    def get_train_dataloader(self) -> DataLoader[Window]:
        """The windows of this process's data-parallel group, in order."""
        return self._share(self.train_dataset, self._train_batch_size, self._collate, self.settings.workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Window]:
        """As :meth:`get_train_dataloader`; with equally many batches on every process."""
        windows = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._share(windows, self.args.eval_batch_size, self.data_collator)

    def _share(
        self, windows: Any, batch_size: int, collate: Callable[[list[Window]], Window], workers: int = 0
    ) -> DataLoader[Window]:
        share = WindowShare(windows, len(windows), self.distribution.data_rank, self.distribution.data_size)
        return DataLoader(
            share,
            batch_size,
            collate_fn=collate,
            pin_memory=self.args.dataloader_pin_memory,
            num_workers=workers,
            # Without one, every pass draws a seed from the generator of dropout: evaluations would change the training.
            generator=torch.Generator(),
            # Forking a process with running threads can deadlock.
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=partial(end_worker_with_trainer, os.getpid()),
        )

    # transformers counts the labels of all processes; these methods say how many hold the same ones.
    def get_cp_size(self) -> int:
        """Number of processes that share a sequence."""
        return self.distribution.context_size

    def get_tp_size(self) -> int:
        """Number of processes with the same rows."""
        return self.distribution.tensor_size

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate schedule of the settings, times the factor of each step's stage."""
        if self.lr_scheduler is None and self.stages.learning_rates:
            optimizer = self.optimizer if optimizer is None else optimizer
            schedule = super().create_scheduler(num_training_steps, optimizer)
            assert isinstance(schedule, LambdaLR)
            factors = [self._staged(factor) for factor in schedule.lr_lambdas]
            for group, rate in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = group["initial_lr"] = rate
            self.lr_scheduler = LambdaLR(schedule.optimizer, factors)
        return super().create_scheduler(num_training_steps, optimizer)

    def _staged(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: factor(step) * self.stages.learning_rate(step)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Context in which the model has the attention patterns of the step."""
        longnet, own = self.model.model, self.model.model.patterns
        longnet.patterns = self.distribution.own_patterns(self.stages.patterns_at(self.state.global_step)) or own
        try:
            yield
        finally:
            longnet.patterns = own

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of this process's rows, normalised by all labels: its mean over processes is the batch's loss."""
        rows = {**self.distribution.rows(inputs), "skip_logits": True}
        loss = super().compute_loss(model, rows, return_outputs, num_items_in_batch)
        counted = self.trained if model.training else self.evaluated
        if counted is not None:
            assert isinstance(loss, Tensor)
            assert num_items_in_batch is not None
            counted.add(loss * num_items_in_batch, inputs["labels"])
        return loss

    def begin_step(self, *, is_again: bool) -> None:
        """Start a step; bytes of a repeated step are counted once."""
        if self.trained is not None:
            self.trained.begin_step(is_again=is_again)

    def memory_remedy(self) -> str:
        """See :meth:`RunTrainer.memory_remedy`."""
        if self.settings.batch_size > 1:
            return (
                "resume with a smaller --batch-size, or start a new run with a smaller one and more "
                "--gradient-accumulation: a step takes the same windows"
            )
        if self.settings.max_tokens:
            return "start a new run with a smaller --max-tokens and more --gradient-accumulation"
        return "start a new run with --model.gradient-checkpointing or a shorter --context-length"

    def bits_per_byte(self, name: str, loss: float) -> float:
        """See :meth:`RunTrainer.bits_per_byte`; uses the bytes predicted since the previous entry."""
        counted = self.trained if name == "loss" else self.evaluated
        if counted is None:
            return super().bits_per_byte(name, loss)
        taken = self.accelerator.gather(counted.take())
        return bits_per_byte(taken, self.distribution.context_size * self.distribution.tensor_size)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Window],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all labels of all processes; nothing else is evaluated."""
        self.model.eval()
        # Gathering of sharded weights happens in the engine's forward.
        model = self.model if self.distribution.engine is None else self.distribution.engine.engine
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        count = torch.zeros_like(total)
        self.callback_handler.eval_dataloader = dataloader
        for batch in dataloader:
            inputs = self._prepare_inputs(batch)
            labels = self._get_num_items_in_batch([inputs], self.args.device)
            assert labels is not None
            with torch.no_grad():
                loss = self.compute_loss(model, inputs, num_items_in_batch=labels)
            total += loss * labels
            count += labels
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        mean = (self.accelerator.gather(total.unsqueeze(0)).mean() / count).item()
        share = dataloader.dataset
        assert isinstance(share, WindowShare)
        # transformers also returns no predictions if no metric needs them.
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": mean}, share.num_windows)  # type: ignore[arg-type]

    def exchanges_in_forward(self) -> bool:
        """Whether processes communicate in the forward pass."""
        split = self.distribution.is_sharded or self.distribution.engine is not None
        return split or self.distribution.attention is not None

    def weights_to_save(self) -> dict[str, Tensor]:
        """The full weights by name, in the first process. A collective."""
        if not self.distribution.is_sharded:
            return super().weights_to_save()
        return self.distribution.weights(self.model, everywhere=False)

    def optimizer_to_save(self) -> dict[str, Any]:
        """The full optimizer state by weight name, in the first process."""
        return self.distribution.optimizer_state(self.model, self._own_optimizer())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with fitting(checkpoint):
            state = torch.load(os.path.join(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
            self.distribution.load_optimizer_state(self.model, self._own_optimizer(), state)
            self.own_scheduler().load_state_dict(
                torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
            )
        self.set_learning_rates()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.run.start.has_random_states:
            super()._load_rng_state(checkpoint)
            self.distribution.share_random_states()
            return
        # Another number of processes needs new random states, which are the same in every resumption from this step.
        drawn = random.Random(f"{self.settings.seed}:{self.run.step}:{self.distribution.rows_rank}").getrandbits(63)
        torch.manual_seed(drawn)

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of :func:`build_optimizer`, without accelerate's wrapper."""
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        return self.optimizer.optimizer


class ExtensionTrainer(RunTrainer):
    """A run of a causal language model of transformers in a run folder; made as :class:`RunTrainer` is."""

    settings: ExtensionSettings
    logits: RowLogits | None = None
    """The parts of the model, for the loss of a block of rows at a time; None where it has to compute all."""

    def memory_remedy(self) -> str:
        """See :meth:`RunTrainer.memory_remedy`."""
        return "start a new run with --gradient-checkpointing, or fewer --batch-tokens and more --gradient-accumulation"

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with weight decay on the parameters that transformers decays: neither biases nor norms."""
        if self.optimizer is None:
            assert self.model is not None
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    groups[name in decayed].append(parameter)
            decays = {True: self.settings.weight_decay, False: 0.0}
            given = [{"params": groups[kind], "weight_decay": decays[kind]} for kind in (True, False)]
            self.optimizer = build_adamw(self.settings.optimizer, given, self.settings, _EXTENSION_BETAS)
        return self.optimizer

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean cross-entropy of a batch's labels; the returned outputs hold no logits."""
        if self.logits is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        output = self.logits.output
        vocab_size = self.logits.vocab_size
        # accelerate applies autocast in the model's own forward, which is bypassed here.
        with self.accelerator.autocast():
            hidden = self.logits.hidden(inputs["input_ids"])
            loss = token_loss_of_hidden(hidden, output, vocab_size, next_tokens(inputs["labels"]), num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss
