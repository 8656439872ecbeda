"""DeepSpeed's ZeRO engine: configuration, verification, and full states by weight name.

transformers would use accelerate's DeepSpeed plugin, which needs a GPU and with ``use_cpu`` silently becomes plain DDP.
So the engine is created here, and stepped like an optimizer. Its own checkpoints are pickles
of its classes and therefore unsafe to load; a run saves states gathered by weight name instead, as with all other
engines.
"""

from __future__ import annotations

import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.installation import importing
from dilated_attention_pytorch.machine import check_installed

from .offload_files import check_folder, file_options, load_operator, own_folder
from .settings import TrainSettings

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ZERO_STAGES: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage of each ``data_parallel`` setting."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_BUCKET = 500_000_000
"""Gradient bucket size in elements; DeepSpeed's default."""


def zero_stage(settings: TrainSettings) -> int:
    """The ZeRO stage, 1 to 3; 0 without DeepSpeed."""
    return ZERO_STAGES.get(settings.data_parallel, 0)


def check_zero_here(settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless this process can run DeepSpeed, if ``settings`` need it."""
    if not zero_stage(settings):
        return
    flag = f"--data-parallel {settings.data_parallel}"
    if "LOCAL_RANK" not in os.environ:
        raise RunError(
            f"{flag} runs under torchrun, with one process too; start it with torchrun --nproc-per-node 1 -m "
            "dilated_attention_pytorch train ..."
        )
    check_installed(flag, ("deepspeed",), "deepspeed")


def check_zero(settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless DeepSpeed supports ``settings``."""
    if not zero_stage(settings):
        return
    flag = f"--data-parallel {settings.data_parallel}"
    for name, value, fitting, reason in (
        (
            "optimizer",
            settings.optimizer,
            ("adamw",),
            "it steps one flat part of all weights, and only AdamW takes the same steps there",
        ),
        (
            "context-parallel",
            settings.context_parallel,
            (1,),
            "it splits states over processes that read other windows",
        ),
        ("tensor-parallel", settings.tensor_parallel, (1,), "it splits whole weights alone"),
        ("on-nan", settings.on_nan, ("stop",), "going back within a process would hand it the model a second time"),
        ("spike-deviations", settings.spike_deviations, (0,), "going back would hand it the model a second time"),
        (
            "precision",
            settings.precision,
            ("auto", "float32", "tf32", "bfloat16"),
            "it scales the loss itself, and leaves out batches whose gradients overflow",
        ),
        ("compile", settings.compile, (False,), "its hooks gather and release weights between the modules"),
    ):
        if value not in fitting:
            said = f"--{name}" if value is True else f"--{name} {value}"
            remedy = f"take --{name} {fitting[-1]}" if isinstance(fitting[-1], str) else "leave it out"
            raise RunError(f"{flag} does not go with {said}, as {reason}; {remedy}, or --data-parallel fsdp")


def check_offload(settings: TrainSettings, device: str) -> None:
    """Raise :class:`RunError` unless files can hold the states of ``--offload nvme``; returns without it.

    Compiles DeepSpeed's operator ``async_io`` if it has not been compiled on this machine: minutes.
    """
    if settings.offload_folder is None:
        return
    check_folder(settings.offload_folder)
    _deepspeed(device)
    load_operator()


def _deepspeed(device: str) -> Any:
    """The deepspeed package, configured for the device, since it prints its own detection otherwise."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    with importing("ZeRO", "deepspeed"):
        import deepspeed

    # Avoid compiling its shared-memory collective for CPUs; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def configuration(settings: TrainSettings, model: nn.Module, folder: Path | None) -> dict[str, Any]:
    """The DeepSpeed configuration; files of ``--offload nvme`` lie in ``folder``.

    Precision is not set: the model computes under autocast as in every other run.
    """
    stage = zero_stage(settings)
    # Stage 3 allocates a bucket of this size even for small models: 2 GB by default.
    bucket = min(_LARGEST_BUCKET, settings.model.num_parameters)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
    }
    if stage == 3:
        # Weights of norms, a thousandth of all, stay gathered.
        zero["stage3_param_persistence_threshold"] = 4 * settings.model.embed_dim
    if folder is not None:
        zero |= file_options(model, folder)
    elif settings.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": 1,
        # Steps are taken on request, with the gradients of all backward passes before.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        # torch's fused AdamW also runs on CPUs; DeepSpeed's CPU optimizer would have to be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }


class ZeroEngine(torch.optim.Optimizer):
    """A model sharded by DeepSpeed, with the interface of an optimizer.

    Args:
        engine: DeepSpeed's engine of model and optimizer.
        names: weight names of each parameter group.
        settings: settings of the run.
        folder: this process's files of ``--offload nvme``; deleted by :meth:`close`, or when Python ends.
    """

    def __init__(
        self, engine: DeepSpeedEngine, names: list[list[str]], settings: TrainSettings, folder: Path | None
    ) -> None:
        self.engine, self.names, self.settings = engine, names, settings
        self.stage = zero_stage(settings)
        self.close = weakref.finalize(self, _delete, folder)
        check_engine(engine, settings)
        super().__init__([{"params": [torch.zeros(())]}], {})
        # These are the groups that the engine steps with, so a schedule can set their rates.
        self.param_groups = self._stepped.param_groups
        self.state = self._stepped.state
        self._begin_states()

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainSettings, device: str) -> ZeroEngine:
        """Create an engine that shards ``model`` and ``optimizer`` in place."""
        name_of = {weight: name for name, weight in model.named_parameters()}
        names = [[name_of[weight] for weight in group["params"]] for group in optimizer.param_groups]
        deepspeed = _deepspeed(device)
        with ExitStack() as on_failure:
            folder = own_folder(settings)
            on_failure.callback(_delete, folder)
            options = configuration(settings, model, folder)
            if folder is not None:
                # Where fp16 is not supported, as on CPUs, the engine would read float32 weights back as bfloat16.
                deepspeed.zero.Init(module=model, config_dict_or_path=options)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
            wrapped = cls(engine, names, settings, folder)
            on_failure.pop_all()
        return wrapped

    def _begin_states(self) -> None:
        """Initialise moments to 0 before the first step: DeepSpeed expects them for all groups after the first."""
        for index, part in enumerate(self._parts):
            with self._in_memory(index, is_written=True):
                moments = {key: torch.zeros_like(part, requires_grad=False) for key in _MOMENTS}
                self.state[part] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        if self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _parts(self) -> list[Tensor]:
        """The flat partitions of all weights that this process steps."""
        zero = self.engine.optimizer
        parts: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return parts

    @contextmanager
    def _in_memory(self, index: int, *, is_written: bool) -> Iterator[None]:
        """While open, part ``index`` and its moments are in memory if they are kept in files; then written or not."""
        zero = self.engine.optimizer
        if self.settings.offload != "nvme" or not zero._swappable_optimizer_subgroup(index):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            if is_written:
                zero._optimizer_states_and_gradient_swap_out(index)
            else:
                zero._release_swap_buffers(index)

    def _pieces(self, index: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """The weights of a part of stage 3, and where this process's piece of each begins there, and its length."""
        begin = 0
        for weight in self.engine.optimizer.fp16_groups[index]:
            yield weight, begin, weight.partition_numel()
            begin += weight.partition_numel()

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        """The optimizer of this process's partitions."""
        stepped: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return stepped

    def clip_and_step(self) -> float:
        """Clip gradients and step unless one is not finite; returns the norm before clipping, then infinite."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """No-op: the engine clips and steps in one call, :meth:`clip_and_step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No-op: the engine zeroes gradients in its step."""

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every full weight by name, one at a time. A collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.settings.offload == "nvme":
            for name, _, weight in self._from_files(model, (None,)):
                yield name, weight
            return
        for name, weight in model.named_parameters():
            yield name, safe_get_full_fp32_param(weight) if self.stage == 3 else weight.detach()

    def moments(self, model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """Weight name, moment name, and full moment, one at a time. A collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.settings.offload == "nvme":
            for name, moment_name, moment in self._from_files(model, _MOMENTS):
                assert moment_name is not None
                yield name, moment_name, moment
            return
        for name, weight in model.named_parameters():
            for key in _MOMENTS:
                yield name, key, safe_get_full_optimizer_state(weight, key)

    def _from_files(self, model: nn.Module, keys: tuple[str | None, ...]) -> Iterator[tuple[str, str | None, Tensor]]:
        """Weight name, key, and full state, every file read once; key None: the weight. A collective."""
        zero, names = self.engine.optimizer, {weight: name for name, weight in model.named_parameters()}
        for index, part in enumerate(self._parts):
            with self._in_memory(index, is_written=False):
                for weight, begin, length in self._pieces(index):
                    for key in keys:
                        state = part.detach() if key is None else self.state[part][key]
                        here = state.narrow(0, begin, length).to(self.engine.device)
                        yield names[weight], key, zero._fp32_state_allgather(weight, here)

    def _set_pieces(self, model: nn.Module, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write this process's pieces of full moments by weight name, in stage 3.

        DeepSpeed's own ``safe_set_full_optimizer_state`` fails where a weight's size is not divisible by the number of
        processes (0.19.8).
        """
        names = {weight: name for name, weight in model.named_parameters()}
        for index, part in enumerate(self._parts):
            with self._in_memory(index, is_written=True):
                for weight, begin, length in self._pieces(index):
                    for key in _MOMENTS:
                        # The last processes' pieces end in padding.
                        values = states[names[weight]][key].flatten()[length * dist.get_rank() :][:length]
                        self.state[part][key].narrow(0, begin, values.numel()).copy_(values)

    def state_by_names(self, model: nn.Module) -> dict[str, Any]:
        """The full state in the format of :func:`get_optimizer_state_dict`, in the first process.

        A collective.
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
        """Load a state from :meth:`state_by_names`, before the first step."""
        from deepspeed.utils import safe_set_full_optimizer_state

        steps = next(iter(state["state"].values()))["step"]
        for part in self._parts:
            self.state[part]["step"].copy_(steps)
        if self.stage == 3:
            self._set_pieces(model, state["state"])
        else:
            for name, weight in model.named_parameters():
                for key in _MOMENTS:
                    safe_set_full_optimizer_state(weight, state["state"][name][key], key)
        loaded = {name: group for group in state["param_groups"] for name in group["params"]}
        for group, names in zip(self.param_groups, self.names, strict=True):
            group.update({key: value for key, value in loaded[names[0]].items() if key != "params"})


def _delete(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def check_engine(engine: nn.Module, settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless DeepSpeed shards the model at the requested stage and offload.

    Other wrappers would train as well, but with replicated states.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

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
    device = "nvme" if settings.offload == "nvme" else "cpu"
    wanted = (
        device if settings.offload != "none" else "none",
        device if settings.offload in ("parameters", "nvme") else "none",
    )
    actual = tuple(
        "none" if offload is None else OffloadDeviceEnum(offload.device).value
        for offload in (engine.zero_offload_optimizer(), engine.zero_offload_param())
    )
    if actual != wanted:
        raise RunError(
            f"--offload {settings.offload}: the engine keeps (optimizer states, weights) at {actual}, and {wanted} was "
            "asked for"
        )


def num_elements(module: nn.Module) -> int:
    """Number of weights of a module, including those sharded by ZeRO-3."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())
