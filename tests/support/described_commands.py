"""Descriptions of the commands, read from their classes: what ``help.json`` holds."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from dilated_attention_pytorch.cli.command import COMMANDS, defaults_for
from dilated_attention_pytorch.training import PRESETS

_RUN_GROUPS = {
    "optimisation": "steps* batch_size* gradient_accumulation* learning_rate* optimizer* muon_learning_rate "
    "muon_momentum weight_decay adam_beta1 adam_beta2 max_grad_norm warmup_fraction schedule* decay_fraction "
    "stage_steps",
    "parallel": "data_parallel* context_parallel* tensor_parallel parallel heads_parallel strategy layout offload "
    "offload_folder timeout",
    "checkpoints and faults": "save_steps* keep_checkpoints async_checkpoints on_nan spike_deviations spike_window",
    "evaluation and tracking": "log_steps eval_steps* eval_windows final_eval_windows quarter_files track* "
    "prometheus_port sample_prompt sample_length sample_temperature",
}
_MODEL_GROUP = (
    "context_length* model.embed_dim* model.num_layers* model.num_heads* model.segment_lengths* model.dilation_rates* "
    "model.layer_patterns model.gradient_checkpointing* model.vocab_size model.num_kv_heads model.ffn_dim "
    "model.activation model.offset_rule model.layer_segment_shifts model.dropout model.attention_dropout "
    "model.rope_theta model.layer_rope_thetas model.layer_scale_lengths model.head_gates model.key_convolution "
    "model.shifted_keys model.layernorm_eps model.tie_embeddings model.checkpoint_every"
)
_STAGES = "stages.lengths stages.fractions stages.windows stages.learning_rates stages.patterns random_local_windows"
_DATA = "data* tokenizer* data_weights text_field cache packing max_tokens max_batch_size file_start_fraction workers"
_TILES = "tile_size* tile_spacing encoder magnification num_heads prefix"
_MACHINE = "device* threads engine ray_address"


def _fewer(names: str, first: str = "") -> str:
    """``names`` with a star at those of ``first`` alone."""
    return " ".join(f"{name}*" if name in first.split() else name for name in names.replace("*", "").split())


_GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "run": "output* preset* config* resume* init_from* device* precision seed threads compile",
        "data": _DATA,
        "model": _MODEL_GROUP,
        **_RUN_GROUPS,
        "stages": _STAGES,
    },
    "extend": {
        "run": "model* output* config* resume* seed device* precision* threads",
        "data": "data* text_field",
        "model and length": "context_length* pattern* layer_patterns rotary* gradient_checkpointing*",
        "optimisation": "steps* batch_tokens* stages* gradient_accumulation* learning_rate* optimizer* weight_decay "
        "max_grad_norm warmup_fraction schedule decay_fraction stage_steps",
        "checkpoints and faults": "save_steps* keep_checkpoints async_checkpoints on_nan spike_deviations spike_window",
        "evaluation and tracking": "log_steps eval_steps* eval_windows final_eval_windows track prometheus_port",
    },
    "plan": {
        "what is planned": "preset* config purpose* hardware* processes* link price_per_hour output_file",
        "further answers": "longest* fewest* changes* mesh largest",
        "a generation (--for generation)": "prompt* new_tokens* chunk_size",
        "a model of transformers": "pretrained* pattern*",
        "model": _fewer(_MODEL_GROUP, "context_length model.embed_dim model.num_layers"),
        "run": "init_from precision device threads compile seed",
        "data": _fewer(_DATA),
        **{group: _fewer(names, "batch_size data_parallel") for group, names in _RUN_GROUPS.items()},
        "stages": _fewer(_STAGES),
    },
    "embed": {
        "weights and output": "checkpoint* output* format",
        "tiles": _TILES,
        "what is written": "like* pooling* layer* maps* rollout* tiles patients*",
        "computation": f"{_MACHINE} precision* memory batch_tiles part",
    },
    "finetune": {
        "weights and output": "output* checkpoint* maps skip_missing",
        "labels and splits": "task* label_column* slide_column patient_column time_column event_column split_column "
        "by_patient* folds* validation test* split_seed seeds",
        "training": "freeze* lora* epochs* learning_rate* warmup_epochs patience cases_per_step* weight_decay "
        "layer_decay class_weights",
        "encoder": f"layers* pooling dropout drop_path {_TILES}",
        "computation": f"{_MACHINE} precision*",
    },
}
"""By command: its flags by group, in the order of the page; a star marks those that one begins with. Other commands
have few flags, all in one group."""
_Hint = Any


def _origin(hint: _Hint) -> Any:
    return get_origin(hint)  # Any: its stubs list fewer kinds of hints than there are


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of a command: its name with that of its part, its type with annotations, its value and its docstring."""

    name: str
    hint: _Hint
    value: Any
    help: str

    @property
    def metadata(self) -> tuple[Any, ...]:
        return self.hint.__metadata__ if _origin(self.hint) is Annotated else ()

    @property
    def is_positional(self) -> bool:
        return any(one is tyro.conf.Positional for one in self.metadata)

    def told(self, name: str) -> Any:
        """An argument of the field's ``tyro.conf.arg``; None without one."""
        return next((getattr(one, name) for one in self.metadata if hasattr(one, name)), None)


def describe() -> dict[str, Any]:
    """All commands by name, as JSON-serialisable values."""
    return {name: _command(name, command) for name, command in COMMANDS.items()}


