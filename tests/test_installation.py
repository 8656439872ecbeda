"""The hint that installs an extra names where this package came from; files of another project are named."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import installation, machine
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.installation import EXTRAS, NAME, importing, install_command
from dilated_attention_pytorch.legacy import table
from dilated_attention_pytorch.machine import package_digest, require
from support.processes import environment, run_whole

COMMIT = "5eef0ab3c1e0f3a6dd6c2f1c5c1b1b2a3d4e5f60"


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict[str, Any] | None, installer: str) -> None:
    """Let the package run from ``folder``, with the records that an installer leaves beside it."""
    package, records = folder / "dilated_attention_pytorch", folder / "dilated_attention-0.1.0.dist-info"
    package.mkdir(parents=True)
    records.mkdir()
    (records / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {NAME}\nVersion: 0.1.0\n")
    (records / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (records / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(installation, "_PACKAGE", package)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


@pytest.mark.parametrize(("origin", "requirement"), [
    ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}},
     f"{NAME}[train] @ git+https://host/x.git@{COMMIT}"),
    ({"url": "ssh://git@host/x", "subdirectory": "a/b", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
     f"{NAME}[train] @ git+ssh://git@host/x@{COMMIT}#subdirectory=a/b"),
    ({"url": "https://host/d-0.1.0-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "00"}}},
     f"{NAME}[train] @ https://host/d-0.1.0-py3-none-any.whl"),
    ({"url": "file:///tmp/my%20wheels/d-0.1.0-py3-none-any.whl", "archive_info": {}},
     f"{NAME}[train] @ file:///tmp/my%20wheels/d-0.1.0-py3-none-any.whl"),
    ({"url": "file:///home/me/checkout", "dir_info": {}}, f"{NAME}[train] @ file:///home/me/checkout"),
])  # fmt: skip
def test_it_names_the_repository_the_file_or_the_folder(
    origin: dict[str, Any], requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packaging.requirements import Requirement

    installed(monkeypatch, tmp_path, origin, "pip")
    *command, said = shlex.split(install_command("train"))
    assert (command, said) == (["pip", "install"], requirement)
    assert Requirement(said).url == requirement.partition(" @ ")[2]


def test_what_came_from_an_index_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, None, "uv")
    assert shlex.split(install_command("train")) == ["uv", "pip", "install", f"{NAME}[train]"]


def test_a_checkout_is_named_whatever_else_is_installed_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "my checkout"
    installed(monkeypatch, tmp_path / "elsewhere", None, "pip")
    package = checkout / "src" / "dilated_attention_pytorch"
    package.mkdir(parents=True)
    monkeypatch.setattr(installation, "_PACKAGE", package)
    # A folder that only looks like it: the project in it is another one.
    (checkout / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert shlex.split(install_command("plot")) == ["pip", "install", *EXTRAS["plot"]]
    (checkout / "pyproject.toml").write_text(f'[project]\nname = "{NAME}"\n')
    assert shlex.split(install_command("plot")) == ["pip", "install", "-e", f"{checkout}[plot]"]


def test_the_record_of_another_copy_says_nothing_about_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"url": "https://host/other.whl", "archive_info": {}}
    installed(monkeypatch, tmp_path / "theirs", origin, "pip")
    monkeypatch.setattr(installation, "_PACKAGE", tmp_path / "copied" / "dilated_attention_pytorch")
    assert shlex.split(install_command("bench")) == ["pip", "install", *EXTRAS["bench"]]


def test_this_checkout_names_itself() -> None:
    root = Path(installation.__file__).parents[2]
    assert install_command("train") == f"pip install -e {shlex.quote(f'{root}[train]')}"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """This package's folder as an installation has it."""
    own = Path(installation.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(own, tmp_path / own.name, ignore=skipped))


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """A program for which ``folder`` is the only one with packages."""
    return run_whole([sys.executable, "-S", "-c", program], 60.0, env=environment(PYTHONPATH=str(folder)))


REMEDY = f"run `pip uninstall {NAME}-pytorch {NAME}`, then install {NAME} again"
COMMAND = "from dilated_attention_pytorch.cli import main; main(['info'])"


@pytest.mark.parametrize("name", installation._OTHER_FILES)
def test_the_import_and_the_command_name_the_files_of_another_project(name: str, copied: Path) -> None:
    """Without torch, which an import that goes on needs. Their __init__.py, empty, can have replaced this one's."""
    (copied / name).touch()
    said = f"{copied} also holds {name} of another project, which the index has as {NAME}-pytorch"
    ended = run(copied.parent, "import dilated_attention_pytorch")
    assert (last := ended.stderr.splitlines()[-1]).startswith(f"ImportError: {said}")
    assert last.endswith(REMEDY)
    (copied / "__init__.py").write_text("")
    ended = run(copied.parent, COMMAND)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"dilated-attention: {said}")
    assert len(ended.stderr.splitlines()) == 1


def test_the_command_names_a_package_whose_first_file_was_uninstalled_with_another(copied: Path) -> None:
    (copied / "__init__.py").unlink()
    ended = run(copied.parent, COMMAND)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"dilated-attention: {copied} has lost its __init__.py")
    assert ended.stderr.endswith(f"{REMEDY}\n")


