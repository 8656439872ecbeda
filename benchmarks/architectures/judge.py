"""The verdict on one architecture: works, refused, neither, or not applicable, and what was seen."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.integrations import register, set_pattern

from . import reference
from .kinds import Kind
from .laws import causality, generation, gradients, keywords, padding
from .outcome import Refused, SortedErrors, Wrong
from .special import NOT_HERE
from .subject import DENSE, TOLERANCE, NotBuilt, Subject, call, distance, find_subject
from .verdict import NEITHER, NOT_APPLICABLE, REFUSED, WORKS, Verdict
from .ways import PATTERN, Way, way_of_part, ways

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
        package = re.search(r"requires the (\S+) library|No module named '(\w+)'", str(error))
        verdict.reason = f"needs {package.group(1) or package.group(2)}" if package else f"not built: {error}"
        return verdict
    verdict.recipe = [subject.level, str(subject.dtype).removeprefix("torch."), subject.number]
    if subject.dense != DENSE[0]:
        verdict.recipe.append(subject.dense)
    with reference.Watch() as watch:
        call(subject.model(subject.dense), subject.inputs)
    verdict.attention = sorted({site.module for site in watch.sites} | watch.modules)
    verdict.parts = sorted(watch.models - {kind.class_name})
    if not watch.sites and not watch.modules:
        verdict.reason = "no attention"
        return verdict
    why_refused = ""
    try:
        todo = list(ways(subject))
        for way in todo:
            if way.name and not way.runs_dense(subject):
                continue
            try:
                verdict.checks, verdict.error, verdict.effect = _judge_way(subject, way)
            except Refused as refusal:
                if way.part or not why_refused:
                    why_refused = str(refusal)
                part = None if way.part else way_of_part(subject, str(refusal))
                todo += [part] if part is not None and part.name not in {one.name for one in todo} else []
                continue
            verdict.verdict, verdict.reason, verdict.way = WORKS, why_refused, way.name
            break
        else:
            verdict.verdict, verdict.reason = REFUSED, why_refused
        _check_told_later(subject, is_causal_without_mask=_AS_SDPA in verdict.checks)
    except Wrong as wrong:
        verdict.verdict, verdict.reason = NEITHER, str(wrong)
    return verdict


def _check_told_later(subject: Subject, *, is_causal_without_mask: bool) -> None:
    """``set_attn_implementation`` on a model that exists is refused, or gives what the reference gives."""
    model = subject.model(subject.dense)
    try:
        with SortedErrors():
            model.set_attn_implementation("dilated")
            out = call(set_pattern(model, PATTERN), subject.inputs)
    except Refused:
        return
    except Wrong as wrong:
        raise Wrong(f"told by set_attn_implementation: {wrong}") from wrong
    differences = [float("inf")]
    for way in ways(subject):
        if way.name and not way.runs_dense(subject):
            continue
        try:
            with reference.causal_without_mask() if is_causal_without_mask else nullcontext():
                expected = call(way.reference(subject), subject.inputs)
        except KeyError:  # a part has classes of its own for every implementation that it knows
            continue
        differences.append(distance(out, expected))
    if min(differences) > TOLERANCE[subject.dtype]:
        raise Wrong(f"told by set_attn_implementation it runs, and is {min(differences):.1e} off the reference")


def _judge_way(subject: Subject, way: Way) -> tuple[list[str], float, float]:
    with SortedErrors():
        ours = way.ours(subject)
        with reference.Watch() as watch:
            out = call(ours, subject.inputs)
    dense = way.reference(subject)
    with reference.without_counts():
        plain = call(dense, subject.inputs)
    if distance(out, call(dense, subject.inputs)) > TOLERANCE[subject.dtype] and _is_causal_without_mask(
        subject, plain
    ):
        # Transformers' rule for sdpa: where a model makes no mask, its attention modules say whether they are causal.
        with reference.causal_without_mask():
            checks, error, effect = _compare(subject, way, ours, out, dense, watch)
            return [*checks, _AS_SDPA], error, effect
    return _compare(subject, way, ours, out, dense, watch)


def _compare(
    subject: Subject, way: Way, ours: Any, out: list[Tensor], dense: Any, watch: reference.Watch
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
        if not site.through_interface
        and _is_attention(site)
        and not (way.is_partial and site.implementation != "dilated")
    }
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
    for check in (gradients, causality, padding, generation, keywords):
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


def _is_attention(site: reference.Site) -> bool:
    """Whether a softmax is over pairs of one sequence."""
    if site.is_apart:
        return False
    rows, columns = site.shape[-2:]
    return rows == columns > 4 or ("ttention" in site.module and rows > 1 and columns > 4)
