"""Tiny models of packages for sound, images as tokens, text and recommendation, as in
`examples/package_models.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.package_models import ROWS, Case, Entry, ids, normal, squares

# -- speech, sound --------------------------------------------------------------------------------


def conformer() -> Case:
    from conformer import Conformer

    model = Conformer(16, depth=2, dim_head=8, heads=2, conv_kernel_size=5)
    return Case(model, {"x": normal(ROWS, 12, 16)}, squares)


def transformers_case(kind: str, name: str, batch: dict[str, Any], **values: Any) -> Case:
    """A model of transformers without dropout; the loss is the model's own if it has one."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **values)
    for key, value in vars(config).items():
        if ("drop" in key or key == "mask_time_prob") and isinstance(value, float):
            setattr(config, key, 0.0)
    model = getattr(transformers, name)(config)
    return Case(model, batch, None if "labels" in batch else squares)


SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (4, 2), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
}  # fmt: skip


def whisper() -> Case:
    batch = {"input_features": normal(ROWS, 8, 16), "labels": torch.arange(ROWS) % 2}
    return transformers_case(
        "whisper", "WhisperForAudioClassification", batch, d_model=16, encoder_layers=1,
        encoder_attention_heads=2, encoder_ffn_dim=32, decoder_layers=1, decoder_attention_heads=2,
        num_mel_bins=8, max_source_positions=8,
    )  # fmt: skip


def hubert() -> Case:
    batch = {"input_values": normal(ROWS, 200), "labels": torch.arange(ROWS) % 2}
    return transformers_case("hubert", "HubertForSequenceClassification", batch, **SPEECH)


def wav2vec2_conformer() -> Case:
    batch = {"input_values": normal(ROWS, 200)}
    return transformers_case("wav2vec2-conformer", "Wav2Vec2ConformerModel", batch, **SPEECH)


def encodec() -> Case:
    batch = {"input_values": normal(ROWS, 1, 320)}
    return transformers_case(
        "encodec", "EncodecModel", batch, num_filters=4, hidden_size=16, codebook_size=8,
        codebook_dim=16, upsampling_ratios=[4, 2], num_lstm_layers=1,
    )  # fmt: skip


# -- detection and segmentation -------------------------------------------------------------------


def segformer() -> Case:
    batch = {"pixel_values": normal(ROWS, 3, 32, 32), "labels": ids(3, ROWS, 32, 32)}
    return transformers_case(
        "segformer", "SegformerForSemanticSegmentation", batch, depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=3,
    )  # fmt: skip


def yolos() -> Case:
    batch = {"pixel_values": normal(ROWS, 3, 32, 32)}
    return transformers_case(
        "yolos", "YolosForObjectDetection", batch, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, image_size=[32, 32], patch_size=8,
        num_detection_tokens=4,
    )  # fmt: skip


# -- state space, recurrent -----------------------------------------------------------------------


def tokens() -> dict[str, Tensor]:
    return {"input_ids": ids(32, ROWS, 8), "labels": ids(32, ROWS, 8)}


def s5() -> Case:
    from s5 import S5Block

    return Case(S5Block(8, 8, bidir=False), {"x": normal(ROWS, 8, 8)}, squares)


def mamba2() -> Case:
    return transformers_case(
        "mamba2", "Mamba2ForCausalLM", tokens(), hidden_size=16, num_hidden_layers=2, vocab_size=32,
        num_heads=4, head_dim=8, state_size=8, n_groups=2, chunk_size=4,
    )  # fmt: skip


def recurrent_gemma() -> Case:
    return transformers_case(
        "recurrent_gemma", "RecurrentGemmaForCausalLM", tokens(), hidden_size=16,
        num_hidden_layers=3, vocab_size=32, num_attention_heads=2, intermediate_size=32,
        lru_width=16, attention_window_size=8, head_dim=8,
    )  # fmt: skip


