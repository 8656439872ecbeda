"""Keywords that transformers' trainers, tokenizers and generate pass on to attention: passed by, or refused by name."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import register, set_pattern
from dilated_attention_pytorch.integrations.transformers import attention
from integrations.tiny_models import PATTERN, draw, tiny

register()
SOURCES = Path(transformers.__file__).parent
READ_BY_ATTENTION = frozenset(inspect.signature(attention.dilated_attention_forward).parameters)
WITHOUT_EFFECT = {"deterministic", "max_length_q", "max_length_k", "cache_position"}
"""What some attention of transformers reads: the order of sums, sizes that follow from boundaries or from the cache."""
DENSE = DilatedPattern([1000], [1])

SMALL = {
    "vocab_size": 31,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "init_std": 0.5,
}
ENCODER_DECODERS = {
    "Bart": "ForConditionalGeneration",
    "MBart": "ForConditionalGeneration",
    "Pegasus": "ForConditionalGeneration",
    "Marian": "MTModel",
    "M2M100": "ForConditionalGeneration",
    "Blenderbot": "ForConditionalGeneration",
    "BlenderbotSmall": "ForConditionalGeneration",
    "Whisper": "ForConditionalGeneration",
}


def keywords_read_by_attention() -> set[str]:
    """What layers pass to attention by name, and what transformers' implementations of attention read."""
    names: set[str] = set()
    for file in SOURCES.glob("models/*/modeling_*.py"):
        text = file.read_text()
        for call in re.findall(r"attention_interface\(\n(.*?)\n\s+\)", text, flags=re.DOTALL):
            names.update(re.findall(r"^\s+(\w+)=", call, flags=re.MULTILINE))
        for signature in re.findall(r"def \w*attention_forward\((.*?)\)[^()]*:\n", text, flags=re.DOTALL):
            names.update(re.findall(r"^\s+(\w+)[:=,]", signature, flags=re.MULTILINE))
    for file in SOURCES.glob("integrations/*attention*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name.endswith("attention_forward"):
                names.update(argument.arg for argument in function.args.args)
                names.update(re.findall(r'kwargs(?:\.get\(|\[)"(\w+)"', ast.unparse(function).replace("'", '"')))
    return names


def test_what_changes_attention_is_honoured_or_refused_by_name() -> None:
    names = keywords_read_by_attention()
    assert {"scaling", "softcap", "s_aux", "position_bias", "output_attentions", "sliding_window"} <= names
    assert names & attention._PASSED_BY <= WITHOUT_EFFECT
    layouts = {"q", "k", "v", "query_states", "key_states", "value_states", "enable_gqa"}
    assert names - READ_BY_ATTENTION - layouts - WITHOUT_EFFECT == set(attention._REFUSED) & names


def test_every_keyword_that_transformers_documents_for_its_models_is_known() -> None:
    from transformers.utils import TransformersKwargs

    known = READ_BY_ATTENTION | attention._PASSED_BY | set(attention._REFUSED)
    assert set(TransformersKwargs.__annotations__) <= known


def test_keywords_that_do_not_change_attention_pass_by() -> None:
    layer = set_pattern(tiny("llama"), PATTERN).model.layers[0].self_attn
    query = torch.randn(2, 6, 12, 8, dtype=torch.float64)

    def attended(**keywords: Any) -> Any:
        return attention.dilated_attention_forward(layer, query, query[:, :3], query[:, :3], None, **keywords)[0]

    for name in attention._PASSED_BY:
        assert torch.equal(attended(**{name: draw(2, 12)}), attended()), name


def test_what_tokenizers_and_trainers_pass_changes_nothing() -> None:
    model, tokens = set_pattern(tiny("llama"), PATTERN), draw(2, 12)
    given = dict.fromkeys(("token_type_ids", "special_tokens_mask", "length", "seq_idx", "shift_labels"), tokens)
    with torch.no_grad():
        out = model(tokens, **given, labels=tokens, return_loss=True, reduction="mean", ignore_index=-1)
        assert torch.equal(out.logits, model(tokens).logits)
        assert torch.equal(model.model(tokens, labels=tokens)[0], model.model(tokens)[0])


@pytest.mark.parametrize(
    "name",
    [name if name in ("Bart", "Whisper") else pytest.param(name, marks=pytest.mark.slow) for name in ENCODER_DECODERS],
)
def test_predictions_of_a_seq2seq_trainer_are_those_of_sdpa(name: str, tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    is_whisper = name == "Whisper"
    sizes = SMALL | ({"num_mel_bins": 5, "max_source_positions": 12, "max_target_positions": 40} if is_whisper else {})
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, name + ENCODER_DECODERS[name])(config)
    names = ("input_features", "labels") if is_whisper else ("input_ids", "attention_mask", "labels")
    columns = (torch.randn(4, 5, 24) if is_whisper else draw(4, 11), torch.ones(4, 11).long(), draw(4, 7, seed=1))
    values = columns[::2] if is_whisper else columns
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        generation_max_length=9,
        per_device_eval_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    found = []
    for implementation in ("sdpa", "dilated"):
        model.set_attn_implementation(implementation)
        if implementation == "dilated":
            set_pattern(model, DENSE)
        found.append(Seq2SeqTrainer(model, arguments, eval_dataset=rows).predict(rows))
    assert (found[0].predictions == found[1].predictions).all()
    assert found[0].metrics["test_loss"] == pytest.approx(found[1].metrics["test_loss"], rel=1e-5)
