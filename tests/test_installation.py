"""The hint that installs an extra names where this package came from, never the name alone."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import installation
from dilated_attention_pytorch.installation import EXTRAS, NAME, install_command

COMMIT = "5eef0ab3c1e0f3a6dd6c2f1c5c1b1b2a3d4e5f60"


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict[str, Any] | None, installer: str) -> None:
    """Let the package run from ``folder``, with the records that an installer leaves beside it."""
    package, records = folder / "dilated_attention_pytorch", folder / "dilated_attention_pytorch-0.1.0.dist-info"
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


def test_without_a_record_of_its_origin_it_names_the_packages_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path, None, "uv")
    assert shlex.split(install_command("train")) == ["uv", "pip", "install", *EXTRAS["train"]]


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


def test_another_project_of_the_name_says_nothing_about_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"url": "https://host/other.whl", "archive_info": {}}
    installed(monkeypatch, tmp_path / "theirs", origin, "pip")
    monkeypatch.setattr(installation, "_PACKAGE", tmp_path / "copied" / "dilated_attention_pytorch")
    assert shlex.split(install_command("bench")) == ["pip", "install", *EXTRAS["bench"]]


def test_this_checkout_names_itself() -> None:
    root = Path(installation.__file__).parents[2]
    assert install_command("train") == f"pip install -e {shlex.quote(f'{root}[train]')}"
