"""The verdict on one architecture: works, refused, neither, or not applicable, and what was seen."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import register, set_pattern

from . import reference
from .kinds import Kind
from .laws import causality, generation, gradients, padding
from .outcome import Refused, SortedErrors, Wrong
from .special import NOT_HERE
from .subject import TOLERANCE, NotBuilt, Subject, call, distance, find_subject
from .verdict import NEITHER, NOT_APPLICABLE, REFUSED, WORKS, Verdict

PATTERN = DilatedPattern(list(reference.LENGTHS), list(reference.RATES))
_AS_SDPA = "causal as with sdpa, for want of a mask"
SEEN = 1e-3
"""A pattern must change results by this much, relative to their size, or it proves nothing."""


def judge(kind: Kind, recipe: list[Any] | None = None) -> Verdict:
    """The verdict on one kind of model. What models of others warn of is not judged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(kind, recipe)


def _judge(kind: Kind, recipe: list[Any] | None) -> Verdict:
    register()
    reference.register_reference()
    verdict = Verdict(kind.model_type, kind.class_name, kind.is_decoder, NOT_APPLICABLE)
    if kind.model_type in NOT_HERE:
        verdict.reason = NOT_HERE[kind.model_type]
        return verdict
    if not kind.class_name:
        verdict.reason = f"needs {kind.needs}" if kind.needs else "no class of models is written for this type"
        return verdict
    try:
        subject = find_subject(kind, recipe)
    except NotBuilt as error:
        package = re.search(r"requires the (\S+) library", str(error))
        verdict.reason = f"needs {package.group(1)}" if package else f"not built: {error}"
        return verdict
    verdict.recipe = [subject.level, str(subject.dtype).removeprefix("torch."), subject.number]
    with reference.Watch() as watch:
        call(subject.model("eager"), subject.inputs)
    verdict.attention = sorted({site.module for site in watch.sites} | watch.modules)
    verdict.parts = sorted(watch.models - {kind.class_name})
    if not watch.sites and not watch.modules:
        verdict.reason = "no attention"
        return verdict
    first_refusal = ""
    try:
        for way, change in _ways(subject):
            verdict.way = way
            if way and not _runs_dense(subject, change):
                continue
            try:
                verdict.checks, verdict.error, verdict.effect = _judge_way(subject, change)
            except Refused as refusal:
                first_refusal = first_refusal or str(refusal)
                continue
            verdict.verdict, verdict.reason = WORKS, first_refusal
            break
        else:
            verdict.verdict, verdict.reason, verdict.way = REFUSED, first_refusal, ""
        _check_told_later(subject, is_causal_without_mask=_AS_SDPA in verdict.checks)
    except Wrong as wrong:
        verdict.verdict, verdict.reason = NEITHER, str(wrong)
    return verdict


def _check_told_later(subject: Subject, *, is_causal_without_mask: bool) -> None:
    """``set_attn_implementation`` on a model that exists is refused, or gives what the reference gives."""
    model = subject.model("eager")
    try:
        with SortedErrors():
            model.set_attn_implementation("dilated")
            out = call(set_pattern(model, PATTERN), subject.inputs)
    except Refused:
        return
    except Wrong as wrong:
        raise Wrong(f"told by set_attn_implementation: {wrong}") from wrong
    differences = [float("inf")]
    for way, change in _ways(subject):
        config = subject.config()
        attention = change(config)
        if way and not _runs_dense(subject, change):
            continue
        try:
            with reference.causal_without_mask() if is_causal_without_mask else nullcontext():
                expected = call(subject.model(_swapped(attention), config), subject.inputs)
        except KeyError:  # a part has classes of its own for every implementation that it knows
            continue
        differences.append(distance(out, expected))
    if min(differences) > TOLERANCE[subject.dtype]:
        raise Wrong(f"told by set_attn_implementation it runs, and is {min(differences):.1e} off the reference")


