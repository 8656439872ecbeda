"""Profiles: stored whole, and never believed where they are damaged or of another machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.selection import DynamicSegmentSelector, Hardware, Profile, Rates, read_hardware
from dilated_attention_pytorch.selection.cost import FEATURES
from dilated_attention_pytorch.selection.profile import Accuracy, load_profile, profile_path, store_profile
from selection.cases import GIB

HARDWARE = Hardware.of_architecture("CPU", free_bytes=GIB, name="A processor", processors=3)
PROFILE = Profile(
    (
        Rates("float32", True, tuple(0.5 + index for index in range(len(FEATURES)))),
        Rates("bfloat16", False, (1e-9,) * len(FEATURES), 7, Accuracy(0.9, 0.1), Accuracy(0.8, 0.2)),
    )
)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(file: Path) -> None:
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    return apply


IGNORED: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: file.write_text(file.read_text()[:-40]), "is damaged: it is not JSON"),
    (lambda file: file.write_bytes(b"\xff\xfe"), "cannot be read"),
    (lambda file: file.write_text("[]"), "is of another format: .* got 'list'"),
    (changed(lambda values: values.update(format="profile 0")), "is of another format: .* got 'profile 0'"),
    (changed(lambda values: values["machine"].update(torch="1.0")), "another machine or version: torch '1.0' is not"),
    (changed(lambda values: values["machine"].update(name="Another")), "another machine .*: name 'Another' is not"),
    (changed(lambda values: values.pop("machine")), "another machine or version"),
    (changed(lambda values: values["rates"][0]["seconds"].pop()), "is damaged: ValueError: expected .* rates"),
    (changed(lambda values: values["rates"][0]["seconds"].__setitem__(0, -1)), "is damaged: ValueError"),
    (changed(lambda values: values["rates"][0].pop("dtype")), "is damaged: KeyError"),
    (changed(lambda values: values["rates"][0].pop("fitted")), "is damaged: KeyError"),
    (changed(lambda values: values["rates"][0].update(formula=[1])), "is damaged: TypeError"),
    (changed(lambda values: values.update(rates=7)), "is damaged: TypeError"),
]


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    file = store_profile(PROFILE, HARDWARE, tmp_path / "new")
    assert file == profile_path(HARDWARE, tmp_path / "new")
    assert load_profile(HARDWARE, tmp_path / "new") == PROFILE
    assert load_profile(HARDWARE, tmp_path) is None
    more_memory = dataclasses.replace(HARDWARE, free_bytes=2 * GIB)
    assert load_profile(more_memory, tmp_path / "new") == PROFILE


def test_machines_have_files_of_their_own() -> None:
    others = [
        dataclasses.replace(HARDWARE, **change) for change in ({"name": "B"}, {"processors": 4}, {"kind": "cuda"})
    ]
    assert len({profile_path(one, Path()) for one in (HARDWARE, *others)}) == 4


@pytest.mark.parametrize("case", range(len(IGNORED)), ids=lambda case: IGNORED[case][1][:30])
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning_and_left_alone(case: int, tmp_path: Path) -> None:
    damage, message = IGNORED[case]
    file = store_profile(PROFILE, HARDWARE, tmp_path)
    damage(file)
    before = file.read_bytes()
    with pytest.warns(UserWarning, match=message) as caught:
        assert load_profile(HARDWARE, tmp_path) is None
    assert "run `dilated-attention tune`" in str(caught[0].message)
    assert file.read_bytes() == before


def test_a_stop_while_storing_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = store_profile(PROFILE, HARDWARE, tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store_profile(Profile(()), HARDWARE, tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert load_profile(HARDWARE, tmp_path) == PROFILE


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot be written to .*; make room .* XDG_CACHE_HOME"):
        store_profile(PROFILE, HARDWARE, tmp_path / "file" / "folder")


def test_the_cache_folder_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dilated-attention-pytorch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "dilated-attention-pytorch"


def test_a_selector_takes_the_stored_profile_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DynamicSegmentSelector().machine("cpu")[1] == Profile(())
    store_profile(PROFILE, read_hardware("cpu"))
    assert DynamicSegmentSelector().machine("cpu")[1] == PROFILE
    assert DynamicSegmentSelector(profile=Profile(())).machine("cpu")[1] == Profile(())


def test_the_machine_is_read() -> None:
    hardware = read_hardware(torch.device("cpu"))
    assert hardware.architecture == "CPU"
    assert hardware.processors == torch.get_num_threads()
    assert 0 < hardware.free_bytes < 1 << 50
