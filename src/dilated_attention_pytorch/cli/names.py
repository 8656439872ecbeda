"""Names of commands and flags besides our own: those of other programs, and those of earlier versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def _of(ours: str, *others: str) -> dict[str, tuple[str, ...]]:
    return {f"--{other}": tuple(ours.split()) for other in others}


_FOLDER = _of("--output", "out", "out-dir", "outdir", "output-dir", "output-folder", "save-dir", "run-dir")
_FILE = _of("--output-file", "output", "out", "out-file", "save-to")
_JSON = {**_FILE, **_of("--output-file", "json")}
_DEVICE = {**_of("--threads", "num-threads"), **_of("--device cuda", "cuda", "gpu")}
_PRECISION = {
    **_of("--precision bfloat16", "bf16"),
    **_of("--precision float16", "fp16"),
    **_of("--precision tf32", "tf32"),
    **_of("--precision float8", "fp8"),
    **_of("--precision", "dtype", "torch-dtype"),
}
_LENGTH = _of(
    "--context-length", "seq-len", "seq-length", "sequence-length", "max-seq-len", "max-seq-length", "max-length",
    "block-size", "context-len", "context", "length",
)  # fmt: skip
_DATA = _of("--data", "dataset", "dataset-path", "data-path", "data-dir", "train-data", "train-file", "texts")
_RUN = {
    **_FOLDER,
    **_DEVICE,
    **_PRECISION,
    **_LENGTH,
    **_DATA,
    **_of("--steps", "max-steps", "num-steps", "train-steps", "max-train-steps", "num-train-steps", "iters"),
    **_of("--steps", "max-iters", "num-iterations", "total-steps"),
    **_of("--learning-rate", "lr", "max-lr", "peak-lr"),
    **_of("--weight-decay", "wd"),
    **_of("--max-grad-norm", "grad-clip", "clip-grad", "gradient-clip", "gradient-clip-val", "clip-grad-norm"),
    **_of("--gradient-accumulation", "gradient-accumulation-steps", "grad-accum", "grad-accumulation-steps"),
    **_of("--gradient-accumulation", "accumulate-grad-batches", "accum-steps"),
    **_of("--warmup-fraction", "warmup-ratio"),
    **_of("--schedule", "lr-schedule", "lr-scheduler", "lr-scheduler-type", "scheduler"),
    **_of("--optimizer", "optim"),
    **_of("--log-steps", "logging-steps", "log-interval", "log-every", "log-every-n-steps"),
    **_of("--eval-steps", "eval-interval", "eval-every", "eval-freq"),
    **_of("--save-steps", "save-interval", "save-every", "checkpoint-interval", "save-freq"),
    **_of("--keep-checkpoints", "save-total-limit", "keep-last"),
    **_of("--track", "report-to", "logger", "tracker"),
    **_of("--track wandb", "wandb"),
    **_of("--resume", "resume-from-checkpoint", "resume-from", "continue-from"),
}
_MODEL = {
    **_of("--model.gradient-checkpointing", "gradient-checkpointing", "grad-checkpointing"),
    **_of("--model.gradient-checkpointing", "activation-checkpointing", "recompute"),
    **_of("--model.embed-dim", "embed-dim", "hidden-size", "d-model", "n-embd", "dim", "width"),
    **_of("--model.num-layers", "num-layers", "num-hidden-layers", "n-layers", "n-layer", "layers", "depth"),
    **_of("--model.num-heads", "num-heads", "num-attention-heads", "n-heads", "n-head", "heads"),
    **_of("--model.num-kv-heads", "num-kv-heads", "num-key-value-heads"),
    **_of("--model.ffn-dim", "ffn-dim", "intermediate-size"),
    **_of("--model.vocab-size", "vocab-size"),
    **_of("--model.dropout", "dropout"),
    **_of("--model.segment-lengths", "segment-lengths"),
    **_of("--model.dilation-rates", "dilation-rates", "dilated-ratio"),
    **_of("--model.layer-patterns", "layer-patterns"),
}
_BATCH = _of("--batch-size", "per-device-train-batch-size", "micro-batch-size", "train-batch-size", "batch", "bs")
_SAMPLE = {
    **_of("--max-new-tokens", "max-tokens", "num-tokens", "new-tokens", "max-length"),
    **_of("--temperature", "temp"),
    **_of("--weight-format", "weights", "quantize", "quantization"),
    **_of("--weight-format int8", "load-in-8bit"),
    **_of("--device cuda", "cuda", "gpu"),
}
_SLIDES = {
    **_FOLDER,
    **_DEVICE,
    **_of("--precision bfloat16", "bf16"),
    **_of("--precision", "dtype"),
    **_of("--checkpoint", "ckpt", "weights", "model", "pretrained", "checkpoint-path", "model-path"),
    **_of("--tile-size", "patch-size", "tile-px", "patch-size-level0"),
    **_of("--magnification", "mag", "target-mag"),
}

OTHER_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "train": {
        **_RUN,
        **_MODEL,
        **_BATCH,
        **_of("--data-weights", "weights", "mixture-weights", "data-mix"),
        **_of("--workers", "num-workers", "dataloader-num-workers"),
        **_of("--compile", "torch-compile"),
        **_of("--muon-learning-rate", "muon-lr"),
        **_of("--context-parallel", "context-parallel-size", "sequence-parallel", "cp"),
        **_of("--tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size", "tp"),
        **_of("--data-parallel fsdp", "fsdp"),
    },
    "extend": {
        **_RUN,
        **_of("--model", "model-name-or-path", "model-name", "base-model", "pretrained"),
        **_of("--gradient-checkpointing", "model.gradient-checkpointing", "grad-checkpointing"),
        **_of("--rotary", "rope-scaling", "rope"),
    },
    "generate": _SAMPLE,
    "embed": _SLIDES,
    "finetune": {
        **_SLIDES,
        **_of("--epochs", "num-train-epochs", "max-epochs", "num-epochs"),
        **_of("--learning-rate", "lr"),
        **_of("--weight-decay", "wd"),
        **_of("--lora", "lora-rank", "lora-r"),
        **_of("--seeds", "seed"),
        **_of("--cases-per-step", "batch-size", "gradient-accumulation-steps", "gc"),
        **_of("--task", "task-type"),
        **_of("--folds", "num-folds", "k-folds"),
    },
    "heatmap": _FILE,
    "eval": {
        **_JSON,
        **_DEVICE,
        **_DATA,
        **_PRECISION,
        **_of("--context-lengths", "seq-lens", "seq-len", "context-length", "sequence-lengths", "lengths", "length"),
        **_of("--weight-format", "weights", "quantize"),
        **_of("--weight-format int8", "load-in-8bit"),
    },
    "report": {**_FILE, **_of("--output-file", "html")},
    "tokenizer": {
        **_FILE,
        **_of("--vocab-size", "model.vocab-size", "vocab", "size"),
    },
    "bench": {
        **_FOLDER,
        **_DEVICE,
        **_of("--sequence-lengths", "seq-lens", "seq-len", "sequence-length", "lengths", "length", "rows"),
        **_of("--implementations", "contestants", "impls", "impl", "backends", "backend"),
        **_of("--dtypes", "dtype", "precision"),
        **_of("--batch", "batch-size", "bs"),
        **_of("--head-dims", "head-dim"),
        **_of("--modes", "mode"),
        **_of("--modes forward_backward", "backward"),
        **_of("--shapes", "shape"),
    },
    "profile": {**_FOLDER, **_of("--steps", "max-steps", "num-steps")},
    "tune": {**_FOLDER, **_DEVICE, **_of("--dtypes", "dtype", "precision")},
    "plan": {
        **{name: ours for name, ours in _RUN.items() if ours[0] not in ("--output", "--resume")},
        **_MODEL,
        **_BATCH,
        **_JSON,
        **_of("--hardware", "gpu", "device-name", "accelerator"),
        **_of("--new-tokens", "max-new-tokens"),
        **_of("--processes", "num-processes", "gpus", "num-gpus", "world-size", "nproc-per-node"),
        **_of("--data-weights", "weights"),
        **_of("--tensor-parallel", "tensor-parallel-size", "tp"),
        **_of("--context-parallel", "context-parallel-size", "cp"),
    },
    "show": {
        **_FILE,
        **_of("--sequence-length", "seq-len", "seq-length", "sequence-lengths", "seq-lens", "length", "context-length"),
        **_of("--heads", "num-heads"),
        **_of("--causal", "is-causal"),
    },
}  # fmt: skip
"""By command, other names of its flags, with ours, and its value where the name says it (``--bf16``)."""

_BY_STEPS = "a run is counted in optimizer steps: --steps N, each of --batch-size windows of --context-length tokens"
_BY_FRACTION = "the warm-up is a fraction of the steps: --warmup-fraction 0.03"
_OF_A_CALL = "profile takes steps of a run, as it was trained (profile RUN); for one call use torch.profiler.profile"
_RUN_REFUSED = {
    **dict.fromkeys(("--epochs", "--num-epochs", "--num-train-epochs", "--max-epochs"), _BY_STEPS),
    "--warmup-steps": _BY_FRACTION,
    "--warmup": _BY_FRACTION,
    "--mixed-precision": "name the precision: --precision bfloat16, float16 or float32",
    "--deepspeed": "DeepSpeed's stages are --data-parallel zero1, zero2 or zero3",
    **dict.fromkeys(
        ("--num-gpus", "--gpus", "--nproc-per-node", "--num-processes"),
        "start one process a GPU: torchrun --nproc-per-node N -m dilated_attention_pytorch train ...",
    ),
}

REFUSED: Mapping[str, Mapping[str, str]] = {
    "train": {
        **_RUN_REFUSED,
        "--model": "train begins with a new model (--model.embed-dim and others); `dilated-attention extend --model "
        "FOLDER` takes one of transformers",
        "--config-file": "a TOML file of settings is named by --config FILE",
    },
    "extend": {
        **_RUN_REFUSED,
        **dict.fromkeys(
            ("--batch-size", "--per-device-train-batch-size", "--batch"),
            "a batch is counted in tokens: --batch-tokens N; batches are summed by --gradient-accumulation N",
        ),
        "--preset": "presets are for train; extend trains the model of --model",
    },
    "embed": dict.fromkeys(
        ("--batch-size", "--batch"), "a batch is counted in tiles of several slides: --batch-tiles N"
    ),
    "plan": {"--html": "the plan is printed, and --output-file writes it as JSON; leave it out"},
    "diagnose": {"--step": "`dilated-attention profile RUN` measures steps of a run; leave it out"},
    "profile": dict.fromkeys(
        (
            *("--shape", "--rows", "--backward", "--dtype", "--causal", "--head-dim", "--num-groups", "--batch"),
            *("--contestant", "--device", "--threads"),
        ),
        _OF_A_CALL,
    ),
}  # fmt: skip
"""By command, flags that it has not, with what to use instead."""

OTHER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("evaluate", "evaluation", "test", "perplexity"), "eval"),
    **dict.fromkeys(("benchmark", "benchmarks", "time", "speed"), "bench"),
    **dict.fromkeys(("pretrain", "fit", "resume"), "train"),
    **dict.fromkeys(("sample", "chat", "complete", "predict"), "generate"),
    **dict.fromkeys(("encode", "embedding", "embeddings", "extract"), "embed"),
    **dict.fromkeys(("fine-tune", "lora", "classify", "probe"), "finetune"),
    **dict.fromkeys(("heatmaps", "attention-map", "attention-maps", "map"), "heatmap"),
    **dict.fromkeys(("compile", "install", "kernels"), "build"),
    **dict.fromkeys(("env", "doctor", "devices", "check"), "info"),
    **dict.fromkeys(("memory", "estimate", "cost"), "plan"),
    **dict.fromkeys(("tokenize", "bpe"), "tokenizer"),
    **dict.fromkeys(("plot", "pattern", "draw"), "show"),
    **dict.fromkeys(("compare", "dashboard"), "report"),
    **dict.fromkeys(("continue", "long-context"), "extend"),
}
"""Names of commands elsewhere, with ours."""

_ALIKE = 0.7


def others_of(command: str) -> dict[str, list[str]]:
    """By flag of ``command``, its other names, those of one value left out."""
    names: dict[str, list[str]] = {}
    for other, ours in OTHER_NAMES.get(command, {}).items():
        if len(ours) == 1:
            names.setdefault(ours[0], []).append(other)
    return names


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that ``word`` probably means, if one is near."""
    import difflib

    found = difflib.get_close_matches(word, list(names), 1, cutoff=_ALIKE)
    return found[0] if found else None
