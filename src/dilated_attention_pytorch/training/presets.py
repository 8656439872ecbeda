"""Training presets for two CPU cores and for GPUs."""

from __future__ import annotations

from collections.abc import Callable

from dilated_attention_pytorch.models.config import LongNetConfig

from .settings import TrainSettings
from .stages import StageSettings


def cpu() -> TrainSettings:
    """1.7 million parameters at 8,192 bytes of context: minutes on two CPU cores."""
    return TrainSettings(
        model=LongNetConfig(
            embed_dim=256,
            num_layers=2,
            num_heads=4,
            ffn_dim=704,
            rope_theta=500.0,
            # 640 is half a segment of 256 and about half of one of 1,024; segments of 16,384 span the context.
            segment_lengths=(256, 1024, 16384),
            dilation_rates=(1, 2, 4),
            layer_segment_shifts=(0, 640),
        ),
        steps=760,
        optimizer="muon",
        learning_rate=3e-3,
        muon_learning_rate=0.04,
    )


def hybrid() -> TrainSettings:
    """2.7 million parameters at 8,192 bytes of context, of which every third layer sees all, without positions.

    The other layers have windows of 128; in about three of four steps, of 32.
    """
    near = "local_window(127)"
    return TrainSettings(
        model=LongNetConfig(
            embed_dim=192,
            num_layers=6,
            num_heads=6,
            layer_patterns=(near, near, f"DilatedPattern([{1 << 30}], [1])"),
            layer_rope_thetas=(1e4, 1e4, 0.0),
            layer_scale_lengths=(0, 0, 512),
            key_convolution=3,
        ),
        random_local_windows=(31, 31, 31, 127),
        stages=StageSettings(lengths=(512, 2048, 8192), windows=(8, 4, 1), fractions=(0.35, 0.35, 0.3)),
        steps=470,
        schedule="wsd",
        decay_fraction=0.3,
        optimizer="muon",
        learning_rate=3e-3,
        muon_learning_rate=0.03,
    )


def gpu() -> TrainSettings:
    """About 100 million parameters at 32,768 bytes of context: hours on one GPU of the H100 class."""
    return TrainSettings(
        model=LongNetConfig(
            embed_dim=768,
            num_layers=14,
            num_heads=12,
            segment_lengths=(2048, 4096, 8192, 16384, 32768),
            dilation_rates=(1, 2, 4, 6, 12),
            layer_segment_shifts=(0, 1024),
        ),
        context_length=32768,
        steps=10000,
        batch_size=4,
        optimizer="muon",
        learning_rate=1e-3,
        muon_learning_rate=0.02,
        log_steps=10,
        eval_steps=500,
        eval_windows=16,
        final_eval_windows=512,
        save_steps=500,
    )


def gpu_large() -> TrainSettings:
    """About 730 million parameters at 65,536 bytes of context, with recomputation: days on one GPU with 80 GB."""
    return TrainSettings(
        model=LongNetConfig(
            embed_dim=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=6,
            gradient_checkpointing=True,
            segment_lengths=(2048, 4096, 8192, 16384, 65536),
            dilation_rates=(1, 2, 3, 4, 6),
            layer_segment_shifts=(0, 1024),
        ),
        context_length=65536,
        steps=20000,
        batch_size=1,
        gradient_accumulation=4,
        optimizer="muon",
        learning_rate=6e-4,
        muon_learning_rate=0.02,
        log_steps=10,
        eval_steps=500,
        eval_windows=16,
        final_eval_windows=512,
        save_steps=500,
    )


def tiny() -> TrainSettings:
    """A few thousand parameters at 256 bytes of context: seconds, as a smoke test of a whole run."""
    return TrainSettings(
        model=LongNetConfig(
            embed_dim=32,
            num_layers=2,
            num_heads=2,
            ffn_dim=64,
            segment_lengths=(64, 256),
            dilation_rates=(1, 2),
            layer_segment_shifts=(0, 32),
        ),
        context_length=256,
        steps=20,
        batch_size=2,
        threads=1,
        optimizer="muon",
        log_steps=2,
        eval_steps=10,
        eval_windows=4,
        final_eval_windows=8,
        quarter_files=4,
        save_steps=10,
        sample_length=50,
    )


PRESETS: dict[str, Callable[[], TrainSettings]] = {
    "cpu": cpu,
    "gpu": gpu,
    "gpu-large": gpu_large,
    "hybrid": hybrid,
    "tiny": tiny,
}
"""Presets by the name that ``--preset`` takes."""
