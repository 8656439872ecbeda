"""What may be wrong with the machine while a command runs, as patches."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Patch = Callable[[pytest.MonkeyPatch], None]


def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = Path.open

    def open_or_refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "module3.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_or_refuse)


def refuse_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    # As access() answers on a read-only file system, for root too.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000_000})())


def take_cuda_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def take_network_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def connect(address: tuple[str, int], timeout: float) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def ask(*words: Any, **options: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", ask)
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def start_processes(count: int | str, **others: str) -> Patch:
    """As torchrun does for each of ``count`` processes, but for ``others`` of its variables."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", **others}.items():
            monkeypatch.setenv(name, value)

    patch.__name__ = "_".join(
        ["start", str(count), "processes", *(f"{name}={value}" for name, value in others.items())]
    )
    return patch


def start_two_processes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def environment(**variables: str) -> Patch:
    """With these variables."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    patch.__name__ = " ".join(f"{name}={value}" for name, value in variables.items())
    return patch


def uninstall(name: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else find(wanted))

    patch.__name__ = f"uninstall_{name}"
    return patch


def uninstall_tyro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dilated_attention_pytorch.cli.command", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
