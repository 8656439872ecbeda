"""DeepSpeed's ZeRO as the engine of a run: its configuration, proof that it is in charge, and whole states by name.

transformers hands DeepSpeed to accelerate, whose plugin needs a GPU: with ``use_cpu`` it makes plain DDP of it, without
a word. So the engine is made here, and its steps are called as those of an optimizer. Its own checkpoints are pickles
of its classes, which nothing should load. A run saves what the engine gathers by the names of weights instead, as
every other run does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

from .settings import TrainSettings

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ZERO_STAGES: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""The stage of each choice of ``data_parallel`` that DeepSpeed carries out."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_BUCKET = 500_000_000
"""Elements of gradients that are averaged at once, DeepSpeed's own number."""


def zero_stage(settings: TrainSettings) -> int:
    """1, 2 or 3; 0 where DeepSpeed is not asked for."""
    return ZERO_STAGES.get(settings.data_parallel, 0)


def check_zero(settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless DeepSpeed can carry ``settings`` out here."""
    if not zero_stage(settings):
        return
    flag = f"--data-parallel {settings.data_parallel}"
    if "LOCAL_RANK" not in os.environ:
        raise RunError(
            f"{flag} runs under torchrun, with one process too; start it with torchrun --nproc-per-node 1 -m "
            "dilated_attention_pytorch train ..."
        )
    for name, value, fitting, reason in (
        ("optimizer", settings.optimizer, ("adamw",),
         "it steps one flat part of all weights, and only AdamW takes the same steps there"),
        ("context-parallel", settings.context_parallel, (1,),
         "it splits states over processes that read other windows"),
        ("tensor-parallel", settings.tensor_parallel, (1,), "it splits whole weights alone"),
        ("on-nan", settings.on_nan, ("stop",), "going back within a process would hand it the model a second time"),
        ("spike-deviations", settings.spike_deviations, (0,), "going back would hand it the model a second time"),
        ("precision", settings.precision, ("auto", "float32", "tf32", "bfloat16"),
         "it scales the loss itself, and leaves out batches whose gradients overflow"),
        ("compile", settings.compile, (False,), "its hooks gather and release weights between the modules"),
    ):  # fmt: skip
        if value not in fitting:
            said = f"--{name}" if value is True else f"--{name} {value}"
            remedy = f"take --{name} {fitting[-1]}" if isinstance(fitting[-1], str) else "leave it out"
            raise RunError(f"{flag} does not go with {said}, as {reason}; {remedy}, or --data-parallel fsdp")
    require(flag, ("deepspeed",), "deepspeed")


def _deepspeed(device: str) -> Any:
    """The package, told where to compute: it prints what it finds by itself."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    # torch renames collectives that DeepSpeed calls by their older names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    # It would compile a collective over shared memory for the processes of a CPU, which gloo carries out as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def configuration(settings: TrainSettings) -> dict[str, Any]:
    """What DeepSpeed is told. Precision is not its part: the model computes under autocast as in every other run."""
    stage = zero_stage(settings)
    # Stage 3 makes a bucket of this many elements however small the model is: 2 GB if it is not told.
    bucket = min(_LARGEST_BUCKET, settings.model.num_parameters)
    zero: dict[str, Any] = {
        "stage": stage, "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": bucket,
    }  # fmt: skip
    if stage == 3:
        # Weights of norms, a thousandth of all, are not gathered for every use.
        zero["stage3_param_persistence_threshold"] = 4 * settings.model.embed_dim
    if settings.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": 1,
        # A step is taken when it is asked for, with the gradients of all backward passes before it.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        # torch's fused AdamW steps on a CPU as on a GPU; DeepSpeed's own would have to be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }


class ZeroEngine(torch.optim.Optimizer):
    """A model whose states DeepSpeed has split, stepped as an optimizer is.

    Args:
        engine: what DeepSpeed made of model and optimizer.
        names: of the weights of each parameter group.
        settings: what it was told.
    """

    def __init__(self, engine: DeepSpeedEngine, names: list[list[str]], settings: TrainSettings) -> None:
        self.engine, self.names, self.settings = engine, names, settings
        self.stage = zero_stage(settings)
        check_engine(engine, settings)
        super().__init__([{"params": [torch.zeros(())]}], {})
        # A schedule sets the rates of these groups: they are those that the engine steps with.
        self.param_groups = self._stepped.param_groups
        self.state = self._stepped.state
        self._begin_states()

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainSettings, device: str) -> ZeroEngine:
        """Hand ``model`` and ``optimizer`` over to DeepSpeed, which splits them in place."""
        name_of = {weight: name for name, weight in model.named_parameters()}
        names = [[name_of[weight] for weight in group["params"]] for group in optimizer.param_groups]
        deepspeed = _deepspeed(device)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(settings))
        return cls(engine, names, settings)

    def _begin_states(self) -> None:
        """Moments of 0 before the first step: DeepSpeed looks for those of all groups after it has stepped one."""
        for part in self._parts:
            moments = {key: torch.zeros_like(part, requires_grad=False) for key in _MOMENTS}
            self.state[part] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        if self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _parts(self) -> list[Tensor]:
        """The flat parts of all weights that this process steps."""
        zero = self.engine.optimizer
        parts: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return parts

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        """The optimizer of this process's parts."""
        stepped: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return stepped

    def clip_and_step(self) -> float:
        """Scale gradients down as told and step, unless one is not finite; the norm that they had, then infinite."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the engine clips and steps in one call, :meth:`clip_and_step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine does it with its step."""

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every whole weight by its name, one after the other; all processes take part."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, weight in model.named_parameters():
            yield name, safe_get_full_fp32_param(weight) if self.stage == 3 else weight.detach()

    def moments(self, model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """Name of the weight, of the moment, and the whole moment, one after the other; all processes take part."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, weight in model.named_parameters():
            for key in _MOMENTS:
                yield name, key, safe_get_full_optimizer_state(weight, key)

    def state_by_names(self, model: nn.Module) -> dict[str, Any]:
        """The whole state, as :func:`get_optimizer_state_dict` gives that of other optimizers, in the first process.

        All take part.
        """
        steps = next(iter(self.state.values()))["step"].detach().to("cpu", copy=True)
        states: dict[str, dict[str, Tensor]] = {}
        for name, key, moment in self.moments(model):
            if dist.get_rank() == 0:
                states.setdefault(name, {"step": steps.clone()})[key] = moment.to("cpu", copy=True)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self.param_groups, self.names, strict=True)
        ]
        return {"state": states, "param_groups": groups}

    def load_state_by_names(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_by_names` gave, before the first step."""
        from deepspeed.utils import safe_set_full_optimizer_state

        steps = next(iter(state["state"].values()))["step"]
        for part in self._parts:
            self.state[part]["step"].copy_(steps)
        for name, weight in model.named_parameters():
            for key in _MOMENTS:
                safe_set_full_optimizer_state(weight, state["state"][name][key], key)
        told = {name: group for group in state["param_groups"] for name in group["params"]}
        for group, names in zip(self.param_groups, self.names, strict=True):
            group.update({key: value for key, value in told[names[0]].items() if key != "params"})


def check_engine(engine: nn.Module, settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless DeepSpeed is in charge of the model, at the stage and with the offload asked for.

    What wraps a model for other engines would train too, with all states in every process.
    """
    from deepspeed import DeepSpeedEngine

    stage, flag = zero_stage(settings), f"--data-parallel {settings.data_parallel}"
    if not isinstance(engine, DeepSpeedEngine) or engine.zero_optimization_stage() != stage:
        raise RunError(f"{flag}: the model was wrapped in {type(engine).__name__}, which is no ZeRO of stage {stage}")
    num_weights, num_processes = num_elements(engine.module), engine.dp_world_size
    zero = engine.optimizer
    parts = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    if stage == 3:
        kept = sum(weight.ds_tensor.ds_numel for weight in engine.module.parameters())
    else:
        kept = sum(part.numel() for part in parts)
    weights = list(engine.module.parameters())
    padding = (len(weights) if stage == 3 else len(parts)) * 2 * num_processes
    if kept > num_weights / num_processes + padding:
        raise RunError(f"{flag}: this process has {kept:,} of {num_weights:,} weights, more than its share")
    wanted = (settings.offload != "none", settings.offload == "parameters")
    found = tuple(
        offload is not None and offload.device == "cpu"
        for offload in (engine.zero_offload_optimizer(), engine.zero_offload_param())
    )
    if found != wanted:
        raise RunError(
            f"--offload {settings.offload}: the engine keeps (optimizer states, weights) on the CPU: {found}, and "
            f"{wanted} was asked for"
        )


def num_elements(module: nn.Module) -> int:
    """Weights of a module, those that ZeRO-3 has split included."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())
