"""Tiny configurations of keras-hub's multimodal, generative and audio models."""

from collections.abc import Callable

import keras
import keras_hub.models as hub
import numpy as np
from keras_hub import layers
from keras_hub.src.models.gemma3n.gemma3n_audio_encoder import Gemma3nAudioEncoder
from keras_hub.src.models.mobilenetv5.mobilenetv5_builder import convert_arch_def_to_stackwise
from keras_hub.src.models.stable_diffusion_3.t5_encoder import T5Encoder
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

BATCH = 2
LENGTH = 8
TRANSFORMER = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
GROUPED_QUERY = {
    **{"vocabulary_size": 32, "num_layers": 2, "num_query_heads": 2, "num_key_value_heads": 1},
    **{"hidden_dim": 16, "intermediate_dim": 32, "head_dim": 8, "image_size": 16},
}


def _random(model):
    """Replaces the weights that start at zero: they hide the layers behind them."""
    for seed, weight in enumerate(model.trainable_variables):
        if not keras.ops.any(weight):
            weight.assign(keras.random.normal(weight.shape, stddev=0.1, seed=seed))
    return model


def _blip2(language_model, **more):
    options = {"vocabulary_size": 20, "num_query_tokens": 4, "qformer_hidden_dim": 16, "dropout": 0.0}
    encoder = hub.BLIP2VisionEncoder(
        **TRANSFORMER,
        **{"image_size": 32, "patch_size": 8, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6},
        **{"use_patch_bias": True, "use_class_token": True, "use_mha_bias": True, "use_mlp_bias": True},
        initializer_range=0.02,
    )
    qformer = hub.BLIP2QFormer(
        **TRANSFORMER,
        **{"num_query_tokens": 4, "vision_dim": 16, "cross_attention_frequency": 2},
        **{"dropout": 0.0, "layer_norm_epsilon": 1e-6},
    )
    return _random(hub.BLIP2Backbone(encoder, qformer, language_model(**TRANSFORMER, **options, **more)))


def _vision(encoder, **more):
    return encoder(**TRANSFORMER, patch_size=8, image_shape=(32, 32, 3), **more)


def _text(encoder, **more):
    return encoder(**TRANSFORMER, vocabulary_size=20, embedding_dim=16, max_sequence_length=LENGTH, **more)


def _gemma3_vision():
    return hub.Gemma3VisionEncoder(**TRANSFORMER, image_size=16, patch_size=4, pool_size=2, output_dim=16)


def _gemma3(**more):
    return hub.Gemma3Backbone(
        **GROUPED_QUERY,
        **{"use_post_ffw_norm": True, "use_post_attention_norm": True},
        **{"use_sliding_window_attention": True, "sliding_window_size": 4},
        **more,
    )


def _gemma3n(**more):
    backbone = hub.Gemma3nBackbone(
        **{"text_vocab_size": 32, "text_hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": [32, 32]},
        **{"hidden_activation": "gelu_approximate", "activation_sparsity_pattern": [0.95, 0.0]},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 1e6},
        **{"max_position_embeddings": LENGTH, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4},
        **{"altup_num_inputs": 2, "altup_coef_clip": 120.0, "laurel_rank": 2, "final_logit_soft_cap": 30.0},
        **more,
    )
    return _random(backbone)


