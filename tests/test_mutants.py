"""Mutants: small errors in the package and its benchmarks, each with the tests that fail; a slow test runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from support.processes import environment, run_whole

ROOT = Path(__file__).parents[1]
PACKAGE = "src/dilated_attention_pytorch"
ORACLE = "tests/ops/test_attend_equals_the_oracle.py"
EXTREMES = "tests/ops/test_extremes.py"
PLAN = "tests/plan/test_planner.py"
PLACEMENT, SLIDE_FILES, EMBEDDING = (f"tests/slides/test_{name}.py" for name in ("placement", "files", "embedding"))
SECONDS = 900.0


class Mutant(NamedTuple):
    """An error: a file, from the package's folder; a text that occurs once there, its replacement, and the tests."""

    file: str
    text: str
    replacement: str
    tests: str


MUTANTS = (
    Mutant("ops/merge.py", "torch.sigmoid(of_partial - lse)", "torch.sigmoid(lse - of_partial)", ORACLE),
    Mutant("ops/merge.py", '.masked_fill_(of_partial == float("-inf"), 0.0)', "", f"{EXTREMES} -k either_sign"),
    Mutant("ops/merge.py", "powers[1] / total", "powers[0] / total", f"{EXTREMES} -k any_magnitude"),
    Mutant("ops/merge.py", 'return lse.masked_fill(lse == float("-inf"), float("inf"))', "return lse", ORACLE),
    Mutant("ops/partials.py", "distance > band[1]", "distance >= band[1]", ORACLE),
    Mutant("ops/partials.py", "partial.is_first and (not is_in_place", "True and (not is_in_place", ORACLE),
    Mutant("ops/extremes.py", "_LARGE_SCORE = 2.0**13", "_LARGE_SCORE = 2.0**60", f"{EXTREMES} -k get_the_gradients"),
    Mutant(
        "ops/extremes.py",
        "    bad_rows |= _seen(call, bad_keys.unsqueeze(-1)).squeeze(-1)\n",
        "",
        f"{EXTREMES} -k minus_infinity",
    ),
    Mutant(
        "ops/lists.py",
        "later = position[:, None] > row",
        "later = position[:, None] >= row",
        "tests/ops/test_selected_blocks.py",
    ),
    Mutant("ops/gathered.py", "step.query_index - self._first_row, rows", "step.query_index, rows", ORACLE),
    Mutant("plan/geometry.py", "is_causal and ahead > 0", "is_causal and ahead > 1", PLAN),
    Mutant("plan/geometry.py", "band=(1 - num_queries, behind)", "band=(2 - num_queries, behind)", PLAN),
    Mutant(
        "plan/geometry.py",
        "if not is_causal:\n                zero_pad",
        "if True:\n                zero_pad",
        ORACLE,
    ),
    Mutant("plan/planner.py", "(local + shift) % segment_length", "local % segment_length", f"{ORACLE} -k shift"),
    Mutant("plan/planner.py", "replace(one, is_first=False)", "one", ORACLE),
    Mutant("plan/pairs.py", "number * (number + 1) // 2", "number * (number - 1) // 2", "tests/plan/test_scale.py"),
    Mutant("plan/pairs.py", "group.segment_length - 1)", "group.segment_length)", "tests/plan/test_scale.py"),
    Mutant(
        "plan/segments.py",
        "torch.searchsorted(stops, start, right=True)",
        "torch.searchsorted(stops, start)",
        "tests/plan/test_scale.py",
    ),
    Mutant(
        "kernels/products.py",
        ".div_(total))",
        ".mul_(total))",
        "tests/kernels/test_products.py",
    ),
    Mutant("kernels/products.py", "grad_scores *= kept", "grad_scores *= 1.0", "tests/kernels/test_products.py"),
    Mutant(
        "kernels/fused.py", "bias[:, :, 0].cummax(-1).values[..., last]", "bias.amax(-1)", f"{EXTREMES} -k either_sign"
    ),
    Mutant(
        "kernels/native.py",
        "partial.query_offset if partial.is_causal else _NO_BOUND",
        "0 if partial.is_causal else _NO_BOUND",
        "tests/ops/test_selected_blocks.py",
    ),
    Mutant(
        "kernels/native.py",
        "scatter_(-1, self.order, ascending)",
        "copy_(ascending)",
        "tests/ops/test_selected_blocks.py",
    ),
    Mutant("models/cache.py", "(seen[0] - runs[0][0])", "seen[0]", "tests/models/test_cache.py"),
    Mutant("models/cache.py", "row_group.seen += stop - start", "row_group.seen += stop", "tests/models/test_cache.py"),
    Mutant(
        "models/cache.py",
        "[index_of[wanted[new]] for new in rows]",
        "sorted(index_of[wanted[new]] for new in rows)",
        "tests/models/test_cache.py",
    ),
    Mutant(
        "parallel/previous_rows.py",
        "grad_rows[:, own] += message[place].transpose(0, 1)",
        "pass",
        "tests/parallel/test_previous_rows.py",
    ),
    Mutant(
        "parallel/sharding.py",
        "gathered.flatten(0, 1)",
        "gathered.transpose(0, 1).flatten(0, 1)",
        "tests/parallel/test_previous_rows.py",
    ),
    Mutant("slides/placement.py", "== 0).all(dim=1)", "== 0).any(dim=1)", PLACEMENT),
    Mutant("slides/placement.py", "and most >= _LEAST_SHARE * len(neighbours)", "", PLACEMENT),
    Mutant("slides/contents.py", "(coordinates.abs() < _MOST_PIXELS).all()", "coordinates.numel()", SLIDE_FILES),
    Mutant("slides/contents.py", "(rows == 0).all(dim=1)", "rows.isnan().all(dim=1)", SLIDE_FILES),
    Mutant(
        "slides/reading.py",
        "_check_spacing(slide, tile_size, settings.tile_spacing)\n",
        "_check_origin(slide, settings)\n",
        EMBEDDING,
    ),
    Mutant("slides/store.py", "and before.versions == source.versions", "", EMBEDDING),
    Mutant("benchmarks/exactness.py", " + counts[seen].log()", "", "tests/benchmarks/test_exactness.py"),
    Mutant(
        "kernels/rounding.py",
        " - (grad_out * out.value).sum(-1, keepdim=True)",
        "",
        "tests/benchmarks/test_exactness.py",
    ),
    Mutant(
        "kernels/device_check.py", "if machines != [machine]", "if not machines", "tests/kernels/test_device_check.py"
    ),
    Mutant("kernels/device_check.py", "name in _FROM_OUTSIDE", "False", "tests/kernels/test_device_check.py"),
    Mutant(
        "../../benchmarks/measured_code.py",
        "return any(found is None",
        "return all(found is None",
        "tests/benchmarks/test_measured_code.py -k own_code",
    ),
)


