"""Model families: how Hugging Face's config.json names what `ModelConfig` holds.

Llama 2 and 3 (SmolLM2 too), Qwen2 and 2.5, Qwen3, Qwen3-MoE, and DeepSeek-V3, whose
architecture Moonlight and Kimi-K2 have. Every key of a config.json is either read, or checked to
have the one value that kr computes, or known not to change the result; any other is refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kr.model.config import MlaConfig, ModelConfig, MoeConfig, RopeScaling
from kr.model.keys import Keys, REQUIRED

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "deepseek_v3": "DeepseekV3ForCausalLM",
}
_SAME = {"kimi_k2": "deepseek_v3"}  # Moonshot AI's name for DeepSeek-V3's architecture

# -------------------------------------------------------------------- reading


def from_hf(data: dict[str, Any]) -> ModelConfig:
  """Reads a config.json.

  Raises ValueError naming the architecture, key or value that kr does not compute, KeyError
  for a key that is missing.
  """
  if not isinstance(data, dict):
    raise ValueError(f"not a config: {str(data)[:40]!r}")
  family = str(data.get("model_type"))
  family = _SAME.get(family, family)
  if family not in ARCHITECTURES:
    raise ValueError(f"model_type {data.get('model_type')!r} is not supported; supported: "
                     f"{', '.join(sorted({*ARCHITECTURES, *_SAME}))}")
  names = data.get("architectures") or [ARCHITECTURES[family]]
  if names != [ARCHITECTURES[family]]:
    raise ValueError(f"architecture {', '.join(names)} is not supported for model_type "
                     f"{data['model_type']!r}; supported: {ARCHITECTURES[family]}")
  keys = Keys(data)
  for key, allowed in {"hidden_act": ["silu"], "attention_dropout": [0.0],
                       "rope_interleaved": [False], "is_encoder_decoder": [False],
                       "is_decoder": [False], "add_cross_attention": [False],
                       "cross_attention_hidden_size": [], "tie_encoder_decoder": [False],
                       "quantization_config": [], "pruned_heads": [{}]}.items():
    keys.only(key, *allowed)
  kinds = _deepseek if family == "deepseek_v3" else _heads
  fields = kinds(keys, family)
  theta, scaling = _rope(keys, fields["max_len"])
  if scaling and family == "deepseek_v3" and scaling.mscale_all_dim:
    m = fields["mla"]  # DeepSeek-V3's own code: the softmax is sharpened as the context grows
    scale = _mscale(scaling.factor, scaling.mscale_all_dim)
    fields["attention_scale"] = (m.nope + m.rope) ** -0.5 * scale * scale
  cfg = ModelConfig(family=family, rope_theta=theta, rope_scaling=scaling, **fields)
  keys.end()
  return cfg


def _heads(keys: Keys, family: str) -> dict[str, Any]:
  """The families with grouped heads."""
  fields = _common(keys)
  fields["head_dim"] = keys.take(
    "head_dim", REQUIRED if family == "qwen3" else fields["width"] // fields["heads"])
  bias = family != "qwen2" and keys.flag("attention_bias", False)
  fields |= {
    "qk_norm": family in ("qwen3", "qwen3_moe"),
    "qkv_bias": bias or family == "qwen2",  # in Qwen2 it goes without saying
    "out_bias": bias,
    "mlp_bias": family == "llama" and keys.flag("mlp_bias", False),
  }
  if family != "llama":
    fields |= _window(keys, family, fields["layers"])
  if family == "qwen3_moe":
    dense, step = set(keys.take("mlp_only_layers", ())), keys.take("decoder_sparse_step", 1)
    fields["moe"] = MoeConfig(
      experts=_either(keys, "num_experts", "num_local_experts"),
      active=keys.take("num_experts_per_tok"),
      mlp=keys.take("moe_intermediate_size"), normalise=keys.flag("norm_topk_prob", False),
      layers=tuple(i for i in range(fields["layers"]) if i not in dense and (i + 1) % step == 0))
  return fields


def _either(keys: Keys, name: str, other: str) -> Any:
  """A value that has two names."""
  value = keys.take(name, keys.take(other, None))
  if value is None:
    raise KeyError(name)
  keys.only(other, value)
  return value


def _deepseek(keys: Keys, family: str) -> dict[str, Any]:
  """Latent attention and experts chosen by sigmoid."""
  del family
  fields = _common(keys)
  keys.only("topk_method", "noaux_tc")
  keys.only("scoring_func", "sigmoid")
  if fields["kv_heads"] != fields["heads"]:
    raise ValueError(f"num_key_value_heads={fields['kv_heads']} is not supported; supported: "
                     f"num_attention_heads ({fields['heads']})")
  mla = MlaConfig(
    q_rank=keys.take("q_lora_rank", 0), kv_rank=keys.take("kv_lora_rank"),
    nope=keys.take("qk_nope_head_dim"), rope=keys.take("qk_rope_head_dim"),
    value=keys.take("v_head_dim"), interleaved=keys.flag("rope_interleave", True))
  keys.only("head_dim", mla.rope)  # both are derived: transformers writes them down
  keys.only("qk_head_dim", mla.nope + mla.rope)
  first, step = keys.take("first_k_dense_replace"), keys.take("moe_layer_freq", 1)
  moe = MoeConfig(
    experts=_either(keys, "n_routed_experts", "num_local_experts"),
    active=keys.take("num_experts_per_tok"),
    mlp=keys.take("moe_intermediate_size"), score="sigmoid",
    normalise=keys.take("norm_topk_prob"), groups=keys.take("n_group"),
    active_groups=keys.take("topk_group"), scaling=float(keys.take("routed_scaling_factor")),
    shared=keys.take("n_shared_experts"),
    layers=tuple(i for i in range(fields["layers"]) if i >= first and i % step == 0))
  bias = keys.flag("attention_bias", False)
  return fields | {"head_dim": mla.nope + mla.rope, "qk_norm": False, "qkv_bias": bias,
                   "out_bias": bias, "mla": mla, "moe": moe}


def _common(keys: Keys) -> dict[str, Any]:
  heads = keys.take("num_attention_heads")
  return {
    "vocab": keys.take("vocab_size"),
    "width": keys.take("hidden_size"),
    "layers": keys.take("num_hidden_layers"),
    "heads": heads,
    "kv_heads": keys.take("num_key_value_heads", heads),
    "mlp": keys.take("intermediate_size"),
    "norm_eps": keys.take("rms_norm_eps"),
    "tied": keys.flag("tie_word_embeddings", False),
    "max_len": keys.take("max_position_embeddings"),
  }


def _window(keys: Keys, family: str, layers: int) -> dict[str, Any]:
  """Which layers look back how far. Qwen3-MoE: all or none."""
  used = keys.flag("use_sliding_window", False)
  size = keys.take("sliding_window", REQUIRED if used else 0)  # transformers' default: 4,096
  after = keys.take("max_window_layers", 0 if family == "qwen3_moe" else 28)
  window = size if used else 0
  if window and family == "qwen3_moe" and after:
    raise ValueError(f"max_window_layers={after} is not supported with use_sliding_window in "
                     "Qwen3-MoE; supported: 0")
  default = ["sliding_attention" if window and i >= after else "full_attention"
             for i in range(layers)]
  types = keys.take("layer_types", default)
  if other := set(types) - {"full_attention"} - ({"sliding_attention"} if window else set()):
    raise ValueError(f"layer_types {', '.join(sorted(other))} is not supported here; supported: "
                     "full_attention, and sliding_attention with use_sliding_window")
  if len(types) != layers:
    raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
  if family == "qwen3_moe" and types != default:
    raise ValueError(f"layer_types={types!r} is not supported in Qwen3-MoE")
  where = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
  return {"window": window if where else 0, "window_layers": where}


def _rope(keys: Keys, max_len: int) -> tuple[float, RopeScaling | None]:
  """(theta, scaling) from either spelling: rope_scaling of old, rope_parameters of new."""
  given = [Keys(d) for d in (keys.take("rope_parameters", None), keys.take("rope_scaling", None))
           if d]
  theta = float(keys.take("rope_theta", 1e4))
  keys.only("partial_rotary_factor", 1.0)
  read = [_scaling(k, theta, max_len) for k in given] or [(theta, None)]
  if any(r != read[0] for r in read):
    raise ValueError("rope_parameters and rope_scaling contradict each other")
  return read[0]


def _scaling(keys: Keys, theta: float, max_len: int) -> tuple[float, RopeScaling | None]:
  old = keys.take("type", None)
  kind = keys.take("rope_type", old or "default")
  theta = float(keys.take("rope_theta", theta))
  keys.only("partial_rotary_factor", 1.0)
  if old and old != kind:
    raise ValueError(f"rope_type {kind!r} and type {old!r} contradict each other")
  if kind == "default":
    scaling = None
  elif kind == "linear":
    scaling = RopeScaling(kind, float(keys.take("factor")))
  elif kind == "llama3":
    scaling = RopeScaling(
      kind, float(keys.take("factor")), keys.take("original_max_position_embeddings", max_len),
      low_freq_factor=float(keys.take("low_freq_factor")),
      high_freq_factor=float(keys.take("high_freq_factor")))
  elif kind == "yarn":
    factor = float(keys.take("factor"))
    m, all_dim = float(keys.take("mscale", 0)), float(keys.take("mscale_all_dim", 0))
    usual = _mscale(factor, m) / _mscale(factor, all_dim) if m and all_dim else _mscale(factor, 1)
    scaling = RopeScaling(
      kind, factor, keys.take("original_max_position_embeddings", max_len),
      beta_fast=float(keys.take("beta_fast", 32)), beta_slow=float(keys.take("beta_slow", 1)),
      truncate=keys.flag("truncate", True), scale=float(keys.take("attention_factor", usual)),
      mscale=m, mscale_all_dim=all_dim)
  else:
    raise ValueError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, "
                     "yarn")
  keys.end()
  return theta, scaling


def _mscale(factor: float, weight: float) -> float:
  """YaRN's temperature (Peng et al., 2023, section 3.4), as DeepSeek weights it."""
  return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


