"""Configs of small random models: every causal language model class of transformers 5.24, and
models of text with images or sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

NAMES = sorted({c for v in MAPPING.values() for c in (v if isinstance(v, (tuple, list)) else (v,))})
V, D = 320, 32

# Set where the default config has the field.
GENERIC: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    # GPT-2, BART and their like
    "n_embd": D,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "d_model": D,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "ffn_dim": 64,
    "rotary_dim": 4,
    "embedding_size": 16,
    "type_vocab_size": 2,
    "n_heads": 4,
    "n_layers": 2,
    # state spaces
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "chunk_size": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    # scales and caps of the logits
    "logit_scale": 0.25,
    "logits_scaling": 4.0,
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 5.0,
    "lm_head_multiplier": 0.5,
    "output_logit_soft_cap": 5.0,
    "logits_mup_width_multiplier": 2.0,
    "z_loss_coefficient": 0.01,
    "lm_head_bias": True,
    "decoder_bias": True,
}
ZERO = ("dropout", "pdrop", "layerdrop", "jitter_noise")

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MLA = {"num_key_value_heads": 4}
BART = {"encoder_layers": 2}
NEED_BOS = {"bos_token_id": 1, "eos_token_id": V - 1}
TEXT = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
SSM = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": V,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 5.0,
}
BLT = {
    "vocab_size": 260,
    "hidden_size": D,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "cross_attn_k": 2,
    "hidden_size_global": 2 * D,
}


def gemma4_assistant(kind: str) -> dict[str, Any]:
    text = dict(
        TEXT,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        tie_word_embeddings=True,
    )
    if kind == "gemma4":
        text |= {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "model_type": "gemma4_text",
        }
        text["num_kv_shared_layers"] = 2
    else:
        text |= {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 2}
    return {
        "text_config": text,
        "backbone_hidden_size": D,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 2,
    }


SPECIFIC: dict[str, Any] = {
    **dict.fromkeys(
        (
            "AXK1ForCausalLM",
            "AXK2ForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Dots3NoteForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "MiniCPM3ForCausalLM",
            "YoutuForCausalLM",
        ),
        MLA,
    ),
    **dict.fromkeys(
        (
            "BartForCausalLM",
            "BigBirdPegasusForCausalLM",
            "BlenderbotForCausalLM",
            "BlenderbotSmallForCausalLM",
            "MBartForCausalLM",
            "MarianForCausalLM",
            "MvpForCausalLM",
            "PLBartForCausalLM",
            "PegasusForCausalLM",
            "WhisperForCausalLM",
        ),
        BART,
    ),
    "BailingHybridForCausalLM": MLA
    | SSM
    | {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BertLMHeadModel": {"is_decoder": True},
    "BertGenerationDecoder": {"is_decoder": True},
    "BigBirdForCausalLM": {"is_decoder": True, "attention_type": "original_full"},
    "BigBirdPegasusForCausalLM": BART | {"attention_type": "original_full"},
    "BltForCausalLM": {
        "vocab_size": 260,
        "patcher_config": BLT,
        "encoder_config": BLT,
        "decoder_config": BLT,
        "global_config": {k: v for k, v in BLT.items() if k != "vocab_size"}
        | {"hidden_size": 2 * D},
        "encoder_hash_byte_group_vocab": 64,
        "max_position_embeddings": 128,
        "num_hidden_layers": 1,
    },
    "BloomForCausalLM": {"n_head": 4},
    "CTRLLMHeadModel": {"dff": 64},
    "CamembertForCausalLM": {"is_decoder": True},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": ROPE}},
    "CpmAntForCausalLM": {
        "dim_head": 8,
        "dim_ff": 64,
        "prompt_types": 4,
        "prompt_length": 4,
        "position_bias_num_buckets": 32,
        "init_std": 0.1,
    },
    "CwmForCausalLM": NEED_BOS,
    "Data2VecTextForCausalLM": {"is_decoder": True},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DogeForCausalLM": {"keep_window_size": 64},
    "DoryForCausalLM": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "sliding_window": 64,
    },
    "ElectraForCausalLM": {"is_decoder": True},
    "Emu3ForCausalLM": NEED_BOS | {"attention_dropout": 0.0},
    "ErnieForCausalLM": {"is_decoder": True},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "use_bias": True},
    "FalconForCausalLM": {"num_kv_heads": 4, "ffn_hidden_size": 64},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
    },
    "FuyuForCausalLM": {
        "text_config": {
            k: v for k, v in TEXT.items() if k not in ("head_dim", "num_key_value_heads")
        }
        | {"model_type": "persimmon", "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "image_token_id": 300,
        "patch_size": 4,
        "image_size": 16,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT | {"sliding_window": 8, "final_logit_softcapping": 5.0},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "boi_token_index": 301,
        "eoi_token_index": 302,
        "image_token_index": 303,
    },
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "Gemma4AssistantForCausalLM": lambda: gemma4_assistant("gemma4"),
    "Gemma4UnifiedAssistantForCausalLM": lambda: gemma4_assistant("unified"),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {
        "text_config": TEXT | GEMMA4,
        "image_token_id": 303,
        "audio_token_id": 304,
        "video_token_id": 305,
        "boi_token_id": 306,
        "eoi_token_id": 307,
        "boa_token_id": 308,
        "eoa_token_index": 309,
    },
    "Gemma4UnifiedForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": TEXT
        | {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 5.0},
        "image_token_id": 303,
        "audio_token_id": 304,
        "video_token_id": 305,
        "boi_token_id": 306,
        "eoi_token_id": 307,
        "boa_token_id": 308,
        "eoa_token_index": 309,
    },
    "GitForCausalLM": {"vision_config": VISION},
    "GotOcr2ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "image_token_index": 303,
        "vision_config": {
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 16,
            "mlp_dim": 32,
            "global_attn_indexes": [0],
        },
    },
    "GraniteMoeHybridForCausalLM": SSM | {"shared_intermediate_size": 32},
    "GraniteMoeSharedForCausalLM": {"shared_intermediate_size": 32},
    "GraniteMoeSWAForCausalLM": {"shared_intermediate_size": 32},
    "HunYuanMoEV1ForCausalLM": {"moe_topk": 2},
    "HYV4ForCausalLM": MLA,
    "InklingForCausalLM": {"unpadded_vocab_size": None},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": V},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": V},
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "JetMoeForCausalLM": {"kv_channels": 8},
    "KimiLinearForCausalLM": MLA
    | SSM
    | {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "LaraMiniForCausalLM": {},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 64, "attention_chunk_size": 64},
    "LongcatFlashForCausalLM": MLA
    | {
        "num_layers": 1,
        "ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MarianForCausalLM": BART | {"decoder_vocab_size": V},
    "MegatronBertForCausalLM": {"is_decoder": True},
    "MiniCPM3ForCausalLM": MLA | {"dim_model_base": 8},
    "MllamaForCausalLM": NEED_BOS | {"cross_attention_layers": [1]},
    "ModernBertDecoderForCausalLM": NEED_BOS | {"local_attention": 64},
    "MossTranscribeDiarizeForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "audio_token_id": 303,
        "audio_config": {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 64,
        },
    },
    "MoshiForCausalLM": {"sliding_window": 64},
    "MusicgenForCausalLM": {},
    "MusicgenMelodyForCausalLM": {},
    "NemotronHForCausalLM": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "OPTForCausalLM": {"word_embed_proj_dim": 16},
    "OlmoHybridForCausalLM": SSM,
    "OpenAIGPTLMHeadModel": {},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 128},
    "Phi4MultimodalForCausalLM": {
        "original_max_position_embeddings": 128,
        "vision_config": VISION | {"crop_size": 16, "image_token_id": 303, "feature_layer": -1},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
            "input_size": 16,
            "audio_token_id": 304,
            "dropout_rate": 0.0,
        },
    },
    "PhiForCausalLM": {},
    "ProphetNetForCausalLM": {
        "num_decoder_layers": 2,
        "num_encoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
    },
    "Qwen3NextForCausalLM": SSM,
    "Qwen3_5ForCausalLM": SSM,
    "Qwen3_5MoeForCausalLM": SSM,
    "Qwen4ExpForCausalLM": SSM
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 32,
        "hc_lowrank": 8,
    },
    "RecurrentGemmaForCausalLM": {
        "num_hidden_layers": 3,
        "lru_width": D,
        "num_key_value_heads": 4,
        "attention_window_size": 64,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "RemBertForCausalLM": {
        "is_decoder": True,
        "input_embedding_size": 16,
        "output_embedding_size": 24,
    },
    "RoCBertForCausalLM": {
        "is_decoder": True,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": V,
        "shape_vocab_size": V,
    },
    "RoFormerForCausalLM": {"is_decoder": True},
    "RobertaForCausalLM": {"is_decoder": True},
    "RobertaPreLayerNormForCausalLM": {"is_decoder": True},
    "RwkvForCausalLM": {"attention_hidden_size": D, "context_length": 128},
    "SeedOssForCausalLM": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "XLMRobertaForCausalLM": {"is_decoder": True},
    "XLMRobertaXLForCausalLM": {"is_decoder": True},
    "XLMWithLMHeadModel": {"emb_dim": D},
    "XGLMForCausalLM": {"attention_heads": 4, "num_layers": 2},
    "XLNetLMHeadModel": {"d_head": 8, "d_inner": 64},
    "XmodForCausalLM": {"is_decoder": True, "default_language": "en_XX"},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 5,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    },
    "ZambaForCausalLM": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
        "layers_block_type": [
            "linear_attention",
            "linear_attention",
            "hybrid",
            "linear_attention",
            "hybrid",
            "hybrid",
        ],
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "num_heads": 4},
    "GPTNeoForCausalLM": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "AriaTextForCausalLM": {"moe_num_experts": 4, "moe_num_shared_experts": 1},
    "DeepseekV4ForCausalLM": {"o_groups": 2, "o_lora_rank": 8, "qk_rope_head_dim": 4},
}
DROP: dict[str, tuple[str, ...]] = {
    "InklingForCausalLM": (),
    "NemotronHForCausalLM": ("num_hidden_layers",),
    "FuyuForCausalLM": ("vocab_size",),
}


MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
QWEN_IDS = {
    "image_token_id": 303,
    "video_token_id": 304,
    "vision_start_token_id": 305,
    "vision_end_token_id": 306,
}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
LLAMA = TEXT | {"model_type": "llama"}
VLMS = {
    "LlavaForConditionalGeneration": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": 303,
    },
    "LlavaNextForConditionalGeneration": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": 303,
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SIGLIP,
        "image_token_index": 303,
        "video_token_index": 304,
    },
    "VipLlavaForConditionalGeneration": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_token_index": 303,
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": D,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        **QWEN_IDS,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": D,
            "num_heads": 2,
            "intermediate_size": 32,
            "fullatt_block_indexes": [0],
        },
        **QWEN_IDS,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": D,
            "num_heads": 2,
            "intermediate_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **QWEN_IDS,
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": TEXT
        | MROPE
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": D,
            "num_heads": 2,
            "intermediate_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **QWEN_IDS,
    },
    "Qwen3_5ForConditionalGeneration": {
        "text_config": TEXT
        | SSM
        | {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0},
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": D,
            "num_heads": 2,
            "intermediate_size": 32,
            "num_position_embeddings": 16,
        },
        **QWEN_IDS,
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 303,
        "spatial_merge_size": 2,
    },
    "Idefics2ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION,
        "perceiver_config": {
            "hidden_size": D,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "num_key_value_heads": 1,
            "resampler_head_dim": 8,
        },
        "image_token_id": 303,
    },
    "Idefics3ForConditionalGeneration": {
        "text_config": LLAMA,
        "vision_config": VISION,
        "image_token_id": 303,
        "scale_factor": 2,
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": LLAMA,
        "vision_config": VISION,
        "image_token_id": 303,
        "scale_factor": 2,
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": SIGLIP | {"projection_dim": D, "vocab_size": V},
        "image_token_index": 303,
        "projection_dim": D,
        "hidden_size": D,
    },
    "InternVLForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [16, 16], "patch_size": [8, 8]},
        "image_token_id": 303,
        "downsample_ratio": 0.5,
    },
    "MllamaForConditionalGeneration": {
        "text_config": TEXT | NEED_BOS | {"cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 16,
            "patch_size": 8,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
            "max_num_tiles": 1,
        },
        "image_token_index": 303,
    },
    "ChameleonForConditionalGeneration": {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 16,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "resolution": 16,
            "latent_channels": 8,
        },
        "vocabulary_map": {
            "<image>": 303,
            **{f"IMGIMG{c}Z": 300 + i for i, c in enumerate("ABCDEFGH") if 300 + i != 303},
        },
    },
    "AriaForConditionalGeneration": {
        "text_config": TEXT
        | {
            "model_type": "aria_text",
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        "vision_config": VISION | {"model_type": "idefics3_vision"},
        "image_token_index": 303,
        "projector_patch_to_query_dict": {4: 2},
    },
    "Blip2ForConditionalGeneration": {
        "text_config": {
            "model_type": "opt",
            "vocab_size": V,
            "hidden_size": D,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": D,
            "max_position_embeddings": 128,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "vision_config": VISION,
        "qformer_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "encoder_hidden_size": 16,
            "vocab_size": V,
        },
        "num_query_tokens": 2,
        "image_token_index": 303,
    },
    "Kosmos2ForConditionalGeneration": {
        "text_config": {
            "vocab_size": V,
            "embed_dim": D,
            "layers": 2,
            "ffn_dim": 64,
            "attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 128,
            "pad_token_id": 1,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "vision_config": VISION,
        "latent_query_num": 4,
    },
    "Emu3ForConditionalGeneration": {
        "text_config": TEXT | NEED_BOS | {"attention_dropout": 0.0},
        "vq_config": {
            "codebook_size": 16,
            "embed_dim": 8,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
        "vocabulary_map": {"<image>": 303},
    },
    "Qwen2AudioForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
        "audio_token_index": 303,
    },
    "VoxtralForConditionalGeneration": {
        "text_config": LLAMA,
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
        "audio_token_id": 303,
    },
    "Lfm2VlForConditionalGeneration": {
        "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 8,
            "num_patches": 4,
        },
        "image_token_id": 303,
    },
    "Glm4vForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": D,
            "intermediate_size": 32,
            "image_size": 28,
        },
        "image_token_id": 303,
        "video_token_id": 304,
        "image_start_token_id": 305,
        "image_end_token_id": 306,
        "video_start_token_id": 307,
        "video_end_token_id": 308,
    },
    "Cohere2VisionForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "cohere2", "logit_scale": 0.25},
        "vision_config": SIGLIP,
        "image_token_id": 303,
    },
    "AyaVisionForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "cohere2", "logit_scale": 0.25},
        "vision_config": SIGLIP,
        "image_token_index": 303,
    },
    "T5ForConditionalGeneration": {
        "decoder_start_token_id": 0,
        "vocab_size": V,
        "d_model": D,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
    },
}
for _name, _values in VLMS.items():
    SPECIFIC[_name] = _values
    DROP[_name] = tuple(GENERIC)


def small_values(config_class: type, drop: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        fields = config_class().to_dict()
    except Exception:
        fields = {}
    values: dict[str, Any] = {k: v for k, v in GENERIC.items() if k in fields and k not in drop}
    for name, value in fields.items():
        if any(z in name for z in ZERO) and isinstance(value, float):
            values[name] = 0.0
    values |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return values


def build(name: str, **more: Any) -> Any:
    model_class = getattr(transformers, name)
    values = small_values(model_class.config_class, DROP.get(name, ()))
    extra = SPECIFIC.get(name, {})
    if callable(extra):
        extra = extra()
    config = model_class.config_class(**(values | extra | more))
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing may be equal by its initial value alone
            if parameter.is_floating_point() and parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        layer = model.get_output_embeddings()
        for each in layer if isinstance(layer, torch.nn.ModuleList) else [layer]:
            if getattr(each, "weight", None) is not None:
                each.weight.normal_()
            if isinstance(getattr(each, "bias", None), torch.Tensor):
                each.bias.normal_()
    return model
