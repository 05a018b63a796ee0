"""Multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2, section 2.1).

Keys and values of all heads come from one narrow latent, plus one key part with rotary
positions that all heads share. Here they are expanded to full heads before attention, which is
what training wants.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kr.model import ops
from kr.model import rope
from kr.model.config import Execution, ModelConfig
from kr.model.layers import Attend
from kr.model.sharding import ONES, ZEROS, Param


def declare(cfg: ModelConfig) -> dict[str, Param]:
  """Parameters of one layer's attention."""
  m, D, H = cfg.mla, cfg.width, cfg.heads
  if m.q_rank:
    out = {
      "wq_a": Param((D, m.q_rank), ("width", None), D),
      "q_a_norm": Param((m.q_rank,), (None,), ONES),
      "wq_b": Param((m.q_rank, H, cfg.key_dim), (None, "heads", None), m.q_rank),
    }
    if cfg.qkv_bias:
      out["bq_a"] = Param((m.q_rank,), (None,), ZEROS)
  else:
    out = {"wq": Param((D, H, cfg.key_dim), ("width", "heads", None), D)}
  out |= {
    "wkv_a": Param((D, m.kv_rank + m.rope), ("width", None), D),
    "kv_a_norm": Param((m.kv_rank,), (None,), ONES),
    "wkv_b": Param((m.kv_rank, H, m.nope + m.value), (None, "heads", None), m.kv_rank),
    "wo": Param((H, m.value, D), ("heads", None, "width"), 2 * cfg.layers * H * m.value),
  }
  if cfg.qkv_bias:
    out["bkv_a"] = Param((m.kv_rank + m.rope,), (None,), ZEROS)
  if cfg.out_bias:
    out["bo"] = Param((D,), (None,), ZEROS)
  return out


def heads(
  p: dict[str, Any], cfg: ModelConfig, x: jax.Array, angles: tuple[jax.Array, jax.Array],
  attend: Attend, how: Execution,
) -> jax.Array:
  """x [B,T,D] -> [B,T,D]. R: width of the latent."""
  m = cfg.mla
  if m.q_rank:
    latent = ops.linear("btd,dr->btr", x, p, "wq_a", how)
    latent = latent + p["bq_a"].astype(x.dtype) if "bq_a" in p else latent
    latent = ops.rms_norm(latent, p["q_a_norm"], 1e-6)  # Hugging Face's own, whatever the config
    q = ops.linear("btr,rhk->bthk", latent, p, "wq_b", how)
  else:
    q = ops.linear("btd,dhk->bthk", x, p, "wq", how)
  latent = ops.linear("btd,dr->btr", x, p, "wkv_a", how)
  latent = latent + p["bkv_a"].astype(x.dtype) if "bkv_a" in p else latent
  shared = rope.turn(latent[:, :, None, m.kv_rank:], *angles, m.interleaved)  # [B,T,1,rope]
  latent = ops.rms_norm(latent[..., :m.kv_rank], p["kv_a_norm"], 1e-6)
  kv = ops.linear("btr,rhk->bthk", latent, p, "wkv_b", how)  # [B,T,H,nope+value]

  q = jnp.concatenate([q[..., :m.nope], rope.turn(q[..., m.nope:], *angles, m.interleaved)], -1)
  shared = jnp.broadcast_to(shared, (*kv.shape[:3], m.rope))
  k = jnp.concatenate([kv[..., :m.nope], shared], -1)
  o = attend(q * cfg.query_scale, k, kv[..., m.nope:])
  y = ops.linear("bthk,hkd->btd", o, p, "wo", how)
  return y + p["bo"].astype(y.dtype) if "bo" in p else y