# -------------------------------------------------------------------- writing


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """The config.json of the same model, which `from_hf` reads back as `cfg`.

  Raises ValueError if cfg's family cannot express what cfg says.
  """
  if cfg.family not in ARCHITECTURES:
    raise ValueError(f"family {cfg.family!r} is not supported; supported: "
                     f"{', '.join(sorted(ARCHITECTURES))}")
  out = {
    "architectures": [ARCHITECTURES[cfg.family]],
    "model_type": cfg.family,
    "vocab_size": cfg.vocab,
    "hidden_size": cfg.width,
    "num_hidden_layers": cfg.layers,
    "num_attention_heads": cfg.heads,
    "num_key_value_heads": cfg.kv_heads,
    "intermediate_size": cfg.mlp,
    "rms_norm_eps": cfg.norm_eps,
    "tie_word_embeddings": cfg.tied,
    "max_position_embeddings": cfg.max_len,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    **_rope_to_hf(cfg),
  }
  if cfg.family != "deepseek_v3":
    out["head_dim"] = cfg.head_dim
  if cfg.family != "qwen2":
    out["attention_bias"] = cfg.qkv_bias
  if cfg.family == "llama":
    out["mlp_bias"] = cfg.mlp_bias
  elif cfg.family != "deepseek_v3":
    out |= _window_to_hf(cfg)
  if cfg.family == "qwen3_moe" and cfg.moe:
    out |= {
      "num_experts": cfg.moe.experts,
      "num_experts_per_tok": cfg.moe.active,
      "moe_intermediate_size": cfg.moe.mlp,
      "norm_topk_prob": cfg.moe.normalise,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [i for i in range(cfg.layers) if not cfg.is_moe(i)],
    }
  if cfg.family == "deepseek_v3" and cfg.moe and cfg.mla:
    out |= _deepseek_to_hf(cfg)
  try:
    read = from_hf(out)
  except KeyError as e:
    raise ValueError(f"a {cfg.family} needs {e.args[0]}, which this config does not say") from e
  if other := [f.name for f in dataclasses.fields(cfg)
               if getattr(cfg, f.name) != getattr(read, f.name)]:
    raise ValueError(f"a {cfg.family} cannot have " + ", ".join(
      f"{name}={getattr(cfg, name)!r}" for name in other))
  return out