def _gemma3n_multimodal():
    vision = hub.MobileNetV5Backbone(
        **convert_arch_def_to_stackwise([["er_r1_k3_s1_e1_c8"]]),
        **{"num_features": 8, "image_shape": (32, 32, 3), "use_msfa": False},
    )
    audio = Gemma3nAudioEncoder(
        **{"hidden_size": 16, "input_feat_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"sscp_conv_channel_size": [4, 8], "sscp_conv_kernel_size": [(3, 3), (3, 3)]},
        **{"sscp_conv_stride_size": [(2, 2), (2, 2)], "sscp_conv_group_norm_eps": 1e-5, "rms_norm_eps": 1e-6},
        **{"gradient_clipping": 1.0, "residual_weight": 0.5, "attention_chunk_size": 2, "attention_logit_cap": 50.0},
        **{"num_attention_context_right": 0, "num_attention_context_left": 2},
        **{"conv_kernel_size": 3, "reduction_factor": 1},
    )
    return _gemma3n(
        **{"vision_encoder_config": vision.get_config(), "vision_hidden_size": 8, "image_token_id": 20},
        **{"vision_vocab_offset": 24, "vision_vocab_size": 4, "vision_soft_tokens_per_image": 4},
        **{"audio_encoder_config": audio.get_config(), "audio_hidden_size": 16, "audio_token_id": 21},
        **{"audio_vocab_offset": 28, "audio_vocab_size": 4, "audio_soft_tokens_per_image": 4},
    )


def _gemma4(**more):
    return hub.Gemma4Backbone(
        **GROUPED_QUERY,
        **{"sliding_window_size": 4, "sliding_window_pattern": 2, "final_logit_soft_cap": 30.0},
        **more,
    )


def _gemma4_vision():
    return hub.Gemma4VisionEncoder(
        **TRANSFORMER,
        **{"num_key_value_heads": 2, "head_dim": 8, "output_dim": 16},
        **{"image_size": 16, "patch_size": 4, "pool_size": 2, "position_embedding_size": 8},
    )


def _gemma4_audio():
    return hub.Gemma4AudioEncoder(
        **{"input_feat_size": 8, "hidden_size": 16, "num_heads": 2, "num_layers": 1, "output_proj_dims": 16},
        **{"chunk_size": 4, "context_left": 5, "sscp_conv_channels": (4, 4), "output_dim": 16},
    )


def _t5gemma2(**more):
    sides = {
        **{"hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2, "num_attention_heads": 2, "head_dim": 8},
        **{"num_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"]},
    }
    arguments = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    return hub.T5Gemma2Backbone(vocabulary_size=32, **arguments, sliding_window=4, **more)


def _pali_gemma(**more):
    return hub.PaliGemmaBackbone(
        **GROUPED_QUERY,
        **{"vit_patch_size": 4, "vit_num_layers": 2, "vit_num_heads": 2, "vit_hidden_dim": 16},
        **{"vit_intermediate_dim": 32, **more},
    )


def _sam3():
    transformer = {**TRANSFORMER, "num_layers": 1}
    image = {"image_shape": (28, 28, 3), "patch_size": 14}
    return hub.SAM3PromptableConceptBackbone(
        vision_encoder=layers.SAM3VisionEncoder(
            **TRANSFORMER,
            **image,
            **{"fpn_hidden_dim": 16, "fpn_scale_factors": [4.0, 2.0, 1.0, 0.5], "pretrain_image_shape": (42, 42, 3)},
            **{"window_size": 2, "global_attn_indexes": [1]},
        ),
        text_encoder=layers.SAM3TextEncoder(**transformer, vocabulary_size=32, embedding_dim=16),
        geometry_encoder=layers.SAM3GeometryEncoder(**transformer, roi_size=3),
        detr_encoder=layers.SAM3DetrEncoder(**transformer),
        detr_decoder=layers.SAM3DetrDecoder(**transformer, **image, num_queries=4),
        mask_decoder=layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=16, num_heads=2),
    )


