"""The shape of a policy: one frozen record, in the vocabulary of Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen3-architecture decoder: RMSNorm, rotary positions, grouped heads, QK norm, SwiGLU.

  vocab (V), width (D), layers (L), heads (H), kv_heads (K), head_dim (h), mlp (F).
  `tied`: the output head is the embedding. `max_len`: longest sequence in tokens.
  """

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope_theta: float = 1e4
  norm_eps: float = 1e-6
  tied: bool = True
  max_len: int = 2048

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
    if self.head_dim % 2:
      raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs")

  def to_hf(self) -> dict[str, Any]:
    """The config.json of the same model as Qwen3ForCausalLM."""
    return {
      "architectures": ["Qwen3ForCausalLM"],
      "model_type": "qwen3",
      "vocab_size": self.vocab,
      "hidden_size": self.width,
      "num_hidden_layers": self.layers,
      "num_attention_heads": self.heads,
      "num_key_value_heads": self.kv_heads,
      "head_dim": self.head_dim,
      "intermediate_size": self.mlp,
      "rope_theta": self.rope_theta,
      "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
      "rms_norm_eps": self.norm_eps,
      "tie_word_embeddings": self.tied,
      "max_position_embeddings": self.max_len,
      "hidden_act": "silu",
      "attention_bias": False,
      "attention_dropout": 0.0,
      "use_sliding_window": False,
      "torch_dtype": "float32",
      "initializer_range": 0.02,
    }

  @classmethod
  def from_hf(cls, data: dict[str, Any]) -> "ModelConfig":
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
    return cls(
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