def _ways(subject: Subject) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What a user would do, then what the refusals and the docs say to do."""
    config = subject.config()
    yield "", lambda config: "dilated"
    if _without_windows(subject.config()):
        yield "without the model's own windows", lambda config: _without_windows(config) and "dilated"
    text = _text_config(config)
    parts = [name for name in type(config).sub_configs if getattr(config, name) is text]
    if parts:
        alone = {"": "eager", **dict.fromkeys(parts, "dilated")}
        yield "the text part alone", lambda config: alone
        if _without_windows(config):
            yield "the text part alone, without its own windows", lambda config: _without_windows(config) and alone


def _runs_dense(subject: Subject, change: Callable[[Any], Any]) -> bool:
    """Whether the model runs at all with its configuration changed so."""
    config = subject.config()
    change(config)
    try:
        call(subject.model("eager", config), subject.inputs)
    except Exception:  # noqa: BLE001 - whatever it is, it has no part of ours
        return False
    return True


def _text_config(config: Any) -> Any:
    """That of the text part, or the whole where there is none or where there are two."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _without_windows(config: Any) -> bool:
    """Take the windows out of a configuration, and say whether it had any."""
    config, found = _text_config(config), False
    for name in ("sliding_window", "attention_chunk_size"):
        if vars(config).get(name):
            try:
                setattr(config, name, None)
            except StrictDataclassError:  # it must have one
                return False
            found = True
    types = vars(config).get("layer_types")
    if found and types:
        config.layer_types = ["full_attention" if "sliding" in kind or "chunk" in kind else kind for kind in types]
    return found


def _judge_way(subject: Subject, change: Callable[[Any], Any]) -> tuple[list[str], float, float]:
    config = subject.config()
    attention = change(config)
    with SortedErrors():
        ours = subject.model(attention, config)
        set_pattern(ours, PATTERN)
        with reference.Watch() as watch:
            out = call(ours, subject.inputs)
    dense_config = subject.config()
    change(dense_config)
    dense = subject.model(_swapped(attention), dense_config)
    with reference.without_counts():
        plain = call(dense, subject.inputs)
    if distance(out, call(dense, subject.inputs)) > TOLERANCE[subject.dtype] and _is_causal_without_mask(
        subject, plain
    ):
        # Transformers' rule for sdpa: where a model makes no mask, its attention modules say whether they are causal.
        with reference.causal_without_mask():
            checks, error, effect = _compare(subject, ours, out, dense, attention, watch)
            return [*checks, _AS_SDPA], error, effect
    return _compare(subject, ours, out, dense, attention, watch)


def _compare(
    subject: Subject, ours: Any, out: list[Tensor], dense: Any, attention: Any, watch: reference.Watch
) -> tuple[list[str], float, float]:
    """What ours gave against the reference, then the laws that both keep."""
    reference.STATE.calls.clear()
    expected = call(dense, subject.inputs)
    calls = set(reference.STATE.calls)
    with reference.without_counts():
        plain = call(dense, subject.inputs)
    effect, error = distance(expected, plain), distance(out, expected)
    tolerance = TOLERANCE[subject.dtype]
    symptoms = []
    foreign = {
        site.module
        for site in watch.sites
        if not site.through_interface and _is_attention(site)
        and not (isinstance(attention, dict) and site.implementation != "dilated")
    }  # fmt: skip
    if foreign:
        symptoms.append(f"{', '.join(sorted(foreign))} computes attention without the pattern")
    if "self" not in calls:
        symptoms.append(
            f"no layer attends under the pattern ({', '.join(sorted(calls)) or 'nothing'} came to the interface)"
        )
    elif effect < SEEN:
        symptoms.append(f"not shown: the pattern changes results by {effect:.1e} only")
    if error > tolerance:
        symptoms.append(f"results are {error:.1e} off the reference")
    if distance(out, plain) <= tolerance:
        symptoms.append("results are dense")
    elif "self" not in calls:
        symptoms.append(f"results are {distance(out, plain):.1e} off dense")
    checks = ["equals dense counts"]
    for check in (gradients, causality, padding, generation):
        try:
            checks += check(ours, dense, subject)
        except Wrong as wrong:
            symptoms.append(str(wrong))
        except Refused as refusal:
            symptoms.append(f"after a forward that ran: {refusal}")
    if symptoms:
        raise Wrong("; ".join(symptoms))
    return checks, error, effect


def _is_causal_without_mask(subject: Subject, plain: list[Tensor]) -> bool:
    """Whether dense attention of transformers is another by ``"sdpa"`` than by ``"eager"``: for want of a mask."""
    try:
        sdpa = call(subject.model("sdpa"), subject.inputs)
    except (ValueError, NotImplementedError, KeyError, TypeError):
        return False
    return distance(sdpa, plain) > TOLERANCE[subject.dtype]


def _swapped(attention: Any) -> Any:
    """The reference in place of ours."""
    if isinstance(attention, dict):
        return {part: reference.NAME if value == "dilated" else value for part, value in attention.items()}
    return reference.NAME


def _is_attention(site: reference.Site) -> bool:
    """Whether a softmax is over pairs of one sequence."""
    rows, columns = site.shape[-2:]
    return rows == columns > 4 or ("ttention" in site.module and rows > 1 and columns > 4)
