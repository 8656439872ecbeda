"""A replacement for timm-style attention blocks (one ``qkv`` projection) that attends under a pattern."""

from __future__ import annotations

import copy
import inspect
import math
import warnings

import torch
from torch import Tensor, fx, nn

from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.nn.masks import check_causal, ignored_keys
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern

from .parts import NotReplaceable, as_leaf, check_parts, parts_of

_PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop")
_ARGUMENTS = ("attn_mask", "attn_bias", "is_causal")


class QkvReplacement(nn.Module):
    """The parts of a timm-style block around one softmax over ``s + log c``, with c the pattern's counts.

    ``proj_drop(proj(norm(attention(q_norm(q), k_norm(k), v))))`` with q, k and v of ``qkv(x)``. It holds the same
    submodule objects under the same names and in the same order, so state dicts are interchangeable and existing
    optimizers stay valid. :func:`replace_attention` installs it in a model.

    Args:
        replaced: the block: ``qkv`` an ``nn.Linear`` to three times the heads' width, ``proj`` an ``nn.Linear`` and
            ``num_heads``; optionally ``q_norm``, ``k_norm``, ``norm``, ``attn_drop``, ``proj_drop`` and ``scale``.
        pattern: attention pattern, see :func:`attend`.
        is_causal: make every call causal. A block that is itself causal stays causal.
        impl: see :func:`attend`.

    A block's parts do not determine what it computes. Therefore a copy of it with random weights is run on random
    inputs, in float64 on the CPU, and must equal softmax attention.

    Raises:
        NotReplaceable: a ValueError that gives the reason: a missing or unknown part (a position bias), an
            unknown argument of its forward, hooks, or a different result on the random inputs.
        TypeError: ``pattern`` is not a :class:`Pattern`.

    >>> from dilated_attention_pytorch.integrations import QkvReplacement
    >>> class Block(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.num_heads, self.qkv, self.proj = 4, torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
    ...     def forward(self, x):
    ...         q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    ...         heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ...         return self.proj(heads.transpose(1, 2).flatten(2))
    >>> attention = QkvReplacement(Block(), DilatedPattern([16, 64], [1, 4]))
    >>> attention(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    qkv: nn.Linear
    attn_drop: nn.Module | float
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module

    def __init__(self, replaced: nn.Module, pattern: Pattern, *, is_causal: bool = False, impl: Impl = "auto") -> None:
        super().__init__()
        if not isinstance(pattern, Pattern):
            raise TypeError(
                "pattern must be a pattern such as DilatedPattern([2048, 4096], [1, 2]), "
                f"got {pattern!r} of type {type(pattern).__name__}"
            )
        self.num_heads, self.head_dim, self.scale = _sizes(replaced)
        _check_arguments(replaced)
        check_parts(replaced, set(_PARTS), set())
        parts = parts_of(replaced)
        for name, part in parts.items():
            self.add_module(name, part)
        for name in ("q_norm", "k_norm", "norm", "proj_drop"):
            if name not in parts:
                self.add_module(name, nn.Identity())
        if "attn_drop" not in parts:
            self.attn_drop = vars(replaced).get("attn_drop", 0.0)
        self._check_attention_dropout()
        self.pattern = pattern
        self.is_causal = is_causal
        self.impl: Impl = impl
        self.training = replaced.training
        self.is_causal = _is_causal_by_itself(replaced, self) or is_causal

    def _check_attention_dropout(self) -> None:
        if not isinstance(self.attn_drop, (nn.Dropout, nn.Identity, int, float)):
            raise NotReplaceable(f"its attn_drop is a {type(self.attn_drop).__name__}, not an nn.Dropout")

    @property
    def dropout(self) -> float:
        """Attention dropout probability in training: that of ``attn_drop``."""
        if isinstance(self.attn_drop, nn.Dropout):
            return self.attn_drop.p
        return 0.0 if isinstance(self.attn_drop, nn.Module) else self.attn_drop

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, attn_bias: None = None
    ) -> Tensor:
        """Attend as the replaced block does.

        Args:
            x: ``[B, N, E]``.
            attn_mask: None; or the causal mask ``[N, N]`` or ``[1, 1, N, N]``, which makes the call causal; or a
                padding mask ``[B, 1, 1, N]`` or ``[1, 1, 1, N]``. As in ``scaled_dot_product_attention``, a bool mask
                is True where a key takes part; a float mask is 0 there, and -inf or the dtype's minimum elsewhere.
            is_causal: a row attends only to itself and earlier rows.
            attn_bias: must be None.

        Returns:
            ``[B, N, E]``. A row without keys gives ``proj`` of zeros.

        Raises:
            NotImplementedError: another mask, or a bias.
            ValueError: wrong dimensions.
        """
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x, (attn_mask, is_causal), {"attn_bias": attn_bias})
        if x.dim() != 3 or x.shape[-1] != self.qkv.in_features:
            raise ValueError(f"x must be [batch, sequence, {self.qkv.in_features}], got shape {tuple(x.shape)}")
        if attn_bias is not None:
            raise NotImplementedError("attn_bias must be None: attention under a pattern has no score bias")
        batch, rows, _ = x.shape
        padding = None
        if attn_mask is not None:
            padding = _padding(attn_mask, batch, rows)
            is_causal = is_causal or padding is None
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        # Normalised in the block's layout [B, H, N, D]; under autocast the result may be float32.
        q = self.q_norm(q.transpose(1, 2)).transpose(1, 2).to(v.dtype)
        k = self.k_norm(k.transpose(1, 2)).transpose(1, 2).to(v.dtype)
        heads = attend(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal or is_causal,
            scale=self.scale,
            key_padding_mask=padding,
            dropout_p=self.dropout if self.training else 0.0,
            heads_first=False,
            impl=self.impl,
        )
        return self.proj_drop(self.proj(self.norm(heads.flatten(2))))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, pattern={self.pattern}, is_causal={self.is_causal}"


def _padding(attn_mask: Tensor, batch: int, rows: int) -> Tensor | None:
    """A padding mask as bool ``[B, N]``, True = ignore; None for the causal mask.

    Raises:
        NotImplementedError: any other mask.
    """
    hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    if attn_mask.shape in ((batch, 1, 1, rows), (1, 1, 1, rows)):
        return ignored_keys(hidden).expand(batch, 1, 1, rows).reshape(batch, rows)
    try:
        check_causal(hidden[0, 0] if attn_mask.shape == (1, 1, rows, rows) else hidden, rows, rows)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"attn_mask can be the causal mask {[rows, rows]}, or a key padding mask {[batch, 1, 1, rows]} (in "
            "NaFlexViT use_key_only_attn_mask=True), as the pattern says which keys a query attends to; got "
            f"{list(attn_mask.shape)}"
        ) from error
    return None


def _sizes(block: nn.Module) -> tuple[int, int, float]:
    """Number of heads, head dimension and scale of the scores."""
    parts = parts_of(block)
    for name in ("qkv", "proj"):
        if not isinstance(parts.get(name), nn.Linear):
            raise NotReplaceable(f"its {name} is a {type(parts.get(name)).__name__}, not an nn.Linear")
    qkv, proj = block.get_submodule("qkv"), block.get_submodule("proj")
    assert isinstance(qkv, nn.Linear)
    assert isinstance(proj, nn.Linear)
    num_heads = vars(block).get("num_heads")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise NotReplaceable(f"its num_heads must be a positive integer, got {num_heads!r}")
    if qkv.out_features % (3 * num_heads) or qkv.out_features != 3 * proj.in_features:
        raise NotReplaceable(
            f"its qkv has {qkv.out_features} outputs, which are not three times {num_heads} heads that make up the "
            f"{proj.in_features} inputs of its proj"
        )
    head_dim = qkv.out_features // (3 * num_heads)
    scale = vars(block).get("scale", 1.0 / math.sqrt(head_dim))
    if not isinstance(scale, float):
        raise NotReplaceable(f"its scale must be a float, got {type(scale).__name__}")
    return num_heads, head_dim, scale


def _check_arguments(block: nn.Module) -> None:
    rows, *others = inspect.signature(type(block).forward).parameters.values()
    del rows  # self
    unknown = [argument.name for argument in others[1:] if argument.name not in _ARGUMENTS]
    if not others or unknown:
        raise NotReplaceable(
            f"its forward takes {', '.join(unknown) or 'nothing'}; known are the rows x, then {', '.join(_ARGUMENTS)}"
        )
    by_place = [argument.name for argument in others[1:] if argument.kind is not inspect.Parameter.KEYWORD_ONLY]
    if by_place not in ([], ["attn_mask"], ["attn_mask", "is_causal"], ["attn_bias"]):
        raise NotReplaceable(
            f"its forward takes {', '.join(by_place)} in this order; known are attn_mask and then is_causal"
        )
    if any(argument.name == "is_causal" and argument.default is not False for argument in others):
        raise NotReplaceable("its forward is causal by default, and is_causal=False in a call would have no effect")


@torch.no_grad()
def _is_causal_by_itself(block: nn.Module, replacement: QkvReplacement) -> bool:
    """Whether a block is causal, determined by comparing a copy of it with dense attention.

    Raises:
        NotReplaceable: its result is neither dense nor causal softmax attention of its parts.
    """
    num_rows = 31
    generator = torch.Generator().manual_seed(0)

    try:
        # Copied together, so that the copies share parts as the originals do. Random weights, as initial values may
        # hide differences.
        theirs, ours = copy.deepcopy((block, replacement))
        theirs.to_empty(device="cpu").to(torch.float64).eval()
        ours.eval()
        for parameter in theirs.parameters():
            bound = math.sqrt(3 / parameter.shape[-1]) if parameter.dim() > 1 else 1.0
            parameter.uniform_(-bound, bound, generator=generator)
        shape = (2, num_rows, ours.qkv.in_features)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        with warnings.catch_warnings(action="ignore"):
            result = theirs(x)
            for dropout in theirs.modules():
                if isinstance(dropout, nn.Dropout):
                    dropout.p = 0.0
            if "attn_drop" in vars(theirs):
                vars(theirs)["attn_drop"] = 0.0
            in_training = theirs.train()(x)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # Foreign code may raise any of these on inputs that it was not written for.
        raise NotReplaceable(f"a trial of its forward on rows [2, {num_rows}, E] failed: {error}") from error
    are_tensors = isinstance(result, Tensor) and isinstance(in_training, Tensor)
    if are_tensors and not torch.allclose(in_training, result, rtol=1e-9, atol=1e-9):
        raise NotReplaceable(
            "in training mode it computes something else on random inputs than in eval, apart from attn_drop and "
            "proj_drop: unknown dropout"
        )
    if are_tensors and result.shape == (2, num_rows, ours.proj.out_features):
        ours.pattern, ours.impl = DilatedPattern([num_rows], [1]), "reference"
        for is_causal in (False, True):
            ours.is_causal = is_causal
            if torch.allclose(ours(x), result.to(torch.float64), rtol=1e-4, atol=1e-4):
                return is_causal
    raise NotReplaceable(
        "on random inputs it does not equal softmax attention of its qkv and proj; it computes something else"
    )
