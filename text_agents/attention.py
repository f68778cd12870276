"""Attention of several query heads to one key head, without copying keys (a CPU is bound by that copy).

transformers repeats keys and values for every query head as soon as there is a mask. With the packaged SmolLM2 (9 query
heads, 3 key heads), 16 conversations and 900 tokens read, a token's attention then takes 4 to 5 times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, T, H, D] of query [B, H, T, D] to key and value [B, K, S, D], K a divisor of H, by transformers' interface.

    A single query (T = 1, sampling) becomes H / K queries of its key head; more are left to torch's own grouping.
    """
    b, heads, t, d = query.shape
    key_heads = key.shape[1]
    options = {"attn_mask": attention_mask, "dropout_p": dropout, "scale": scaling}
    if t == 1 and (attention_mask is None or attention_mask.shape[1] == 1):  # one mask for all heads
        folded = query.reshape(b, key_heads, heads // key_heads, d)
        out = scaled_dot_product_attention(folded, key, value, **options).reshape(b, heads, 1, d)
    else:
        causal = t > 1 and attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        out = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=heads != key_heads, **options)
    return out.transpose(1, 2).contiguous(), None


def use_grouped(model: Any) -> None:
    """Lets a causal language model attend in this way where it has grouped heads and takes attention functions."""
    config = model.config
    grouped = getattr(config, "num_key_value_heads", None) not in (None, getattr(config, "num_attention_heads", None))
    if grouped and model._supports_attention_backend:
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
