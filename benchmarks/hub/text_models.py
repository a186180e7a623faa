"""Tiny configurations of keras-hub's text models."""

from collections.abc import Callable

import keras
import keras_hub.models as hub

LAYERS = {"vocabulary_size": 20, "num_layers": 2, "hidden_dim": 16}
SIZES = LAYERS | {"intermediate_dim": 32}
TRANSFORMER = SIZES | {"num_heads": 2}
WITH_POSITIONS = TRANSFORMER | {"max_sequence_length": 8}
WITH_SEGMENTS = WITH_POSITIONS | {"num_segments": 8}
QUERY_GROUPS = {"num_query_heads": 4, "num_key_value_heads": 2}
GROUPED = SIZES | QUERY_GROUPS
EXPERTS = {"num_experts": 4, "top_k": 2}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
LLAMA_3_1_ROPE = {
    "rope_frequency_adjustment_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 8192,
}


def _stacks(**options):
    """Returns the options with each under the name that T5Gemma has for its encoder and its decoder."""
    return {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in options.items()}


T5_GEMMA = {"vocabulary_size": 20, "sliding_window": 4} | _stacks(
    num_layers=2,
    hidden_dim=16,
    intermediate_dim=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=["sliding_attention", "full_attention"],
)
SMOL_LM_3 = SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, False],
    "layer_types": ["full_attention", "full_attention"],
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}

MODELS: dict[str, Callable[[], keras.Model]] = {
    "AlbertBackbone": lambda: hub.AlbertBackbone(embedding_dim=8, **WITH_SEGMENTS),
    "BartBackbone": lambda: hub.BartBackbone(**WITH_POSITIONS),
    "BertBackbone": lambda: hub.BertBackbone(**WITH_SEGMENTS),
    "BloomBackbone": lambda: hub.BloomBackbone(**TRANSFORMER),
    "DebertaV3Backbone": lambda: hub.DebertaV3Backbone(bucket_size=4, **WITH_POSITIONS),
    "DistilBertBackbone": lambda: hub.DistilBertBackbone(**WITH_POSITIONS),
    "ESMBackbone": lambda: hub.ESMBackbone(**TRANSFORMER),
    "ESMBackbone absolute positions": lambda: hub.ESMBackbone(
        position_embedding_type="absolute", use_pre_layer_norm=True, **WITH_POSITIONS
    ),
    "EdRecBackbone": lambda: hub.EdRecBackbone(
        vocab_size=20, num_layers_enc=2, num_layers_dec=2, hidden_dim=16, intermediate_dim=32, num_heads=2
    ),
    "ElectraBackbone": lambda: hub.ElectraBackbone(
        vocab_size=20,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        embedding_dim=8,
        intermediate_dim=32,
        max_sequence_length=8,
        num_segments=8,
    ),
    "FNetBackbone": lambda: hub.FNetBackbone(max_sequence_length=8, num_segments=8, **SIZES),
    "FalconBackbone": lambda: hub.FalconBackbone(num_attention_heads=2, **SIZES),
    "GPT2Backbone": lambda: hub.GPT2Backbone(**WITH_POSITIONS),
    "GPTNeoXBackbone": lambda: hub.GPTNeoXBackbone(**WITH_POSITIONS),
    "GemmaBackbone": lambda: hub.GemmaBackbone(head_dim=8, **GROUPED),
    "GemmaBackbone soft caps": lambda: hub.GemmaBackbone(
        query_head_dim_normalize=False,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=4,
        head_dim=8,
        **GROUPED,
    ),
    "GptOssBackbone": lambda: hub.GptOssBackbone(sliding_window=4, **GROUPED, **EXPERTS),
    "Llama3Backbone": lambda: hub.Llama3Backbone(**GROUPED),
    "Llama3Backbone scaled RoPE": lambda: hub.Llama3Backbone(**GROUPED, **LLAMA_3_1_ROPE),
    "LlamaBackbone": lambda: hub.LlamaBackbone(**GROUPED),
    "MistralBackbone": lambda: hub.MistralBackbone(sliding_window=4, **GROUPED),
    "MixtralBackbone": lambda: hub.MixtralBackbone(sliding_window=4, **GROUPED, **EXPERTS),
    "OPTBackbone": lambda: hub.OPTBackbone(**WITH_POSITIONS),
    "Phi3Backbone": lambda: hub.Phi3Backbone(**GROUPED),
    "Phi3Backbone scaled RoPE": lambda: hub.Phi3Backbone(
        max_sequence_length=16,
        pretraining_sequence_length=4,
        rope_scaling_type="su",
        rope_scaling_short_factor=[1.2, 1.4],
        rope_scaling_long_factor=[0.8, 0.6],
        **GROUPED,
    ),
    "Qwen3Backbone": lambda: hub.Qwen3Backbone(head_dim=8, **GROUPED),
    "Qwen3MoeBackbone": lambda: hub.Qwen3MoeBackbone(
        moe_intermediate_dim=8, norm_top_k_prob=True, head_dim=8, **GROUPED, **EXPERTS
    ),
    "Qwen3_5Backbone": lambda: hub.Qwen3_5Backbone(head_dim=8, **GROUPED, **LINEAR_ATTENTION),
    "Qwen3_5MoeBackbone": lambda: hub.Qwen3_5MoeBackbone(
        moe_intermediate_dim=8,
        shared_expert_intermediate_size=8,
        head_dim=8,
        **LAYERS,
        **QUERY_GROUPS,
        **EXPERTS,
        **LINEAR_ATTENTION,
    ),
    "QwenBackbone": lambda: hub.QwenBackbone(**GROUPED),
    "QwenMoeBackbone": lambda: hub.QwenMoeBackbone(
        moe_intermediate_dim=8, shared_expert_intermediate_dim=8, **GROUPED, **EXPERTS
    ),
    "RWKV7Backbone": lambda: hub.RWKV7Backbone(
        vocabulary_size=20,
        num_layers=2,
        hidden_size=16,
        head_size=8,
        intermediate_dim=32,
        gate_lora=8,
        mv_lora=8,
        aaa_lora=8,
        decay_lora=8,
    ),
    "RobertaBackbone": lambda: hub.RobertaBackbone(**WITH_POSITIONS),
    "RoformerV2Backbone": lambda: hub.RoformerV2Backbone(head_size=8, num_segments=8, **TRANSFORMER),
    "SmolLM3Backbone": lambda: hub.SmolLM3Backbone(**SMOL_LM_3),
    "T5Backbone": lambda: hub.T5Backbone(use_gated_activation=False, **TRANSFORMER),
    "T5Backbone gated": lambda: hub.T5Backbone(activation="gelu", tie_embedding_weights=False, **TRANSFORMER),
    "T5GemmaBackbone": lambda: hub.T5GemmaBackbone(**T5_GEMMA),
    "T5GemmaBackbone soft caps": lambda: hub.T5GemmaBackbone(
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **T5_GEMMA
    ),
    "XLMRobertaBackbone": lambda: hub.XLMRobertaBackbone(**WITH_POSITIONS),
    "XLNetBackbone": lambda: hub.XLNetBackbone(**TRANSFORMER),
}