def test_the_files_of_another_project_are_old_names_and_none_of_this_package() -> None:
    own = Path(installation.__file__).parent
    for name in installation._OTHER_FILES:
        assert not (own / name).exists()
        assert table.module(name.removesuffix(".py")) is not None


def make_package(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> None:
    """Put a package first on the path whose inner module runs ``code``."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("from . import inner\n")
    (folder / name / "inner.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('operator x::nms does not exist')", "RuntimeError: operator x::nms does not exist"),
        ("raise OSError('libx.so.12: no such file')", "OSError: libx.so.12: no such file"),
        ("import package_nowhere", "ModuleNotFoundError: No module named 'package_nowhere'"),
        ("from json import nothing_there", "ImportError: cannot import name 'nothing_there' from 'json'"),
        ("try: 1 / 0\nexcept ArithmeticError as e: raise ImportError('wrapped') from e", "ZeroDivisionError: division"),
    ],
)
def test_a_broken_package_is_named_with_its_own_error(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, needed in [("plotly", "plotly>=6"), ("tokenizers_of_another", None)]:
        make_package(monkeypatch, tmp_path / package, package, code)
        with pytest.raises(ImportError) as caught, importing("the report", "report"):
            importlib.import_module(package)
        message = str(caught.value)
        assert message.startswith(f"the report: {package} is installed, but importing it fails with {said}")
        assert "install versions that fit together" in message
        assert needed is None or f"({needed})" in message
        assert caught.value.name == package
        with pytest.raises(RunError, match=f"the report: {package} is installed, but importing it fails"):
            require("the report", (package,), "report")


def test_a_missing_package_has_its_extra_whoever_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(monkeypatch, tmp_path, "imports_plotly", "import plotly")
    monkeypatch.setitem(sys.modules, "plotly", None)
    for package in ("plotly", "imports_plotly"):
        with pytest.raises(ImportError) as caught, importing("the report", "report"):
            importlib.import_module(package)
        assert str(caught.value) == f"the report needs plotly, not installed here: {install_command('report')}"


def test_a_module_that_is_not_there_is_not_called_installed() -> None:
    with pytest.raises(ImportError) as caught, importing("the report", "report"):
        import package_nowhere  # noqa: F401
    assert str(caught.value) == "the report needs package_nowhere, not installed here: install it"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'dilated_attention_pytorch.x'", name="dilated_attention_pytorch.x"),
        ImportError("cannot import name 'x' from 'dilated_attention_pytorch'", name="dilated_attention_pytorch"),
        TypeError("of this package"),
    ],
)
def test_an_error_of_this_package_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, importing("the report", "report"):
        raise error
    assert caught.value is error


def test_a_version_without_the_name_is_not_called_missing() -> None:
    said = r"the report: plotly is installed.*cannot import name 'X'.*\(plotly>=6\)"
    with pytest.raises(ImportError, match=said), importing("the report", "report"):
        from plotly import X  # noqa: F401


BROKEN_TORCHVISION = """
import sys
sys.path.insert(0, sys.argv[1])
import dilated_attention_pytorch
from dilated_attention_pytorch.cli import main
for use in (lambda: dilated_attention_pytorch.LongNetForCausalLM, dilated_attention_pytorch.register):
    try:
        use()
    except ImportError as error:
        print(error)
main(["train", "--data", sys.argv[1], "--output", sys.argv[1] + "/run"])
"""


def test_a_torchvision_that_does_not_fit_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    make_package(monkeypatch, tmp_path, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    record = tmp_path / "torchvision-0.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.4\nName: torchvision\nVersion: 0.1\n")
    run = subprocess.run(
        [sys.executable, "-c", BROKEN_TORCHVISION, str(tmp_path)], capture_output=True, text=True, check=False
    )
    broken = "torchvision is installed, but importing it fails with RuntimeError: operator torchvision::nms does not"
    of_model, of_register = run.stdout.splitlines()
    assert f"LongNetForCausalLM: {broken}" in of_model
    assert f"register(): {broken}" in of_register
    assert (run.returncode, f"dilated-attention: training: {broken}" in run.stderr) == (2, True), run.stderr


def test_the_digest_of_the_package_is_of_its_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    (tmp_path / "machine.py").write_text("a")
    before = package_digest()
    (tmp_path / "machine.py~").write_text("a")
    (tmp_path / ".#machine.py").symlink_to("nowhere")  # an editor's
    assert package_digest() == before
    (tmp_path / "kernels.h").write_text("a")
    assert package_digest() != before


def test_one_function_decides_what_a_failed_import_means() -> None:
    # An operator that DeepSpeed compiles, old names, an old transformers: no packages of an extra that are absent.
    allowed = {"auto_registration.py", "installation.py", "offload_files.py", "command.py", "machine.py", "__init__.py"}
    package = Path(installation.__file__).parent
    handlers = {
        path.name
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"except.*\b(ImportError|ModuleNotFoundError)\b", line)
    }
    assert handlers <= allowed
