"""One call under the profiler: a table, a trace, a picture."""

from __future__ import annotations

import gc
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dilated_attention_pytorch.benchmarks.profiling import profile_call, read_timeline
from dilated_attention_pytorch.benchmarks.settings import ProfileSettings
from dilated_attention_pytorch.errors import RunError


def profiled(output: Path, **options: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    profile_call(ProfileSettings(output=output, rows=300, **options), console)
    return console.file.getvalue()


def test_it_says_where_time_and_memory_go(tmp_path: Path) -> None:
    said = profiled(tmp_path, backward=True, contestant="ours, aten")
    for words in ("_scaled_dot_product_flash_attention_for_cpu_backward", "memory beyond the operands", "trace.json"):
        assert words in said
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "memory.png", "profile.json"}
    values = json.loads((tmp_path / "profile.json").read_text())
    assert values["kernel_launches"] is None
    assert values["peak_bytes"] >= values["transient_bytes"]
    assert values["spent"][0]["seconds"] > 0


def test_memory_over_time_ends_with_the_results_of_the_call(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # it would free during the call what others left, and less would be in use than before
    try:
        profiled(tmp_path, backward=True, contestant="published route")
    finally:
        gc.enable()
    timeline = read_timeline(tmp_path / "trace.json", is_cuda=False)
    assert timeline.microseconds == sorted(timeline.microseconds)
    assert timeline.spans["forward"][1] <= timeline.spans["backward"][0]
    results = 4 * 300 * 8 * 64 * 4  # out and three gradients in float32
    assert max(timeline.bytes) > 2 * results
    # The output is on its way out when the profiler stops; the gradients are held by nobody else.
    assert 0 <= timeline.bytes[-1] <= 1.1 * results


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contestant": "nobody"}, "must be part of one name, got 0; choose one of 'ours, triton'"),
        ({"contestant": "ours"}, "must be part of one name, got 8"),
        ({"contestant": "cache"}, "cannot compute this call: the cache of the models is for decoding"),
        ({"num_groups": 4}, "the shape three has 3 dilation groups"),
    ],
)
def test_what_cannot_be_profiled_is_refused_and_writes_nothing(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(RunError) as raised:
        profiled(tmp_path / "new", **options)
    assert words in str(raised.value)
    assert not (tmp_path / "new").exists()
