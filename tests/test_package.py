"""The package as a whole: what its import needs, which way imports point, which names are public."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch.installation import NAME, install_command
from test_surface import ROOMS, module_of, public_names

PACKAGE = Path(dilated_attention_pytorch.__file__).parent
ROOT = Path(__file__).parents[1]
ORDER = ["patterns", "plan", "kernels", "ops"]
# What each part may import, beside itself.
ALLOWED = {
    **{
        name: {*ORDER[:index], "installation", "folders", "legacy", "precision", "tracing"}
        for index, name in enumerate(ORDER)
    },
    "kernels/once_per_machine": {"folders", "output"},
    "kernels/triton/check": {"parent", "patterns", "tracing"},
    "selection": {
        "patterns",
        "plan",
        "ops",
        "estimate",
        "data_sheets",
        "machine",
        "memory",
        "errors",
        "folders",
        "installation",
        "output",
    },
    "nn": {*ORDER, "legacy", "precision", "selection", "tracing"},
    "models": {*ORDER, "nn", "parallel", "installation", "legacy", "precision", "tracing"},
    "slides": {
        *ORDER,
        "errors",
        "html_page",
        "installation",
        "legacy",
        "machine",
        "memory",
        "models",
        "nn",
        "output",
        "parallel",
        "tracing",
        "training",
    },
    "errors": set(),
    "data_sheets": set(),
    "folders": set(),
    "precision": {"tracing"},
    "tracing": set(),
    "installation": set(),
    "html_page": set(),
    "machine": {"errors", "installation"},
    "memory": {"errors"},
    "progress": set(),
    "readable": set(),
    "output": {"errors"},
    "interrupt": set(),
    "terminal": set(),
    "parent": {"interrupt"},
    "waiting": {"interrupt"},
    "parallel": {*ORDER, "estimate", "legacy", "nn", "precision", "selection"},
    "integrations": {*ORDER, "nn", "models", "installation", "precision", "tracing"},
    "training": {
        *ORDER,
        "nn",
        "models",
        "parallel",
        "integrations",
        "estimate",
        "errors",
        "folders",
        "html_page",
        "installation",
        "machine",
        "memory",
        "output",
        "parent",
        "progress",
        "readable",
    },
    "benchmarks": {
        *ORDER,
        "nn",
        "precision",
        "models",
        "errors",
        "machine",
        "memory",
        "output",
        "progress",
        "terminal",
    },
    "cli": {
        *ORDER,
        "nn",
        "models",
        "errors",
        "installation",
        "machine",
        "memory",
        "output",
        "progress",
        "readable",
        "selection",
        "slides",
        "training",
        "benchmarks",
        "estimate",
        "data_sheets",
        "interrupt",
        "terminal",
        "waiting",
    },
    "estimate": {
        *ORDER,
        "data_sheets",
        "errors",
        "folders",
        "integrations",
        "memory",
        "models",
        "progress",
        "readable",
        "selection",
        "training",
    },
    # Estimates of a single call, which attention over ranks and the selection of segments read.
    "estimate/attention": {*ORDER},
    "estimate/parallel": {*ORDER},
    "estimate/workload": {"patterns"},
    "legacy": set(),
    # What the table names is imported on first use.
    "legacy/attention": {"nn", "parallel"},
    "core": {*ORDER, "installation", "legacy", "nn", "parallel", "selection"},
    "legacy/transformer": {"models", "nn"},
    "auto_registration": {"integrations"},
    "__init__": {
        "auto_registration",
        "core",
        "installation",
        "cli",  # when the command is started: its words are read before torch is imported
        "integrations",
        "legacy",
        "models",
        "nn",
        "ops",
        "patterns",
        "slides",
        "interrupt",
        "parent",
        "waiting",
    },
    "__main__": {"cli"},
}
NEED_TRANSFORMERS = {"": {"LongNetForCausalLM"}, "models": {"LongNetCausalLMConfig", "LongNetForCausalLM"}}


# surface.txt lists them.
PUBLIC = {room: public_names(room) for room in ROOMS}


def test_public_names_stand_once_and_have_docstrings() -> None:
    for room, names in PUBLIC.items():
        assert len(set(names)) == len(names)
        documented = {*names, *NEED_TRANSFORMERS.get(room, ())} - {"PRESETS"}
        assert all(getattr(module_of(room), name).__doc__ for name in documented)


def test_the_top_level_has_25_names_at_most() -> None:
    assert len(PUBLIC[""]) + len(NEED_TRANSFORMERS[""]) <= 25


def test_the_top_level_has_the_makers_by_name_and_no_warning() -> None:
    makers = {name for name in PUBLIC["core"] if name.startswith("create_")}
    assert set(dir(dilated_attention_pytorch)) >= {*PUBLIC[""], *NEED_TRANSFORMERS[""], *makers}
    for name in makers:
        assert getattr(dilated_attention_pytorch, name) is getattr(dilated_attention_pytorch.core, name)


def test_a_name_that_moved_to_its_subpackage_says_so() -> None:
    moved = {
        "integrations": {"register"},
        "nn": {*PUBLIC["nn"]} - {*PUBLIC[""], "Linear"},  # which never was at the top level
        "patterns": {"PatternSum", "SegmentedPattern"},
        "selection": {"DynamicSegmentSelector", "SegmentSelectionConfig"},
    }
    for part, name in ((part, name) for part, names in moved.items() for name in names):
        with pytest.warns(DeprecationWarning, match=rf"write `from dilated_attention_pytorch\.{part} import {name}`"):
            found = getattr(dilated_attention_pytorch, name)
        assert found is getattr(module_of(part), name)


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
        path = file.relative_to(PACKAGE).with_suffix("")
        part = path.parts[0]
        allowed = ALLOWED.get(path.as_posix(), ALLOWED[part]) | {part}
        parts = imported_parts(file) & set(ALLOWED)
        assert parts <= allowed, f"{file} imports {parts - allowed}"


def modules_imported(file: Path, part: str) -> set[str]:
    """Modules of another part that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            name, _, module = node.module.removeprefix("dilated_attention_pytorch.").partition(".")
            found |= {module} if name == part else set()
    return found


