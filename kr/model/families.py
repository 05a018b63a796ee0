"""Model families: how Hugging Face's config.json names what `ModelConfig` holds."""

from __future__ import annotations

from typing import Any

from kr.model.config import ModelConfig


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """The config.json of the same model as Qwen3ForCausalLM."""
  return {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": cfg.vocab,
    "hidden_size": cfg.width,
    "num_hidden_layers": cfg.layers,
    "num_attention_heads": cfg.heads,
    "num_key_value_heads": cfg.kv_heads,
    "head_dim": cfg.head_dim,
    "intermediate_size": cfg.mlp,
    "rope_theta": cfg.rope_theta,
    "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
    "rms_norm_eps": cfg.norm_eps,
    "tie_word_embeddings": cfg.tied,
    "max_position_embeddings": cfg.max_len,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "initializer_range": 0.02,
  }


def from_hf(data: dict[str, Any]) -> ModelConfig:
  """Reads a config.json; refuses by name whatever would change the result unseen."""
  if data.get("model_type") != "qwen3":
    raise ValueError(
      f"model_type {data.get('model_type')!r} is not supported; supported: 'qwen3'"
    )
  rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind != "default":
    raise ValueError(f"rope_type {kind!r} is not supported; supported: 'default'")
  for key, only in (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("use_sliding_window", False),
  ):
    if data.get(key, only) != only:
      raise ValueError(f"{key}={data[key]!r} is not supported; supported: {only!r}")
  return ModelConfig(
    vocab=data["vocab_size"],
    width=data["hidden_size"],
    layers=data["num_hidden_layers"],
    heads=data["num_attention_heads"],
    kv_heads=data["num_key_value_heads"],
    head_dim=data["head_dim"],
    mlp=data["intermediate_size"],
    rope_theta=float(rope.get("rope_theta", data.get("rope_theta", 1e4))),
    norm_eps=data["rms_norm_eps"],
    tied=data["tie_word_embeddings"],
    max_len=data["max_position_embeddings"],
  )