def _stable_diffusion_3(query_key_norm=None, dual_attention_indices=None):
    filters, blocks = [32] * 4, [0] * 4  # the two blocks in the middle remain
    return hub.StableDiffusion3Backbone(
        **{"mmdit_patch_size": 2, "mmdit_hidden_dim": 16, "mmdit_num_layers": 2, "mmdit_num_heads": 2},
        **{"mmdit_position_size": 8, "image_shape": (32, 32, 3)},
        **{"mmdit_qk_norm": query_key_norm, "mmdit_dual_attention_indices": dual_attention_indices},
        vae=VAEBackbone(filters, blocks, filters, blocks, sampler_method="mode"),
        clip_l=_text(hub.CLIPTextEncoder, intermediate_output_index=-2, name="clip_l"),
        clip_g=_text(hub.CLIPTextEncoder, intermediate_output_index=-2, name="clip_g", intermediate_activation="gelu"),
        t5=T5Encoder(**{**TRANSFORMER, "hidden_dim": 32}, vocabulary_size=20, dropout=0.0),
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    "BLIP2Backbone": lambda: _blip2(hub.BLIP2CustomOPT, max_sequence_length=16),
    "BLIP2Backbone T5": lambda: _blip2(hub.BLIP2FlanT5),
    "BLIP2CausalLM": lambda: hub.BLIP2CausalLM(backbone=MODELS["BLIP2Backbone"](), preprocessor=None),
    "BLIP2Seq2SeqLM": lambda: hub.BLIP2Seq2SeqLM(backbone=MODELS["BLIP2Backbone T5"](), preprocessor=None),
    "CLIPTextEncoder": lambda: _text(hub.CLIPTextEncoder),
    "CLIPVisionEncoder": lambda: _vision(hub.CLIPVisionEncoder),
    "CLIPBackbone": lambda: hub.CLIPBackbone(
        _vision(hub.CLIPVisionEncoder), _text(hub.CLIPTextEncoder), projection_dim=16
    ),
    "FluxBackbone": lambda: hub.FluxBackbone(
        **{"input_channels": 16, "hidden_size": 16, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "theta": 10_000},
        **{"depth_single_blocks": 2, "axes_dim": [2, 2, 4], "use_bias": True, "guidance_embed": True},
        **{"image_shape": (4, 16), "text_shape": (LENGTH, 16), "y_shape": (16,)},
        **{"image_ids_shape": (4, 3), "text_ids_shape": (LENGTH, 3)},
    ),
    "FluxTextToImage": lambda: hub.FluxTextToImage(backbone=MODELS["FluxBackbone"](), preprocessor=None),
    "Gemma3Backbone": _gemma3,
    "Gemma3Backbone vision": lambda: _gemma3(vision_encoder=_gemma3_vision()),
    "Gemma3Backbone embedding": lambda: _gemma3(
        is_embedding_model=True, embedding_dim=8, pooling_intermediate_dim=16, use_bidirectional_attention=True
    ),
    "Gemma3CausalLM": lambda: hub.Gemma3CausalLM(backbone=_gemma3(), preprocessor=None),
    "Gemma3TextEmbedder": lambda: hub.Gemma3TextEmbedder(backbone=_gemma3(), pooling_mode="mean"),
    "Gemma3nBackbone": _gemma3n,
    "Gemma3nBackbone multimodal": _gemma3n_multimodal,
    "Gemma3nCausalLM": lambda: hub.Gemma3nCausalLM(backbone=_gemma3n(), preprocessor=None),
    "Gemma4Backbone": _gemma4,
    "Gemma4Backbone vision": lambda: _gemma4(vision_encoder=_gemma4_vision()),
    "Gemma4Backbone audio": lambda: _gemma4(audio_encoder=_gemma4_audio(), num_audio_tokens_per_clip=4),
    "Gemma4Backbone experts": lambda: _random(
        _gemma4(enable_moe_block=True, num_experts=4, expert_intermediate_dim=16, num_experts_per_token=2)
    ),
    "Gemma4Backbone per-layer inputs": lambda: _gemma4(hidden_size_per_layer_input=4, vocab_size_per_layer_input=32),
    "Gemma4CausalLM": lambda: hub.Gemma4CausalLM(backbone=_gemma4(), preprocessor=None),
    "MetaCLIP2TextEncoder": lambda: _text(hub.MetaCLIP2TextEncoder),
    "MetaCLIP2VisionEncoder": lambda: _vision(hub.MetaCLIP2VisionEncoder),
    "MetaCLIP2Backbone": lambda: hub.MetaCLIP2Backbone(
        _vision(hub.MetaCLIP2VisionEncoder), _text(hub.MetaCLIP2TextEncoder), projection_dim=16
    ),
    "MoonshineBackbone": lambda: hub.MoonshineBackbone(
        **{"vocabulary_size": 20, "filter_dim": 16, "hidden_dim": 16, "intermediate_dim": 32},
        **{"encoder_num_layers": 2, "decoder_num_layers": 2, "encoder_num_heads": 2, "decoder_num_heads": 2},
    ),
    "MoonshineAudioToText": lambda: hub.MoonshineAudioToText(backbone=MODELS["MoonshineBackbone"](), preprocessor=None),
    "PaliGemmaBackbone": _pali_gemma,
    "PaliGemmaCausalLM": lambda: hub.PaliGemmaCausalLM(backbone=_pali_gemma(), preprocessor=None),
    "PaliGemmaCausalLM soft cap": lambda: hub.PaliGemmaCausalLM(
        backbone=_pali_gemma(
            **{"final_logit_soft_cap": 30, "attention_logit_soft_cap": 50},
            **{"use_post_ffw_norm": True, "use_post_attention_norm": True},
            **{"use_sliding_window_attention": True, "sliding_window_size": 4},
        ),
        preprocessor=None,
    ),
    "SAM3PromptableConceptBackbone": _sam3,
    "SAM3PromptableConceptImageSegmenter": lambda: hub.SAM3PromptableConceptImageSegmenter(
        backbone=_sam3(), preprocessor=None
    ),
    "SigLIPTextEncoder": lambda: _text(hub.SigLIPTextEncoder),
    "SigLIPVisionEncoder": lambda: _vision(hub.SigLIPVisionEncoder),
    "SigLIPBackbone": lambda: hub.SigLIPBackbone(_vision(hub.SigLIPVisionEncoder), _text(hub.SigLIPTextEncoder)),
    "StableDiffusion3Backbone": _stable_diffusion_3,
    "StableDiffusion3Backbone query-key norm": lambda: _stable_diffusion_3(
        query_key_norm="rms_norm", dual_attention_indices=(0,)
    ),
    "StableDiffusion3ImageToImage": lambda: hub.StableDiffusion3ImageToImage(_stable_diffusion_3(), None),
    "StableDiffusion3Inpaint": lambda: hub.StableDiffusion3Inpaint(_stable_diffusion_3(), None),
    "StableDiffusion3TextToImage": lambda: hub.StableDiffusion3TextToImage(_stable_diffusion_3(), None),
    "T5Gemma2Backbone": _t5gemma2,
    "T5Gemma2Backbone vision": lambda: _t5gemma2(vision_encoder=_gemma3_vision(), eoi_token_index=7),
    "T5Gemma2Seq2SeqLM": lambda: hub.T5Gemma2Seq2SeqLM(backbone=_t5gemma2(), preprocessor=None),
    "WhisperBackbone": lambda: hub.WhisperBackbone(
        **TRANSFORMER,
        **{"vocabulary_size": 20, "num_mels": 8},
        **{"max_encoder_sequence_length": LENGTH, "max_decoder_sequence_length": LENGTH},
    ),
}


