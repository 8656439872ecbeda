"""Compare this tree with an earlier revision, bit for bit: ``PYTHONPATH=tests python tests/same_bits.py REVISION``.

Drawn calls of ``attend_with_lse`` (output, log-sum-exp and gradients, or the type of the error), a language model's
logits and gradients, its cached decoding, and a run of the earlier revision, resumed by this tree from its first
checkpoint. Both revisions use the draws of this tree, on this machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import given
from torch import Tensor

from support.drawn import DrawnCall, block_calls, calls, examples
from support.processes import TESTS, environment

ROOT = TESTS.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRAIN = (
    "train --preset tiny --steps 8 --save-steps 4 --eval-steps 8 --device cpu --threads 1 --precision float32 "
    "--model.dropout 0.1 --no-async-checkpoints"
)


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of tensors."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def digest_of_call(call: DrawnCall, impl: str, dtype: torch.dtype) -> str:
    from dilated_attention_pytorch import attend_with_lse

    *inputs, grad_out, grad_lse = call.tensors(dtype)
    leaves = [x.detach().requires_grad_() for x in inputs]
    try:
        found = attend_with_lse(
            *leaves, call.pattern, is_causal=call.is_causal, scale=call.scale, impl=impl, **call.options
        )
    except (NotImplementedError, ValueError) as error:
        return type(error).__name__
    grad_lse = grad_lse.masked_fill(~found.lse.isfinite(), 0.0).to(found.lse.dtype)
    torch.autograd.backward([found.out, found.lse], [grad_out, grad_lse])
    return digest(found.out, found.lse, *(leaf.grad for leaf in leaves if leaf.grad is not None))


def digests_of_calls(number: int) -> dict[str, str]:
    """Digests of ``number`` dilated calls and as many with other rules, of both implementations for CPUs."""
    found: dict[str, str] = {}

    def draw(kind: str) -> Callable[[DrawnCall], None]:
        def record(call: DrawnCall) -> None:
            dtype = DTYPES[call.seed % len(DTYPES)]
            for impl in ("native", "aten"):
                name = f"{kind} {len(found)} {impl} {dtype} {call.num_queries}x{call.num_keys}"
                found[name] = digest_of_call(call, impl, dtype)

        return record

    examples(number)(given(calls())(draw("dilated")))()
    examples(number)(given(block_calls())(draw("rules")))()
    return found


def digests_of_models() -> dict[str, str]:
    from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, generate
    from dilated_attention_pytorch.ops import implementation

    found = {}
    for impl in ("native", "aten"):
        torch.manual_seed(0)
        config = LongNetConfig(
            vocab_size=97, embed_dim=64, num_heads=4, num_layers=2, segment_lengths=(16, 64), dilation_rates=(1, 3)
        )
        model, tokens = LongNetLM(config), torch.randint(97, (2, 131))
        with implementation(impl):
            logits = model(tokens)
            logits.square().mean().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            found[f"model {impl}"] = digest(logits, *gradients)
            found[f"generation {impl}"] = digest(*generate(model.eval(), tokens, 20, temperature=0.0))
    return found


def in_revision(source: Path, words: list[str]) -> str:
    env = environment(PYTHONPATH=f"{source / 'src'}:{TESTS}", OMP_NUM_THREADS="2")
    return subprocess.run([sys.executable, *words], env=env, check=True, text=True, capture_output=True).stdout


def digest_of_run(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def resumed(earlier: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """The weights of a run of the earlier revision, and of its first checkpoint resumed by this tree."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("".join(f"line {number} of {line}\n" for line in range(4000)))
    whole, taken = folder / "whole", folder / "taken"
    command = ["-m", "dilated_attention_pytorch"]
    in_revision(earlier, [*command, *_TRAIN.split(), "--data", str(texts), "--output", str(whole)])
    shutil.copytree(whole, taken)
    for file in (taken / "model.safetensors", taken / "lease.json", taken / "report.html"):
        file.unlink(missing_ok=True)
    shutil.rmtree(taken / "checkpoint-8")
    in_revision(ROOT, [*command, "train", "--resume", str(taken)])
    return {"resumed run": (digest_of_run(whole), digest_of_run(taken))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="the earlier revision, as git names it; without: print digests")
    parser.add_argument("--calls", type=int, default=100, help="drawn calls of either kind, each by native and aten")
    parser.add_argument("--no-runs", action="store_true", help="compare no run")
    options = parser.parse_args()
    if options.revision is None:
        print(json.dumps(digests_of_calls(options.calls) | digests_of_models()))
        return
    with tempfile.TemporaryDirectory() as name:
        earlier = Path(name) / "earlier"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", earlier, options.revision], cwd=ROOT, check=True)
        try:
            words = [str(Path(__file__)), "--calls", str(options.calls)]
            before, after = (json.loads(in_revision(source, words)) for source in (earlier, ROOT))
            assert before.keys() == after.keys()
            pairs = {key: (before[key], after[key]) for key in before}
            if not options.no_runs:
                pairs |= resumed(earlier, Path(name))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=ROOT, check=True)
    different = [key for key, (first, second) in pairs.items() if first != second]
    refused = sum(len(first) < 64 for first, _ in pairs.values())
    print(f"{len(pairs)} compared, {refused} of them refused by both, {len(different)} differ")
    print(*different, sep="\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