def _command(name: str, command: type) -> dict[str, Any]:
    summary, explanation, examples = _docstring(inspect.getdoc(command) or "")
    fields = list(_fields(command, defaults_for(name, ["--preset", "hybrid"])))
    flags = [_flag(field) for field in fields if not field.is_positional]
    return {
        "summary": summary,
        "explanation": explanation,
        "examples": examples,
        "arguments": [_argument(field) for field in fields if field.is_positional],
        "flags": _grouped(name, flags),
        "presets": _presets(name, command, flags) if name in ("train", "plan") else {},
    }


def _docstring(text: str) -> tuple[str, list[str], list[dict[str, str]]]:
    """Summary, paragraphs and examples: indented lines, each after the line that introduces it, if that ends so."""
    summary, *rest = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    explanation: list[str] = []
    examples: list[dict[str, str]] = []
    for part in rest:
        if part.startswith("    "):
            about = explanation.pop()[:-1] if explanation and explanation[-1].endswith(":") else ""
            lines = [" ".join(line.split()) for line in part.splitlines()]
            examples += [{"about": about, "line": line} for line in lines]
        else:
            explanation.append(_plain(part))
    return _plain(summary), explanation, examples


def _plain(text: str) -> str:
    """Text of a docstring in one line, without its markup."""
    return " ".join(re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "").split())


def _fields(settings: type, default: Any, prefix: str = "") -> Iterator[_Field]:
    hints, docs = get_type_hints(settings, include_extras=True), _field_docs(settings)
    for entry in dataclasses.fields(settings):
        if not entry.init:
            continue
        value = entry.default if default is None else getattr(default, entry.name)
        if value is dataclasses.MISSING and entry.default_factory is not dataclasses.MISSING:
            value = entry.default_factory()
        if dataclasses.is_dataclass(value):
            yield from _fields(type(value), value, f"{prefix}{entry.name}.")
        else:
            yield _Field(f"{prefix}{entry.name}", hints[entry.name], value, docs[entry.name])


def _field_docs(settings: type) -> dict[str, str]:
    """The strings under the fields of a class and its bases, those of the class itself first."""
    docs: dict[str, str] = {}
    for base in reversed(settings.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = _plain(text)
    return docs


def _argument(field: _Field) -> dict[str, Any]:
    _, many = _type(field.hint)
    metavar = field.told("metavar") or f"{field.name.upper()}{' ...' if many else ''}"
    is_required = field.value is dataclasses.MISSING
    return {
        "metavar": metavar if is_required else f"[{metavar}]",
        "is_required": is_required,
        "is_many": many,
        "help": field.help,
        "names": sorted({field.name.replace("_", "-"), field.name.rstrip("s").replace("_", "-")}),
    }


def _flag(field: _Field) -> dict[str, Any]:
    inner, many = _type(field.hint)
    is_switch = inner is bool and not many
    choices = [str(choice) for choice in get_args(inner)] if _origin(inner) is Literal else []
    choices = ["True", "False"] if inner is bool and many else choices
    metavar = {int: "N", float: "X", Path: "PATH", bool: "BOOL"}.get(inner, "NAME" if choices else "TEXT")
    part, dot, last = field.name.rpartition(".")
    return {
        "name": f"--{part}{dot}{field.told('name') or last}".replace("_", "-"),
        "metavar": "" if is_switch else (field.told("metavar") or f"{metavar}{' ...' if many else ''}"),
        "help": field.help,
        "default": _in_words(field.value),
        "choices": choices,
        "kind": inner.__name__ if inner in (int, float) else "",
        "is_many": many,
        "is_switch": is_switch,
        "is_optional": type(None) in _alternatives(field.hint),
        "is_required": field.value is dataclasses.MISSING,
        "field": field.name,
    }


def _alternatives(hint: _Hint) -> tuple[_Hint, ...]:
    """The types that a value may have."""
    if _origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    return get_args(hint) if _origin(hint) in (Union, types.UnionType) else (hint,)


def _type(hint: _Hint) -> tuple[_Hint, bool]:
    """The type of a value, or of every value of several, and whether there are several."""
    while _origin(hint) in (Annotated, Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    if _origin(hint) in (tuple, Sequence):
        return _type(get_args(hint)[0])[0], True
    return hint, False


def _in_words(value: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _grouped(command: str, flags: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``flags`` in the order of their groups, with the required ones first."""
    if command not in _GROUPS:
        groups = {"flags": " ".join(f"{flag['field']}*" for flag in flags)}
        groups["flags"] = " ".join(sorted(groups["flags"].split(), key=lambda name: not _required(flags, name)))
    else:
        groups = dict(_GROUPS[command])
    by_field = {flag["field"]: flag for flag in flags}
    ordered = []
    for group, names in groups.items():
        for word in names.split():
            name = word.removesuffix("*")
            flag = by_field.pop(name) if name in by_field else None
            if flag is None:
                raise ValueError(f"{command} has no field {name}, which _GROUPS has in {group!r}")
            ordered.append({**flag, "group": group, "is_first": word.endswith("*")})
    if by_field:
        raise ValueError(f"{command}: {', '.join(by_field)} are in no group of _GROUPS; add them")
    return [{name: value for name, value in flag.items() if name != "field"} for flag in ordered]


def _required(flags: Sequence[dict[str, Any]], name: str) -> bool:
    return any(flag["is_required"] and flag["field"] == name.removesuffix("*") for flag in flags)


def _presets(name: str, command: type, flags: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By preset, the defaults that differ from those that are shown."""
    shown = {flag["name"]: flag["default"] for flag in flags}
    return {
        preset: {
            flag["name"]: flag["default"]
            for field in _fields(command, defaults_for(name, ["--preset", preset]))
            if (flag := _flag(field))["default"] != shown.get(flag["name"])
        }
        for preset in PRESETS
    }
