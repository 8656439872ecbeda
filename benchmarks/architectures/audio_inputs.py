"""What models of sounds are called with where the names of their arguments do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .drawing import draw_tokens, noise


def _codec(config: Any) -> dict[str, Any]:
    """A wave, and the same as its semantic model hears it."""
    features = noise(2, 30, config.semantic_model_config.feature_projection_input_dim)
    return {"input_values": noise(2, 1, 30 * 320), "input_features": features}


AUDIO_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Dots3NoteAudioModel": lambda config: {
        "input_features": noise(2, config.feature_size, 200),
        "chunk_sample_lengths": torch.tensor([32000, 32000]),
    },
    "FunAsrNanoEncoder": lambda config: {
        "input_features": noise(2, 40, config.num_mel_bins * config.num_stacked_frames),
        "input_features_mask": torch.ones(2, 40, dtype=torch.long),
    },
    "Gemma3nAudioEncoder": lambda config: {
        "audio_mel": noise(2, 64, config.input_feat_size),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "GraniteSpeech5Encoder": lambda config: {"input_features": noise(2, 80, 4 * config.num_mel_bins)},
    "GraniteSpeech5ForCTC": lambda config: {"input_features": noise(2, 80, 4 * config.encoder_config.num_mel_bins)},
    "GraniteSpeechCTCEncoder": lambda config: {"hidden_states": noise(2, 40, config.input_dim)},
    "GraniteSpeechPlusCTCEncoder": lambda config: {"hidden_states": noise(2, 40, config.input_dim)},
    "InklingAudioModel": lambda config: {"audio_input_ids": draw_tokens(2, 29, config.n_mel_bins)},
    "KyutaiSpeechToTextModel": lambda config: {"input_ids": draw_tokens(2, 29, config.num_codebooks + 1) % 50},
    "MoshiDepthDecoder": lambda config: {
        "input_ids": draw_tokens(2, config.num_codebooks),
        "last_hidden_state": noise(2, config.num_codebooks, config.input_size),
    },
    "Nemotron3_5AsrForRNNT": lambda config: {
        "input_features": noise(2, 160, config.encoder_config.num_mel_bins),
        "decoder_input_ids": draw_tokens(2, 11),
    },
    "NemotronAsrStreamingForRNNT": lambda config: {
        "input_features": noise(2, 160, config.encoder_config.num_mel_bins),
        "decoder_input_ids": draw_tokens(2, 11),
    },
    "NeuCodecModel": _codec,
    "Phi4MultimodalAudioModel": lambda config: {
        "hidden_states": noise(2, 96, config.input_size),
        "mask": torch.ones(2, 96, dtype=torch.bool),
    },
    "Qwen2_5OmniAudioEncoder": lambda config: {
        "input_features": noise(config.num_mel_bins, 200),
        "feature_lens": torch.tensor([200]),
        "aftercnn_lens": torch.tensor([100]),
    },
    "Qwen2_5OmniToken2WavDiTModel": lambda config: {
        "hidden_states": noise(2, 40, config.mel_dim),
        "condition_vector": noise(2, 40, config.mel_dim),
        "speaker_embedding": noise(2, 40, config.enc_emb_dim),
        "quantized_code": draw_tokens(2, 20),
        "time_step": torch.tensor(0.3, dtype=torch.float64),
    },
    "Qwen2_5OmniToken2WavModel": lambda config: {
        "code": draw_tokens(1, 20),
        "conditioning": noise(1, config.dit_config.enc_emb_dim),
        "reference_mel": noise(1, 30, config.dit_config.mel_dim),
        "num_steps": 2,
    },
    "Qwen2_5OmniToken2WavBigVGANModel": lambda config: {"mel_spectrogram": noise(2, config.mel_dim, 20)},
    "SpeechT5HifiGan": lambda config: {"spectrogram": noise(2, 20, config.model_in_dim)},
    "Qwen3OmniMoeAudioEncoder": lambda config: {
        "input_features": noise(config.num_mel_bins, 200),
        "feature_lens": torch.tensor([200]),
    },
    "SpeechEncoderDecoderModel": lambda config: {
        "input_values": noise(2, 6400),
        "decoder_input_ids": draw_tokens(2, 23),
    },
    "SpeechT5Model": lambda config: {
        "input_values": noise(2, 29, config.hidden_size),
        "decoder_input_values": noise(2, 23, config.hidden_size),
    },
    "VibeVoiceAcousticTokenizerModel": lambda config: {"input_values": noise(2, 1, 640), "sample": False},
    "VibeVoiceAcousticTokenizerDecoderModel": lambda config: {"hidden_states": noise(2, config.hidden_size, 20)},
    "VibeVoiceAcousticTokenizerEncoderModel": lambda config: {"hidden_states": noise(2, 1, 640)},
    "Xcodec2Model": _codec,
    "VoxtralRealtimeModel": lambda config: {
        "input_ids": draw_tokens(2, 25),
        "input_features": noise(2, config.audio_config.num_mel_bins, 200),
    },
    "VoxtralRealtimeTextModel": lambda config: {
        "input_ids": draw_tokens(2, 29),
        "t_cond": noise(1, 1, config.hidden_size),
    },
}
"""By the names of classes."""