def _on_backbone(task, variant="", **options):
    """Returns a function that builds a task on its backbone."""
    return lambda: task(MODELS[task.backbone_cls.__name__ + variant](), **options)


CLASSIFIERS = (
    *(hub.AlbertTextClassifier, hub.BertTextClassifier, hub.DebertaV3TextClassifier, hub.DistilBertTextClassifier),
    *(hub.ESMProteinClassifier, hub.FNetTextClassifier, hub.RobertaTextClassifier, hub.RoformerV2TextClassifier),
    hub.XLMRobertaTextClassifier,
)
OTHER_TASKS = (
    *(hub.AlbertMaskedLM, hub.BertMaskedLM, hub.DebertaV3MaskedLM, hub.DistilBertMaskedLM, hub.ESMMaskedPLM),
    *(hub.FNetMaskedLM, hub.RobertaMaskedLM, hub.RoformerV2MaskedLM, hub.XLMRobertaMaskedLM),
    *(hub.BertTextEmbedder, hub.Qwen3TextEmbedder, hub.XLMRobertaTextEmbedder),
    *(hub.BartSeq2SeqLM, hub.EdRecSeq2SeqLM, hub.T5GemmaSeq2SeqLM, hub.T5Seq2SeqLM),
    *(hub.BloomCausalLM, hub.FalconCausalLM, hub.GPT2CausalLM, hub.GPTNeoXCausalLM, hub.GemmaCausalLM),
    *(hub.GptOssCausalLM, hub.Llama3CausalLM, hub.LlamaCausalLM, hub.MistralCausalLM, hub.MixtralCausalLM),
    *(hub.OPTCausalLM, hub.Phi3CausalLM, hub.Qwen3CausalLM, hub.Qwen3MoeCausalLM, hub.Qwen3_5CausalLM),
    *(hub.Qwen3_5MoeCausalLM, hub.QwenCausalLM, hub.QwenMoeCausalLM, hub.RWKV7CausalLM, hub.SmolLM3CausalLM),
)
MODELS |= {task.__name__: _on_backbone(task, num_classes=3) for task in CLASSIFIERS}
MODELS |= {task.__name__: _on_backbone(task) for task in OTHER_TASKS}
MODELS |= {
    "GemmaCausalLM soft caps": _on_backbone(hub.GemmaCausalLM, " soft caps"),
    "T5GemmaSeq2SeqLM soft caps": _on_backbone(hub.T5GemmaSeq2SeqLM, " soft caps"),
    "T5Seq2SeqLM gated": _on_backbone(hub.T5Seq2SeqLM, " gated"),
}

INPUTS: dict[str, Callable[[], dict]] = {}
