"""Tiny configurations of keras-hub's image models."""

from collections.abc import Callable

import keras
import keras_hub.layers as hub_layers
import keras_hub.models as hub
import numpy as np

SHAPE = (32, 32, 3)


def _resnet(levels=4, **more):
    """Returns a network with levels P2, P3, ...; keras-hub requires 64 filters in the first stack."""
    options = {
        "input_conv_filters": [8],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 8, 8, 8][:levels],
        "stackwise_num_blocks": [1] * levels,
        "stackwise_num_strides": [1, 2, 2, 2][:levels],
        "block_type": "basic_block_vd",
    }
    return hub.ResNetBackbone(**options | more)


def _hgnet(**more):
    return hub.HGNetV2Backbone(
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=True,
        stackwise_stage_filters=[[8, 8, 16, 1, 1, 3], [16, 8, 32, 1, 2, 3]],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, True],
        **more,
    )


def _d_fine(**more):
    encoder = {
        "encoder_in_channels": [16, 32],
        "encoder_hidden_dim": 16,
        "encoder_ffn_dim": 32,
        "num_encoder_layers": 1,
    }
    decoder = {"decoder_in_channels": [16, 16], "hidden_dim": 16, "decoder_ffn_dim": 32, "num_decoder_layers": 2}
    attention = {"num_attention_heads": 2, "decoder_attention_heads": 2, "decoder_n_points": [2, 2]}
    options = encoder | decoder | attention | {"num_denoising": 0, "learn_initial_query": False} | more
    return hub.DFineBackbone(
        backbone=_hgnet(out_features=["stage1", "stage2"]),
        num_labels=4,
        num_queries=10,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        encode_proj_layers=[1],
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        lqe_hidden_dim=16,
        num_lqe_layers=2,
        out_features=["stage1", "stage2"],
        seed=0,
        **options,
    )


def _dino(cls, **more):
    sizes = {"patch_size": 4, "num_layers": 3, "hidden_dim": 16, "num_heads": 2, "intermediate_dim": 32}
    return cls(**sizes | {"num_register_tokens": 2, "image_shape": SHAPE} | more)


def _dino_v2(**more):
    return _dino(hub.DINOV2Backbone, position_embedding_shape=(24, 24, 3), **more)


def _mobilenet_v5(**more):
    return hub.MobileNetV5Backbone(
        stackwise_block_types=[["er"], ["uir", "mqa"]],
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=[[8], [16, 16]],
        stackwise_strides=[[2], [2, 1]],
        stackwise_act_layers=[["gelu"], ["gelu", "gelu"]],
        stackwise_exp_ratios=[[4.0], [4.0, 0.0]],
        stackwise_se_ratios=[[0.0], [0.0, 0.0]],
        stackwise_dw_kernel_sizes=[[0], [3, 3]],
        stackwise_dw_start_kernel_sizes=[[0], [3, 0]],
        stackwise_dw_end_kernel_sizes=[[0], [0, 0]],
        stackwise_exp_kernel_sizes=[[3], [0, 0]],
        stackwise_pw_kernel_sizes=[[1], [0, 0]],
        stackwise_num_heads=[[0], [0, 2]],
        stackwise_key_dims=[[0], [0, 8]],
        stackwise_value_dims=[[0], [0, 8]],
        stackwise_kv_strides=[[0], [0, 2]],
        stackwise_use_cpe=[[False], [False, False]],
        stem_size=8,
        num_features=16,
        msfa_output_resolution=4,
        layer_scale_init_value=1.0,
        image_shape=SHAPE,
        **more,
    )


def _vit(**more):
    sizes = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return hub.ViTBackbone(image_shape=SHAPE, **sizes, **more)


def _vit_det(**more):
    sizes = {"hidden_size": 16, "num_layers": 2, "intermediate_dim": 32, "num_heads": 2, "patch_size": 4}
    windows = {"global_attention_layer_indices": [1], "window_size": 4}
    return hub.ViTDetBackbone(image_shape=SHAPE, num_output_channels=16, **sizes, **windows, **more)


def _sam():
    prompt_encoder = hub_layers.SAMPromptEncoder(
        hidden_size=16, image_embedding_size=(8, 8), input_image_size=(32, 32), mask_in_channels=16
    )
    sizes = {"hidden_size": 16, "intermediate_dim": 32, "embedding_dim": 16, "iou_head_hidden_dim": 16}
    mask_decoder = hub_layers.SAMMaskDecoder(num_layers=2, num_heads=2, **sizes)
    return hub.SAMBackbone(image_encoder=_vit_det(), prompt_encoder=prompt_encoder, mask_decoder=mask_decoder)


