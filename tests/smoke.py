"""An installed package, by itself: run as a program where nothing but the package and torch is installed.

Its argument is an implementation of attention that must run here.
"""

import sys

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import DilatedPattern, LongNetConfig, LongNetLM, attend, generate, local_window


def run(impl: str) -> None:
    """Attention with its gradient, the implementation ``impl``, and a model that generates."""
    query = torch.randn(1, 300, 4, 16, dtype=torch.float64, requires_grad=True)
    pattern = DilatedPattern([32, 128], [1, 4]) + local_window(7)
    out = attend(query, query, query, pattern, is_causal=True)
    expected = attend(query, query, query, pattern, is_causal=True, impl="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(result.square().sum(), query)[0] for result in (out, expected)))
    single = query.detach().float()
    of_impl = attend(single, single, single, pattern, is_causal=True, impl=impl)
    torch.testing.assert_close(of_impl, expected.detach().float())
    model = LongNetLM(LongNetConfig(embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16], dilation_rates=[2]))
    tokens = list(generate(model.eval(), torch.tensor([[1, 2, 3]]), max_new_tokens=3))
    assert len(tokens) == 3
    print(f"dilated-attention {dilated_attention_pytorch.__version__} in {dilated_attention_pytorch.__file__}")


if __name__ == "__main__":
    run(sys.argv[1])
