"""How much each tile speaks for or against a score."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_times_input(score: Tensor, features: Tensor) -> Tensor:
    """The contribution of every tile to a score, ``c_t = sum_i x_ti d score / d x_ti``.

    A positive tile speaks for the score, a negative one against it. The sum over the tiles is the derivative of
    ``score(a x)`` by a at a = 1: the change of the score, to first order, per relative change of all features.

    Args:
        score: scalar, computed from the features. Its graph is kept, for further scores.
        features: ``[..., N, C]``, a leaf or not, with gradients.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: the score is not a scalar, or does not depend on the features.

    Source: Shrikumar, Greenside, Shcherbina and Kundaje 2016, arXiv 1605.01713; compared with DeepLIFT by Shrikumar,
    Greenside and Kundaje 2017, arXiv 1704.02685.

    >>> from dilated_attention_pytorch.slides import gradient_times_input
    >>> features = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)
    >>> gradient_times_input((features * torch.tensor([2.0, 1.0])).sum(), features)
    tensor([4., 5.])
    """
    if score.numel() != 1:
        raise ValueError(f"score must be one number, got {list(score.shape)}; call it for each score")
    if not score.requires_grad or not features.requires_grad:
        raise ValueError("score must be computed with gradients from features.requires_grad_(), got one without")
    (gradient,) = torch.autograd.grad(score.sum(), features, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise ValueError("score must be computed from features, got one that does not depend on them")
    return (gradient * features.detach()).sum(dim=-1)