def test_estimates_read_settings_of_runs_and_calls_read_estimates_of_calls_alone() -> None:
    """Between these rooms imports go both ways, and between their modules one way."""
    for part in ("selection", "parallel"):
        for file in (PACKAGE / part).glob("*.py"):
            assert modules_imported(file, "estimate") <= {"attention", "parallel", "workload"}, file
    settings = {"autocast", "extension_settings", "measures", "preflight", "pretrained", "run_settings", "settings"}
    step = {"profiled_step", "stages"}
    for file in (PACKAGE / "estimate").glob("*.py"):
        assert modules_imported(file, "training") <= settings | step, file


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
assert hasattr(torch.ops.dilated_attention_pytorch, "attend")
assert "torch._dynamo" not in set(sys.modules) - before
# Old names cost nothing until one is asked for.
assert not {f"dilated_attention_pytorch.{name}" for name in ("core", "core.makers")} & set(sys.modules)
from dilated_attention_pytorch.legacy import table
assert table.read.cache_info().misses == 0
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert dilated_attention_pytorch.core.create_ring_attention is dilated_attention_pytorch.create_ring_attention
dilated_attention_pytorch.create_dilated_attention("auto", [4], [1])
assert "dilated_attention_pytorch.parallel" not in sys.modules
for name in ("", "core", "models", "nn", "ops", "patterns", "selection", "integrations", "parallel", "training"):
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


def test_the_import_warns_of_nothing_that_the_import_of_torch_does_not_warn_of() -> None:
    """Without NumPy PyTorch warns when it is imported, and this package adds nothing."""

    def warnings_of(module: str) -> set[str]:
        program = f"import sys; sys.modules['numpy'] = None; import {module}"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return {*run.stderr.splitlines()}

    assert warnings_of("dilated_attention_pytorch") == warnings_of("torch")


def test_the_citation_has_the_version_of_the_package() -> None:
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited == dilated_attention_pytorch.__version__ == importlib.metadata.version(NAME)


def test_the_workflow_takes_every_python_and_the_oldest_torch_that_are_promised() -> None:
    workflow, project = ((ROOT / name).read_text() for name in (".github/workflows/test.yml", "pyproject.toml"))
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert f"python: {json.dumps(pythons)}" in workflow
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert f'torch: ["{oldest}", "newest"]' in workflow
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake (?:--silent )?([a-z]+)", workflow)) <= targets


def test_pre_commit_has_the_linter_of_the_gate() -> None:
    (revision,) = re.findall(r"rev: v(.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), flags=re.MULTILINE)
    assert f"ruff=={revision}\n" in (ROOT / "constraints.txt").read_text()