def _sam_inputs():
    random = np.random.default_rng(0)
    return {
        "points": random.uniform(0, 32, (2, 3, 2)).astype("float32"),
        "labels": np.float32([[1, 0, -1]] * 2),  # foreground, background, padding
        "boxes": np.sort(random.uniform(0, 32, (2, 1, 2, 2)), axis=2).astype("float32"),
        "masks": random.normal(size=(2, 1, 32, 32, 1)).astype("float32"),
    }


def _depth_anything():
    return hub.DepthAnythingBackbone(
        image_encoder=_dino_v2(apply_layernorm=True),
        reassemble_factors=[2, 1, 0.5],
        neck_hidden_dims=[8, 16, 16],
        fusion_hidden_dim=16,
        head_hidden_dim=16,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3"],
    )


def _task(name, **more):
    """Returns the named task on its backbone of this table."""
    cls = getattr(hub, name)
    return cls(backbone=MODELS[cls.backbone_cls.__name__](), **{"preprocessor": None} | more)


def _classifier(name, **more):
    return lambda: _task(name, num_classes=10, **more)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "BASNetBackbone": lambda: hub.BASNetBackbone(
        image_encoder=_resnet(input_conv_filters=[2]), num_classes=1, projection_filters=2
    ),
    "BASNetImageSegmenter": lambda: _task("BASNetImageSegmenter"),
    "CSPNetBackbone": lambda: hub.CSPNetBackbone(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 2],
        stackwise_strides=2,
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="csp",
        bottle_ratio=(0.5, 1.0),
        block_ratio=(1.0, 0.5),
        expand_ratio=(2.0, 1.0),
        stem_padding="same",
        down_growth=True,
    ),
    "CSPNetImageClassifier": _classifier("CSPNetImageClassifier"),
    "DFineBackbone": _d_fine,
    "DFineBackbone denoising": lambda: _d_fine(
        num_denoising=10,
        labels=[{"boxes": np.array([[0.5, 0.5, 0.2, 0.2]]), "labels": np.array([label])} for label in (1, 2)],
    ),
    "DFineObjectDetector": lambda: _task("DFineObjectDetector", num_classes=4),
    "DINOV2Backbone": _dino_v2,
    "DINOV2Backbone gated": lambda: _dino_v2(use_swiglu_ffn=True),
    "DINOV3Backbone": lambda: _dino(hub.DINOV3Backbone),
    "DINOV3Backbone gated": lambda: _dino(hub.DINOV3Backbone, use_gated_mlp=True, hidden_activation="silu"),
    "DeepLabV3Backbone": lambda: hub.DeepLabV3Backbone(
        image_encoder=_resnet(levels=3),
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[2],
        low_level_feature_key="P2",
        projection_filters=8,
        image_shape=SHAPE,
    ),
    "DeepLabV3ImageSegmenter": lambda: _task("DeepLabV3ImageSegmenter", num_classes=4),
    "DeiTBackbone": lambda: hub.DeiTBackbone(
        image_shape=SHAPE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32
    ),
    "DeiTImageClassifier": _classifier("DeiTImageClassifier"),
    "DenseNetBackbone": lambda: hub.DenseNetBackbone(stackwise_num_repeats=[2, 2], growth_rate=4),
    "DenseNetImageClassifier": _classifier("DenseNetImageClassifier"),
    "DepthAnythingBackbone": _depth_anything,
    "DepthAnythingDepthEstimator": lambda: _task("DepthAnythingDepthEstimator", depth_estimation_type="relative"),
    "DepthAnythingDepthEstimator metric": lambda: _task(
        "DepthAnythingDepthEstimator", depth_estimation_type="metric", max_depth=80.0
    ),
    "EfficientNetBackbone": lambda: hub.EfficientNetBackbone(
        stackwise_kernel_sizes=[3] * 3,
        stackwise_num_repeats=[1, 1, 2],
        stackwise_input_filters=[8, 8, 16],
        stackwise_output_filters=[8, 16, 16],
        stackwise_expansion_ratios=[1, 4, 4],
        stackwise_squeeze_and_excite_ratios=[0, 0.25, 0.25],
        stackwise_strides=[1, 2, 2],
        stackwise_block_types=["fused", "unfused", "v1"],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        num_features=32,
    ),
    "EfficientNetImageClassifier": _classifier("EfficientNetImageClassifier"),
    "HGNetV2Backbone": _hgnet,
    "HGNetV2ImageClassifier": _classifier("HGNetV2ImageClassifier"),
    "MiTBackbone": lambda: hub.MiTBackbone(
        layerwise_depths=[1, 2],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[4, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=SHAPE,
        hidden_dims=[8, 16],
    ),
    "MiTImageClassifier": _classifier("MiTImageClassifier"),
    "MobileNetBackbone": lambda: hub.MobileNetBackbone(
        stackwise_expansion=[[16], [32, 32]],
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=[[8], [16, 16]],
        stackwise_kernel_size=[[3], [5, 5]],
        stackwise_num_strides=[[2], [2, 1]],
        stackwise_se_ratio=[[None], [0.25, 0.25]],
        stackwise_activation=[["relu"], ["hard_swish"] * 2],
        stackwise_padding=[[1], [2, 2]],
        output_num_filters=32,
        depthwise_filters=8,
        depthwise_stride=1,
        depthwise_residual=False,
        last_layer_filter=32,
        squeeze_and_excite=0.5,
        input_num_filters=8,
    ),
    "MobileNetImageClassifier": _classifier("MobileNetImageClassifier", num_features=16),
    "MobileNetV5Backbone": _mobilenet_v5,
    "MobileNetV5ImageClassifier": lambda: hub.MobileNetV5ImageClassifier(
        backbone=_mobilenet_v5(use_msfa=False), num_classes=10, head_hidden_size=32
    ),
    "PARSeqBackbone": lambda: hub.PARSeqBackbone(
        image_encoder=_vit(use_class_token=False),
        vocabulary_size=24,
        max_label_length=8,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
    ),
    "PARSeqCausalLM": lambda: _task(
        "PARSeqCausalLM", preprocessor=hub.PARSeqCausalLMPreprocessor(tokenizer=hub.PARSeqTokenizer())
    ),
    "ResNetBackbone": _resnet,
    "ResNetBackbone pre-activation": lambda: _resnet(block_type="bottleneck_block", use_pre_activation=True),
    "ResNetImageClassifier": _classifier("ResNetImageClassifier"),
    "RetinaNetBackbone": lambda: hub.RetinaNetBackbone(
        image_encoder=_resnet(), min_level=4, max_level=5, use_p5=False, image_shape=SHAPE
    ),
    "RetinaNetObjectDetector": lambda: _task(
        "RetinaNetObjectDetector", num_classes=4, pre_logits_num_conv_layers=1, use_prediction_head_norm=True
    ),
    "SAMBackbone": _sam,
    "SAMImageSegmenter": lambda: _task("SAMImageSegmenter"),
    "SegFormerBackbone": lambda: hub.SegFormerBackbone(image_encoder=MODELS["MiTBackbone"](), projection_filters=16),
    "SegFormerImageSegmenter": lambda: _task("SegFormerImageSegmenter", num_classes=4),
    "SwinTransformerBackbone": lambda: hub.SwinTransformerBackbone(
        image_shape=SHAPE, embed_dim=16, depths=(2, 2), num_heads=(2, 2), window_size=4
    ),
    "SwinTransformerImageClassifier": _classifier("SwinTransformerImageClassifier"),
    "VGGBackbone": lambda: hub.VGGBackbone(stackwise_num_repeats=[1, 2], stackwise_num_filters=[8, 16]),
    "VGGImageClassifier": _classifier("VGGImageClassifier", pooling_hidden_dim=16),
    "ViTBackbone": _vit,
    "ViTImageClassifier": _classifier("ViTImageClassifier"),
    "ViTDetBackbone": _vit_det,
    "VideoPrismBackbone video": lambda: hub.VideoPrismBackbone(
        num_frames=4,
        patch_size=8,
        hidden_dim=16,
        intermediate_dim=32,
        num_heads=2,
        num_spatial_layers=1,
        num_temporal_layers=1,
        num_auxiliary_layers=0,
        attention_logit_soft_cap=50.0,
        image_shape=SHAPE,
    ),
    "XceptionBackbone": lambda: hub.XceptionBackbone(
        stackwise_conv_filters=[[8, 8], [16, 16], [16, 16], [32, 32]], stackwise_pooling=[False, True, False, False]
    ),
    "XceptionImageClassifier": _classifier("XceptionImageClassifier"),
}

INPUTS: dict[str, Callable[[], dict]] = {"SAMBackbone": _sam_inputs, "SAMImageSegmenter": _sam_inputs}

NOT_BUILT: dict[str, str] = {"FeaturePyramidBackbone": "a base class without layers of its own"}
