"""Operations of attention: the one place that says how many a query-key pair takes."""

from __future__ import annotations

FORWARD_PRODUCTS = 2
"""Matrix products over the pairs in the forward pass: scores, and the weighted sum of values."""
BACKWARD_PRODUCTS = 5
"""Matrix products over the pairs in the backward pass, including the recomputation of the scores."""


def pair_flops(num_pairs: int, width: int, products: int = FORWARD_PRODUCTS) -> int:
    """Floating-point operations of matrix products over query-key pairs, ``2 x products x width x pairs``.

    Args:
        num_pairs: query-key pairs, over all query heads.
        width: width of a product, such as the head dimension D.
        products: number of products.

    >>> pair_flops(10, 64)
    2560
    """
    return 2 * products * width * num_pairs


def forward_flops(num_pairs: int, head_dim: int, value_dim: int) -> int:
    """Operations of a forward pass: the scores from rows of ``head_dim``, the sum of values of ``value_dim``.

    >>> forward_flops(10, 64, 64) == pair_flops(10, 64)
    True
    """
    return pair_flops(num_pairs, head_dim + value_dim, products=1)


def backward_flops(num_pairs: int, head_dim: int, value_dim: int) -> int:
    """Operations of a backward pass: the scores again, and the gradients of scores, query, key and value.

    >>> backward_flops(10, 64, 64) == pair_flops(10, 64, BACKWARD_PRODUCTS)
    True
    """
    return pair_flops(num_pairs, 3 * head_dim + 2 * value_dim, products=1)
