"""The package as a whole: what its import needs, which way imports point, which names are public."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch import legacy
from dilated_attention_pytorch.installation import install_command

PACKAGE = Path(dilated_attention_pytorch.__file__).parent
ORDER = ["patterns", "planning", "kernels", "engine", "ops"]
# What each part may import, beside itself.
ALLOWED = {
    **{name: {*ORDER[:index], "installation", "folders", "precision", "tracing"} for index, name in enumerate(ORDER)},
    "selection": {"patterns", "planning", "ops", "data_sheets", "machine", "memory", "errors", "folders"},
    "nn": {*ORDER, "precision", "selection", "tracing"},
    "models": {*ORDER, "nn", "installation"},
    "errors": set(),
    "data_sheets": set(),
    "folders": set(),
    "precision": set(),
    "tracing": set(),
    "installation": set(),
    "machine": {"errors", "installation"},
    "memory": {"errors"},
    "output": {"errors"},
    "waiting": set(),
    "parallel": {*ORDER, "nn", "precision", "selection"},
    "integrations": {*ORDER, "nn", "models", "installation"},
    "training": {
        *ORDER,
        "nn",
        "models",
        "parallel",
        "integrations",
        "errors",
        "folders",
        "machine",
        "memory",
        "output",
    },
    "benchmarks": {*ORDER, "nn", "precision", "models", "errors", "machine", "memory", "output"},
    "cli": {
        *ORDER,
        "nn",
        "models",
        "errors",
        "installation",
        "machine",
        "memory",
        "output",
        "selection",
        "training",
        "benchmarks",
        "capacity",
        "data_sheets",
        "waiting",
    },
    "capacity": {"data_sheets", "errors", "models", "patterns", "training"},
    "core": {"nn"},
    "legacy": {"core", "nn", "parallel", "selection"},
    "__init__": {"legacy", "models", "nn", "ops", "patterns", "selection", "waiting"},
    "__main__": {"cli"},
}
PUBLIC = {
    "AdaptiveBlockAttention", "AttentionOutput", "DilatedAttention", "DilatedPattern", "DynamicDilatedAttention",
    "DynamicMultiheadDilatedAttention", "DynamicSegmentSelector", "LongNetCache", "LongNetConfig",
    "LongNetForCausalLM", "LongNetLM", "MultiheadDilatedAttention", "MultiheadPatternAttention", "Pattern",
    "PatternAttention", "PatternSum", "SegmentSelectionConfig", "SegmentedPattern", "attend", "attend_with_lse",
    "dilated_attention", "from_block_mask", "generate", "global_tokens", "hierarchical", "local_window", "merge",
    "per_head", "random_blocks", "strided_blocks",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(dilated_attention_pytorch.__all__) == PUBLIC - {"LongNetForCausalLM"}
    assert all(getattr(dilated_attention_pytorch, name).__doc__ for name in PUBLIC)


def imported_parts(file: Path) -> set[str]:
    """Parts of the package that a module imports, relative imports resolved."""
    name = "dilated_attention_pytorch"
    inside = (name, *file.relative_to(PACKAGE).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else ()
            path = [*base, *(node.module.split(".") if node.module else [])]
            found |= {(*path, alias.name)[:2] for alias in node.names} if path == [name] else {tuple(path[:2])}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")[:2]) for alias in node.names}
    return {path[1] for path in found if len(path) == 2 and path[0] == name}


def test_imports_point_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        parts = imported_parts(file) & set(ALLOWED)
        assert parts <= ALLOWED[part] | {part}, f"{file} imports {parts - ALLOWED[part] - {part}}"


IMPORT = """
import json, sys, time
class OnlyTorch:
    # What another finder finds, but for what the extras bring; no records of installations either.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "accelerate", "tyro", "rich", "matplotlib", "safetensors",
                                      "tensorboard", "triton", "hypothesis"}:
            return None
        return self.finder.find_spec(name, path, target)
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
sys.meta_path[:] = [OnlyTorch(finder) for finder in sys.meta_path]
before = set(sys.modules)
start = time.perf_counter()
import dilated_attention_pytorch
own = time.perf_counter() - start
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
for name in ("", "models", "nn", "ops", "patterns", "planning", "selection", "integrations", "parallel", "training"):
    exec(f"from {'.'.join(filter(None, ('dilated_attention_pytorch', name)))} import *")
from dilated_attention_pytorch.cli import main
main(["info"])
try:
    main(["show", "local_window(3)"])
except SystemExit as left:
    code = left.code
try:
    dilated_attention_pytorch.LongNetForCausalLM
    error = ""
except ImportError as raised:
    error = str(raised)
print(json.dumps([torch_seconds, own, sorted(roots), error, code]))
"""


def test_a_cold_import_star_imports_and_info_need_torch_alone(figure: Any) -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    *info, last = run.stdout.splitlines()
    torch_seconds, own, roots, error, code = json.loads(last)
    assert set(roots) <= {"dilated_attention_pytorch", "torch"}
    assert install_command("train") in error
    assert any(line.split()[:2] == ["transformers", "not"] for line in info)
    assert info[-1] == f"an extra is installed with: {install_command('train')}"
    assert code == 2
    assert f"the command needs tyro, not installed here: {install_command('train')}" in run.stderr
    figure("import, seconds beyond torch's own", f"{own:.3f} (torch {torch_seconds:.2f})")


@pytest.mark.parametrize("row", legacy.TABLE, ids=lambda row: ".".join(filter(None, row[:2])))
def test_old_names_import_with_a_warning_that_names_todays(row: tuple[str, ...]) -> None:
    module, name, _, _, today = row
    path = ".".join(part for part in ("dilated_attention_pytorch", module) if part)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scope: dict[str, Any] = {}
        exec(f"from {path} import {name} as old", scope)
    messages = {str(warning.message) for warning in caught if warning.category is DeprecationWarning}
    (message,) = messages
    assert message.startswith(f"{path}.{name} is the old name")
    statement = message.split("`")[1]
    exec(statement, scope)
    new = scope[today.rpartition(".")[2]]
    assert scope["old"] is new or issubclass(scope["old"], new)


def test_old_calls_run() -> None:
    import torch

    from dilated_attention_pytorch import core

    before = torch.get_float32_matmul_precision()
    try:
        attention = core.create_dilated_attention("auto", segment_lengths=[4], dilation_rates=[1], use_tf32=True)
        assert torch.get_float32_matmul_precision() == "high"
        improved = legacy.ImprovedMultiheadDilatedAttention(
            embed_dim=8, num_heads=2, segment_lengths=[4], dilation_rates=[1], use_tf32=False
        )
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    x = torch.randn(1, 5, 8)
    assert improved(x, x, x)[0].shape == x.shape
    assert attention.segment_lengths == (4,)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FastestAttention'"):
        _ = dilated_attention_pytorch.FastestAttention
    with pytest.raises(ImportError):
        from dilated_attention_pytorch.improved_dilated_attention import Nothing  # noqa: F401


def test_today_s_function_is_not_hidden_by_the_old_module_of_its_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from dilated_attention_pytorch.dilated_attention import DilatedAttention
    assert DilatedAttention is dilated_attention_pytorch.DilatedAttention
    assert callable(dilated_attention_pytorch.dilated_attention)