def jamba() -> Case:
    return transformers_case(
        "jamba", "JambaForCausalLM", tokens(), hidden_size=16, num_hidden_layers=2, vocab_size=32,
        experts_implementation="eager",
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2,
        use_mamba_kernels=False, mamba_d_state=4,
    )  # fmt: skip


def rwkv() -> Case:
    return transformers_case(
        "rwkv", "RwkvForCausalLM", tokens(), hidden_size=16, num_hidden_layers=2, vocab_size=32,
        attention_hidden_size=16, intermediate_size=32, context_length=8,
    )  # fmt: skip


# -- recommendation -------------------------------------------------------------------------------


def rechub_deepfm() -> Case:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DeepFM

    sparse = [SparseFeature(f"s{i}", vocab_size=16, embed_dim=4) for i in range(3)]
    model = DeepFM([DenseFeature("d"), *sparse], sparse, {"dims": [16, 8], "dropout": 0.0})
    x = {"d": normal(ROWS)} | {f.name: ids(16, ROWS) for f in sparse}
    return Case(model, {"x": x}, squares)


def hstu() -> Case:
    from torch_rechub.models.generative.hstu import HSTUModel

    model = HSTUModel(32, 16, 2, 2, 8, 8, max_seq_len=8, dropout=0.0)
    return Case(model, {"x": ids(32, ROWS, 8), "time_diffs": ids(900, ROWS, 8).double()}, squares)


def deepctr(name: str, **values: Any) -> Case:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"s{i}", 16, 4) for i in range(3)] + [DenseFeat("d", 1)]
    model = getattr(models, name)(columns, columns, dnn_hidden_units=(16, 8), **values)
    batch = {"X": torch.cat([ids(16, ROWS, 3).double(), normal(ROWS, 1)], 1)}
    return Case(model, batch, squares)


# -- attention ------------------------------------------------------------------------------------


def x_transformer() -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(
        dim=16,
        depth=2,
        heads=2,
        attn_dim_head=8,
        rotary_pos_emb=True,
        ff_glu=True,
        use_rmsnorm=True,
    )
    net = TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)
    return Case(AutoregressiveWrapper(net), {"x": ids(32, ROWS, 9)})


def perceiver_io() -> Case:
    from perceiver_pytorch import PerceiverLM

    model = PerceiverLM(
        dim=16, num_tokens=32, max_seq_len=12, depth=2, num_latents=6, latent_dim=16,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8,
    )  # fmt: skip
    return Case(model, {"x": ids(32, ROWS, 12)}, squares)


SEQUENCES: dict[str, Entry] = {
    "Conformer": Entry("conformer", "speech", conformer),
    "WhisperForAudioClassification": Entry("transformers", "speech", whisper),
    "HubertForSequenceClassification": Entry("transformers", "speech", hubert),
    "Wav2Vec2ConformerModel": Entry("transformers", "speech", wav2vec2_conformer),
    "EncodecModel": Entry("transformers", "speech", encodec),
    "SegformerForSemanticSegmentation": Entry("transformers", "segmentation", segformer),
    "YolosForObjectDetection": Entry("transformers", "detection", yolos),
    "S5Block": Entry("s5-pytorch", "state space", s5),
    "Mamba2ForCausalLM": Entry("transformers", "state space", mamba2),
    "RecurrentGemmaForCausalLM": Entry("transformers", "state space", recurrent_gemma),
    "JambaForCausalLM": Entry("transformers", "state space", jamba),
    "RwkvForCausalLM": Entry("transformers", "state space", rwkv),
    "rechub DeepFM": Entry("torch-rechub", "recommendation", rechub_deepfm),
    "HSTUModel": Entry("torch-rechub", "recommendation", hstu),
    "xDeepFM": Entry(
        "deepctr-torch", "recommendation", lambda: deepctr("xDeepFM", cin_layer_size=(8, 8))
    ),
    "AutoInt": Entry("deepctr-torch", "recommendation", lambda: deepctr("AutoInt")),
    "AutoregressiveWrapper": Entry("x-transformers", "text", x_transformer),
    "PerceiverLM": Entry("perceiver-pytorch", "text", perceiver_io),
}