def _positions():
    return {"position_ids": np.tile(np.arange(LENGTH, dtype="int32"), (BATCH, 1))}


def _image_tokens():
    indices = np.tile(np.arange(2, 6, dtype="int32"), (BATCH, 1))
    mask = np.zeros((BATCH, LENGTH), "int32")
    mask[:, 2:6] = 1
    return {"vision_indices": indices, "vision_mask": mask}


def _images(side=16):
    return np.random.default_rng(0).normal(size=(BATCH, 1, side, side, 3)).astype("float32")


def _gemma3n_inputs():
    random = np.random.default_rng(0)
    return {
        "token_ids": np.array([[1, 2, 20, 20, 21, 21, 3, 0], [4, 20, 20, 25, 29, 21, 21, 5]], "int32"),
        "images": _images(32),
        "input_features": random.normal(size=(BATCH, 1, 16, 16)).astype("float32"),
        "input_features_mask": np.zeros((BATCH, 1, 16), bool),  # true where a frame is padding
    }


def _gemma4_images():
    grid = np.stack(np.meshgrid(np.arange(4), np.arange(4)), axis=-1).reshape(1, 1, 16, 2).astype("int32")
    pixels = np.random.default_rng(0).uniform(size=(BATCH, 1, 16, 48)).astype("float32")
    positions = np.tile(grid, (BATCH, 1, 1, 1))
    return {**_positions(), **_image_tokens(), "pixel_values": pixels, "pixel_position_ids": positions}


def _gemma4_audio_clips():
    tokens = _image_tokens()
    return {
        **_positions(),
        **{"audio_indices": tokens["vision_indices"], "audio_mask": tokens["vision_mask"]},
        "audio_mel": np.random.default_rng(0).normal(size=(BATCH, 1, 16, 8)).astype("float32"),
        "audio_mel_mask": np.ones((BATCH, 1, 16), "int32"),
    }


def _waveform():
    values = np.random.default_rng(0).normal(size=(BATCH, 3000, 1)).astype("float32")
    return {"encoder_input_values": values, "encoder_padding_mask": np.ones((BATCH, 3000), bool)}


def _boxes():
    boxes = np.array([[[0, 0.5, 0.5, 0.6, 0.4]], [[1, 0.4, 0.6, 0.5, 0.5]]], "float32")  # index, center, size
    return {"boxes": boxes, "box_labels": np.array([[1], [0]], "int32")}


INPUTS: dict[str, Callable[[], dict]] = {
    "Gemma3Backbone vision": lambda: {**_image_tokens(), "images": _images()},
    "Gemma3nBackbone multimodal": _gemma3n_inputs,
    "Gemma4Backbone": _positions,
    "Gemma4Backbone vision": _gemma4_images,
    "Gemma4Backbone audio": _gemma4_audio_clips,
    "Gemma4Backbone experts": _positions,
    "Gemma4Backbone per-layer inputs": _positions,
    "Gemma4CausalLM": _positions,
    "MoonshineBackbone": _waveform,
    "MoonshineAudioToText": _waveform,
    "SAM3PromptableConceptBackbone": _boxes,
    "SAM3PromptableConceptImageSegmenter": _boxes,
    "T5Gemma2Backbone vision": lambda: {**_image_tokens(), "images": _images()},
}

NOT_BUILT: dict[str, str] = {
    "Gemma4AssistantCausalLM": "`call` raises NotImplementedError; it only runs in another model's `generate`",
}
