"""The ordinary parts of a layer: attention with grouped heads, and the dense MLP.

Each part declares its parameters and computes with them. `attend` takes scaled queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kr.model import ops
from kr.model import rope
from kr.model.config import Execution, ModelConfig
from kr.model.sharding import ONES, ZEROS, Param

# attend(q [B,T,H,k], k [B,T,K,k], v [B,T,K,v]) -> [B,T,H,v]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def declare_heads(cfg: ModelConfig) -> dict[str, Param]:
  """Parameters of one layer's grouped-query attention."""
  D, H, K, h = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
  out = {
    "wq": Param((D, H, h), ("width", "heads", None), D),
    "wk": Param((D, K, h), ("width", "kv_heads", None), D),
    "wv": Param((D, K, h), ("width", "kv_heads", None), D),
    # Back into the residual stream: smaller by sqrt(2 L), as in GPT-2.
    "wo": Param((H, h, D), ("heads", None, "width"), 2 * cfg.layers * H * h),
  }
  if cfg.qk_norm:
    out |= {"q_norm": Param((h,), (None,), ONES), "k_norm": Param((h,), (None,), ONES)}
  if cfg.qkv_bias:
    out |= {
      "bq": Param((H, h), ("heads", None), ZEROS),
      "bk": Param((K, h), ("kv_heads", None), ZEROS),
      "bv": Param((K, h), ("kv_heads", None), ZEROS),
    }
  if cfg.out_bias:
    out["bo"] = Param((D,), (None,), ZEROS)
  return out


def heads(
  p: dict[str, Any], cfg: ModelConfig, x: jax.Array, angles: tuple[jax.Array, jax.Array],
  attend: Attend, how: Execution,
) -> jax.Array:
  """Grouped-query attention (Ainslie et al., 2023): x [B,T,D] -> [B,T,D]."""

  def part(name: str) -> jax.Array:
    y = ops.linear("btd,dhk->bthk", x, p, "w" + name, how)
    return y + p["b" + name].astype(y.dtype) if "b" + name in p else y

  if "wqkv" in p:
    q, k, v = jnp.split(part("qkv"), [cfg.heads, cfg.heads + cfg.kv_heads], 2)
  else:
    q, k, v = part("q"), part("k"), part("v")
  if cfg.qk_norm:
    q, k = ops.rms_norm(q, p["q_norm"], cfg.norm_eps), ops.rms_norm(k, p["k_norm"], cfg.norm_eps)
  o = attend(rope.turn(q, *angles) * cfg.query_scale, rope.turn(k, *angles), v)
  y = ops.linear("bthk,hkd->btd", o, p, "wo", how)
  return y + p["bo"].astype(y.dtype) if "bo" in p else y


def fuse_heads(p: dict[str, Any]) -> dict[str, Any]:
  """Layers, stacked, with one matrix for queries, keys and values: a token at a time, where every
  product waits for its weights, one large product is faster than three. NumPy's arrays or JAX's."""
  join = jnp.concatenate if isinstance(p["wq"], jax.Array) else np.concatenate
  fused = {f"{kind}qkv": join([p[kind + name] for name in "qkv"], -2)
           for kind in ("w", "b") if kind + "q" in p}
  return {**{name: a for name, a in p.items() if name[1:] not in ("q", "k", "v")}, **fused}


def declare_mlp(cfg: ModelConfig) -> dict[str, Param]:
  """Parameters of one layer's dense MLP."""
  D, F = cfg.width, cfg.mlp
  out = {
    "gate": Param((D, F), ("width", "mlp"), D),
    "up": Param((D, F), ("width", "mlp"), D),
    "down": Param((F, D), ("mlp", "width"), 2 * cfg.layers * F),
  }
  if cfg.mlp_bias:
    out |= {
      "b_gate": Param((F,), ("mlp",), ZEROS),
      "b_up": Param((F,), ("mlp",), ZEROS),
      "b_down": Param((D,), (None,), ZEROS),
    }
  return out


def mlp(p: dict[str, Any], x: jax.Array, how: Execution, prefix: str = "") -> jax.Array:
  """SwiGLU (Shazeer, 2020): x [B,T,D] -> [B,T,D]."""

  def linear(name: str, y: jax.Array) -> jax.Array:
    y = ops.linear("bti,io->bto", y, p, prefix + name, how)
    return y + p["b_" + name].astype(y.dtype) if not prefix and "b_" + name in p else y

  return linear("down", jax.nn.silu(linear("gate", x)) * linear("up", x))
