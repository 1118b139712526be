"""Tiny random models of any family in transformers: width 32, two layers, 17 tokens."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENS: dict[str, Any] = {"vocab_size": 17, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
# Sizes under every name that some configuration uses; `_config` picks the names that a configuration has.
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "sliding_window": 16,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "n_inner": 48, "dff": 48, "rotary_dim": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "d_model": 32, "num_layers": 2, "num_heads": 4, "kv_channels": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "local_attention": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_expand": 2, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_dt_rank": 4, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "n_mamba_heads": 2, "mamba_headdim": 16, "mamba_ngroups": 1, "ssm_state_size": 8, "state_size": 8, "chunk_size": 8,
    "n_groups": 1, "conv_kernel": 4, "conv_L_cache": 3, "lru_width": 32, "attention_window_size": 16,
    "num_mem_blocks": 1, "adapter_rank": 8, "attention_hidden_size": 32, "use_mamba_kernels": False,
    "attention_head_dim": 8,
}  # fmt: skip
MIXED_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
# Fields that give the tiny model the kinds of layers that the family's large models have.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "bart": {
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    },
    "qwen3_5_text": MIXED_LAYERS,
    "qwen3_next": MIXED_LAYERS,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "mamba2": {"num_heads": 8},
    "deepseek_v2": {"num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "modernbert-decoder": {"bos_token_id": 2},
}  # fmt: skip


def tiny_model(auto_class: Any, family: str, **fields: Any) -> PreTrainedModel:
    """Builds a model with random weights and biases: biases of 0, as in many families, hide effects of padding."""
    config_class = CONFIG_MAPPING[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_class.from_config(
            _config(config_class, FAMILY_FIELDS.get(family, {}) | fields), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    return model


def _config(config_class: Any, fields: dict[str, Any]) -> Any:
    accepted: set[str] = set()
    for base in config_class.__mro__:
        accepted |= {*inspect.get_annotations(base)}
        accepted |= {*inspect.signature(base.__init__).parameters} if "__init__" in vars(base) else set()
    aliases = {*getattr(config_class, "attribute_map", {})}
    return config_class(**{name: size for name, size in TINY.items() if name in accepted - aliases} | TOKENS | fields)
