"""Distribution of a run over processes: data x context x tensor parallelism on one device mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.estimate.batch import way_of
from dilated_attention_pytorch.models.causal_lm import LongNetForCausalLM
from dilated_attention_pytorch.models.longnet import document_positions
from dilated_attention_pytorch.parallel.groups import all_groups, as_long_as_all, wait_at_most
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.layout import Layout

from .settings import Strategy, TrainSettings
from .tensor_parallel import order_of, own_patterns, row_orders, split_matrices
from .zero import ZeroEngine, zero_stage

_AXES = ("data", "ring", "heads", "tensor")
_ROW_AXES = ("data", "ring", "heads")
"""Axes whose processes hold different rows of text: they share the weights and average gradients."""


class ContextAttention:
    """:func:`parallel.attend` as a model's attention function, for this process's rows of sequences of one length.

    Args:
        mesh: processes that share a sequence.
        strategy, layout: see :func:`parallel.attend`.
    """

    def __init__(self, mesh: DeviceMesh, strategy: Strategy, layout: Layout) -> None:
        self.mesh = mesh
        self.strategy = strategy
        self.layout = layout
        self.sequence_length: int | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        *,
        is_causal: bool,
        cu_seqlens: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """See :func:`attend`; all sequences have ``sequence_length`` rows in total."""
        return parallel.attend(
            query,
            key,
            value,
            pattern,
            mesh=self.mesh,
            strategy=self.strategy,
            layout=self.layout,
            sequence_length=self.sequence_length,
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            dropout_p=dropout_p,
            heads_first=False,
        )

    def previous_rows(self, rows: Tensor, count: int) -> tuple[Tensor, ...]:
        """See :func:`parallel.previous_rows`."""
        return parallel.previous_rows(
            rows, count, mesh=self.mesh, layout=self.layout, sequence_length=self.sequence_length
        )


class Distribution:
    """The processes of a run and their roles; trivial for a single process.

    Args:
        settings: settings of the run, compatible with the number of processes (:func:`preflight.check_processes`).
        device: "cpu" or "cuda".
    """

    def __init__(self, settings: TrainSettings, device: str) -> None:
        self.settings = settings
        self.context_size = settings.context_parallel
        self.tensor_size = settings.tensor_parallel
        self.mesh: DeviceMesh | None = None
        self.attention: ContextAttention | None = None
        self.engine: ZeroEngine | None = None
        self._orders = row_orders(settings.model, self.tensor_size) if self.tensor_size > 1 else {}
        self.data_size, self.data_rank = 1, 0
        if not dist.is_initialized() or (dist.get_world_size() == 1 and not zero_stage(settings)):
            return
        wait_at_most(settings.timeout)
        sequences = dist.get_world_size() // (self.context_size * self.tensor_size)
        shape = (sequences, self.context_size // settings.heads_parallel, settings.heads_parallel, self.tensor_size)
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=_AXES)
        self.data_size, self.data_rank = sequences, self.mesh.get_local_rank("data")
        if self.context_size > 1:
            context = self.mesh["ring"] if settings.heads_parallel == 1 else self.mesh["ring", "heads"]
            way = way_of(settings)
            self.attention = ContextAttention(context, way.strategy, way.layout)

    def describe(self) -> str:
        """Description to append to the number of devices; empty for a single process."""
        if self.mesh is None:
            return ""
        parts = [f"{self.data_size} data ({self.settings.data_parallel})"]
        if self.attention is not None:
            ways = f"{self.attention.strategy}, {self.attention.layout}"
            split = f", {self.settings.heads_parallel} of them over heads" if self.settings.heads_parallel > 1 else ""
            parts.append(f"{self.context_size} context ({ways}{split})")
        if self.tensor_size > 1:
            parts.append(f"{self.tensor_size} tensor")
        several = "" if self.mesh.size() == 1 else "es"
        return f" in {self.mesh.size()} process{several}: {' x '.join(parts)}"

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a part of the weights."""
        splits = self.settings.data_parallel in ("fsdp", "zero3")
        return self.mesh is not None and (splits or self.tensor_size > 1)

    @property
    def rows_rank(self) -> int:
        """Rank among the processes with different rows of text; equal along a tensor axis."""
        return 0 if self.mesh is None else dist.get_rank() // self.tensor_size

    def apply(self, model: LongNetForCausalLM) -> None:
        """Set the attention function of ``model`` and shard its weights as the settings say. In place, once."""
        if self.mesh is None:
            return
        if self.attention is not None:
            model.model.attention = self.attention
            model.model.previous_rows = self.attention.previous_rows
        if self.tensor_size > 1:
            split_matrices(model.model, self.mesh["tensor"])
        if self.settings.data_parallel == "fsdp":
            mesh = self.rows_mesh
            for block in model.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            assert isinstance(model, FSDPModule)

    def own_patterns(self, patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
        """The patterns of the heads that this process computes, of those of a whole model."""
        if self.mesh is None or self.tensor_size == 1:
            return patterns
        return own_patterns(patterns, self.settings.model, self.mesh["tensor"])

    def wrap(self, model: LongNetForCausalLM, on_gradients: Callable[[], None] = lambda: None) -> nn.Module:
        """``model`` for the training step, with gradients averaged over the processes.

        With ``ddp``, ``on_gradients`` is called before each gradient bucket is averaged.
        """
        if self.mesh is None or self.is_sharded:
            return model
        mesh = self.rows_mesh
        devices = None if mesh.device_type == "cpu" else [torch.accelerator.current_device_index()]
        wrapped = DistributedDataParallel(model, device_ids=devices, process_group=mesh.get_group())
        # DDP compares a hook's annotations with types; annotations of this module are strings.

        def average(group: dist.ProcessGroup, bucket):  # type: ignore[no-untyped-def]
            on_gradients()
            return _average_each(group, bucket)

        wrapped.register_comm_hook(mesh.get_group(), average)
        return wrapped

    def hand_over(self, model: LongNetForCausalLM, optimizer: torch.optim.Optimizer) -> ZeroEngine:
        """Create the DeepSpeed engine that shards and steps ``model`` and ``optimizer`` from now on."""
        assert self.mesh is not None
        self.engine = ZeroEngine.of(model, optimizer, self.settings, self.mesh.device_type)
        for group in all_groups():
            as_long_as_all(group)
        return self.engine

    def close(self) -> None:
        """Delete the files in which the engine keeps weights and states; they cannot be read from then on."""
        if self.engine is not None:
            self.engine.close()

    @functools.cached_property
    def rows_mesh(self) -> DeviceMesh:
        """The processes with different rows of text, including this one."""
        assert self.mesh is not None
        mesh = self.mesh[_ROW_AXES]._flatten("rows")
        as_long_as_all(mesh.get_group())
        return mesh

    def rows(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows of windows: tokens, next tokens, and positions."""
        if self.attention is None:
            return inputs
        mesh, layout = self.attention.mesh, self.attention.layout
        tokens = inputs["input_ids"]
        self.attention.sequence_length = tokens.shape[1]
        rows = {
            "input_ids": parallel.shard(tokens, mesh, layout=layout),
            "shift_labels": parallel.shard_labels(inputs["labels"], mesh, layout=layout),
            "position_ids": parallel.positions(tokens.shape[1], mesh, layout=layout, device=tokens.device),
        }
        if "cu_seqlens" in inputs:
            of_documents = document_positions(tokens.shape[1], inputs["cu_seqlens"], tokens.device)
            rows |= {"cu_seqlens": inputs["cu_seqlens"], "position_ids": of_documents[rows["position_ids"]]}
        return rows

    def share_random_states(self) -> None:
        """Give processes with the same rows the first one's random state, so that their dropout agrees.

        A checkpoint written by other processes may hold a different state for each.
        """
        if self.mesh is None or self.tensor_size == 1:
            return
        group = self.mesh["tensor"].get_group()
        device = self.mesh.device_type
        state = torch.get_rng_state().to(device)
        dist.broadcast(state, group=group, group_src=0)
        torch.set_rng_state(state.cpu())
        if device == "cuda":
            of_device = torch.cuda.get_rng_state().to(device)
            dist.broadcast(of_device, group=group, group_src=0)
            torch.cuda.set_rng_state(of_device.cpu())

    def weights(self, model: LongNetForCausalLM, *, everywhere: bool) -> dict[str, Any]:
        """The full weights by name: on every process's device, or on the CPU of the first process only."""
        if self.engine is not None:
            gathered = self.engine.weights(model)
            if everywhere:
                return {name: weight.clone() for name, weight in gathered}
            is_first = dist.get_rank() == 0
            return {name: weight.to("cpu", copy=True) for name, weight in gathered if is_first}
        weights = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
        )
        return {
            name: self._as_full(name, cast(Tensor, weight))
            for name, weight in weights.items()
            if name not in model.all_tied_weights_keys
        }

    def full_model(self, model: LongNetForCausalLM) -> LongNetForCausalLM:
        """An undistributed model with the full weights of ``model``, on every process."""
        if self.mesh is None:
            return model
        with torch.device("meta"):
            full = LongNetForCausalLM.from_longnet_config(self.settings.model)
        full.load_state_dict(self.weights(model, everywhere=True), assign=True)
        return full

    def optimizer_state(self, model: LongNetForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state of ``optimizer`` by weight name, on the first process only."""
        if self.engine is not None:
            return self.engine.state_by_names(model)
        state = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return _of_weights(state, self._as_full)

    def load_optimizer_state(
        self, model: LongNetForCausalLM, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load a state from :meth:`optimizer_state`.

        Raises:
            ValueError: the state belongs to other weights.
        """
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        grouped = {name for group in state["param_groups"] for name in group["params"]}
        if any(name.endswith("attention.in_proj_weight") for name in grouped):
            raise ValueError(
                "they are of an earlier version, in which query, key and value were one matrix: its weights can be "
                "read, but the optimizer's moments are not split; finish that run with that version"
            )
        for what, saved in (("states", state["state"].keys()), ("groups", grouped)):
            if saved != trained:
                differing = sorted(saved ^ trained)
                raise ValueError(f"the optimizer's {what} are of other weights: {differing[0]} is in one of them alone")
        if self.engine is not None:
            self.engine.load_state_by_names(model, state)
            return
        set_optimizer_state_dict(
            model,
            optimizer,
            optim_state_dict=_of_weights(state, self._as_split),
            options=StateDictOptions(full_state_dict=True),
        )

    def _as_full(self, name: str, tensor: Tensor) -> Tensor:
        order = order_of(name, self._orders)
        return tensor if order is None else torch.empty_like(tensor).index_copy_(0, order.to(tensor.device), tensor)

    def _as_split(self, name: str, tensor: Tensor) -> Tensor:
        order = order_of(name, self._orders)
        return tensor if order is None else tensor[order]


def _average_each(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average every gradient of a bucket separately over the processes of ``group``.

    With more than two processes, the order of summation depends on the position in the message. DDP rebuilds its
    buckets after the first step, so a resumed run would sum in a different order; single gradients are deterministic.
    """
    buffer, size = bucket.buffer(), group.size()
    sums = [
        dist.all_reduce(gradient.div_(size), group=group, async_op=True).get_future() for gradient in bucket.gradients()
    ]

    def sent(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> Tensor:
        for each in done.value():
            each.value()  # raises transport errors: a failed sum must not be used
        return buffer

    averaged: torch.futures.Future[Tensor] = torch.futures.collect_all(sums).then(sent)
    return averaged


def _of_weights(state: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """An optimizer state by weight name, with ``change`` applied to tensors of the weights' shapes."""
    changed = {
        name: {
            key: change(name, value) if isinstance(value, Tensor) and value.dim() else value
            for key, value in values.items()
        }
        for name, values in state.get("state", {}).items()
    }
    return {**state, "state": changed} if state else state


@contextmanager
def leaving_together() -> Iterator[None]:
    """On exit, wait for the other processes and destroy the process group."""
    yield
    if dist.is_initialized():
        # A process that closes connections while another still reads from them makes that one fail.
        dist.barrier()
        dist.destroy_process_group()