def _rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """Both spellings: rope_parameters for transformers 5, rope_scaling for those before."""
  s = cfg.rope_scaling
  scaling: dict[str, Any] = {"rope_type": s.kind if s else "default"}
  if s:
    scaling["factor"] = s.factor
  if s and s.kind != "linear":
    scaling["original_max_position_embeddings"] = s.original_max_len
  if s and s.kind == "llama3":
    scaling |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
  if s and s.kind == "yarn":
    scaling |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
    scaling |= {} if s.truncate else {"truncate": False}
    scaling |= {k: v for k in ("mscale", "mscale_all_dim") if (v := getattr(s, k))}
    if _scaling(Keys(scaling), cfg.rope_theta, cfg.max_len)[1] != s:
      scaling["attention_factor"] = s.scale
  return {"rope_theta": cfg.rope_theta,
          "rope_parameters": {**scaling, "rope_theta": cfg.rope_theta},
          "rope_scaling": {**scaling, "type": s.kind} if s else None}


def _window_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  first = min(cfg.window_layers, default=cfg.layers)
  out = {
    "use_sliding_window": bool(cfg.window),
    "sliding_window": cfg.window or None,
    "max_window_layers": 0 if cfg.window and cfg.family == "qwen3_moe" else first,
  }
  if cfg.window and cfg.family != "qwen3_moe":
    out["layer_types"] = ["sliding_attention" if i in cfg.window_layers else "full_attention"
                          for i in range(cfg.layers)]
  return out


def _deepseek_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  m, e = cfg.mla, cfg.moe
  first = min(e.layers, default=cfg.layers)
  steps = [b - a for a, b in zip(e.layers, e.layers[1:])]
  return {
    "q_lora_rank": m.q_rank or None,
    "kv_lora_rank": m.kv_rank,
    "qk_nope_head_dim": m.nope,
    "qk_rope_head_dim": m.rope,
    "v_head_dim": m.value,
    "rope_interleave": m.interleaved,
    "n_routed_experts": e.experts,
    "num_experts_per_tok": e.active,
    "moe_intermediate_size": e.mlp,
    "norm_topk_prob": e.normalise,
    "n_group": e.groups,
    "topk_group": e.active_groups,
    "routed_scaling_factor": e.scaling,
    "n_shared_experts": e.shared,
    "first_k_dense_replace": first,
    "moe_layer_freq": steps[0] if steps else 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
  }
