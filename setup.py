"""What pyproject.toml cannot say: the page for an index, and wheels that bring compiled kernels.

``DILATED_ATTENTION_KERNELS`` names the folder that ``python -m dilated_attention_pytorch.kernels.wheel`` wrote; the
wheel is then for this platform, otherwise for all.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).parent
_KERNELS = os.environ.get("DILATED_ATTENTION_KERNELS")
_LINK = re.compile(r"(?P<picture>!?)(?P<label>\[[^\[\]]*\])\((?!https?:|#)(?P<target>[^()\s]+)\)")


def index_page(text: str, repository: str | None, revision: str) -> str:
    """The README for a page elsewhere: its links and pictures are those of a revision in the repository.

    Args:
        text: the README, whose links are relative to the root of the repository.
        repository: address of the repository; None leaves links as they are.
        revision: a tag or a commit.
    """
    if repository is None:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['label']}({repository}/{kind}/{revision}/{link['target']})"

    return _LINK.sub(absolute, text)


class BuildWithKernels(build_py):
    """Adds the compiled kernels to the package."""

    def run(self) -> None:
        super().run()
        compiled = Path(self.build_lib) / "dilated_attention_pytorch" / "kernels" / "compiled"
        shutil.copytree(str(_KERNELS), compiled)


class WheelOfThisPlatform(bdist_wheel):
    """For every Python 3: PyTorch loads the kernels, which have no part of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class DistributionWithKernels(Distribution):
    """Has files of a platform, though none that setuptools compiles."""

    def has_ext_modules(self) -> bool:
        return True


def _arguments() -> dict[str, Any]:
    urls = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (_ROOT / "src/dilated_attention_pytorch/__init__.py").read_text(), re.MULTILINE
    )
    page = index_page((_ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository"), f"v{version}")
    arguments: dict[str, Any] = {"long_description": page, "long_description_content_type": "text/markdown"}
    if _KERNELS:
        commands = {"build_py": BuildWithKernels, "bdist_wheel": WheelOfThisPlatform}
        arguments |= {"distclass": DistributionWithKernels, "cmdclass": commands}
    return arguments


if __name__ == "__main__":
    setup(**_arguments())
