"""Attention modules of earlier packages whose signatures differ from the current ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.nn import DilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.parallel import RingMultiheadDilatedAttention

from . import table
from .keywords import instead_of_speed, set_tf32


class ImprovedDilatedAttention(DilatedAttention):
    """:class:`DilatedAttention` with the old argument ``use_tf32``, see :func:`create_dilated_attention`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        use_tf32: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, **options)
        set_tf32(use_tf32)


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """:class:`MultiheadDilatedAttention` with an earlier package's arguments.

    Args:
        embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias: as of the current class.
        layer_norm, layer_norm_eps, gamma_init: now ``sub_layernorm``, ``layernorm_eps`` and ``gain``; there is a
            LayerNorm unless ``layer_norm=False``.
        use_tf32: see :func:`create_dilated_attention`.
        options: keywords of the current class.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        use_tf32: bool | None = None,
        **options: Any,
    ) -> None:
        today = {"sub_layernorm": layer_norm, "layernorm_eps": layer_norm_eps, "gain": gamma_init}
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias=bias, **(today | options))
        set_tf32(use_tf32)


class RingAdvancedDistributedDilatedAttention(ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention):
    """:class:`parallel.RingMultiheadDilatedAttention` with the options of an earlier package.

    Args:
        embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm, layer_norm_eps, gamma_init,
            use_tf32: as of :class:`ImprovedMultiheadDilatedAttention`.
        ring_size, mesh, device, dtype: as of the current class.
        sequence_parallel: shard rows; must be True.
        model_parallel: also split heads, along the second axis of ``mesh``, which must have two.
        overlap_communication: overlap communication with computation; must be True, as it always does.
        compile_model: call the module's ``compile()``.
        of_training: options of a training run (data parallelism, DeepSpeed, checkpoints, restarts, monitoring), which
            do not belong to a module. None, False and 0 are ignored, and so are options that change the speed alone.

    Raises:
        ValueError: options that a module does not implement; lists all of them with their replacements.
        TypeError: an option that the old class does not have.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        ring_size: int | None = None,
        mesh: DeviceMesh | None = None,
        model_parallel: bool = False,
        sequence_parallel: bool = True,
        overlap_communication: bool = True,
        use_tf32: bool | None = None,
        compile_model: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **of_training: Any,
    ) -> None:
        of_speed = {option: of_training.pop(option) for option in [*of_training] if instead_of_speed(option)}
        instead = table.read()["of_training"]
        unknown = [option for option in of_training if option not in instead]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        asked = [f"{option}={value!r}: {instead[option]}" for option, value in of_training.items() if value]
        if model_parallel and (mesh is None or mesh.ndim != 2):
            asked.append(
                "model_parallel=True: mesh=init_device_mesh(device, (ring, heads)), whose second axis it splits"
            )
        if not sequence_parallel:
            asked.append("sequence_parallel=False: parallel.HeadParallelDilatedAttention splits heads alone")
        if not overlap_communication:
            asked.append("overlap_communication=False: leave it out, as the result is the same")
        if asked:
            raise ValueError(
                f"{type(self).__name__} is attention alone; leave out what the model, the run or the mesh carries out, "
                "and write instead:\n  " + "\n  ".join(asked)
            )
        sizes = (embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias)
        others: dict[str, Any] = {"ring_size": ring_size, "mesh": mesh, "device": device, "dtype": dtype, **of_speed}
        super().__init__(*sizes, layer_norm, layer_norm_eps, gamma_init, use_tf32=use_tf32, **others)
        if compile_model:
            self.compile()