def name_of(mutant: Mutant) -> str:
    return f"{mutant.file}: {mutant.text.strip().splitlines()[0]}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / PACKAGE / mutant.file).read_text().count(mutant.text) == 1
    assert (ROOT / mutant.tests.split()[0]).exists()


def run_tests(folder: Path, tests: str, mutant: Mutant | None) -> subprocess.CompletedProcess[str]:
    """Run tests on a copy of the tree, with the error of the mutant in it."""
    for part in ("benchmarks", "src", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / part, folder)
    if mutant is not None:
        mutated = folder / PACKAGE / mutant.file
        mutated.write_text(mutated.read_text().replace(mutant.text, mutant.replacement))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    env = environment(PYTHONPATH=f"{folder / 'src'}:{folder / 'tests'}:{folder}")
    return run_whole([*command, *tests.split()], SECONDS, env=env, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS}))
def test_the_tests_pass_without_a_mutant(tests: str, tmp_path: Path) -> None:
    found = run_tests(tmp_path, tests, None)
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_the_tests_fail_on_a_mutant(mutant: Mutant, tmp_path: Path) -> None:
    found = run_tests(tmp_path, mutant.tests, mutant)
    # Some errors read beyond memory: the process dies.
    assert found.returncode == 1 or found.returncode < 0, found.stdout[-2000:]
