"""Rotary positions (Su et al., 2021) and the ways to stretch them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kr.model.config import ModelConfig


def frequencies(cfg: ModelConfig) -> np.ndarray:
  """Radians per token of each pair of dimensions, float32 [rope_dim / 2].

  Scaling: linear (Chen et al., 2023), llama3 (Dubey et al., 2024), yarn (Peng et al., 2023).
  """
  pairs = cfg.rope_dim // 2
  base = 1.0 / cfg.rope_theta ** (np.arange(pairs, dtype=np.float32) / pairs)
  s = cfg.rope_scaling
  if s is None:
    out = base
  elif s.kind == "linear":
    out = base / s.factor
  elif s.kind == "llama3":
    # Wavelengths that fit the trained length often enough stay; those that do not fit it once
    # are stretched; between them it blends.
    fits = s.original_max_len * base / (2 * math.pi)
    keep = np.clip((fits - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    out = base * (keep + (1 - keep) / s.factor)
  elif s.kind == "yarn":
    # The pair that turns `turns` times over the trained length.
    pair = lambda turns: (pairs * math.log(s.original_max_len / (turns * 2 * math.pi))
                          / math.log(cfg.rope_theta))
    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.rope_dim - 1)
    high += 0.001 if low == high else 0
    stretch = np.clip((np.arange(pairs, dtype=np.float32) - low) / (high - low), 0, 1)
    out = base * (1 - stretch + stretch / s.factor)
  else:
    raise ValueError(f"rope scaling {s.kind!r} is none of linear, llama3, yarn")
  return out.astype(np.float32)


def angles(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(cosine, sine) for positions [B,T], each float32 [B,T,1,rope_dim / 2]."""
  angle = positions[..., None, None].astype(jnp.float32) * frequencies(cfg)
  scale = cfg.rope_scaling.scale if cfg.rope_scaling else 1.0
  return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
  """Turns the pairs of x [B,T,H,h]: dimension i with i + h/2, or 2i with 2i + 1.

  The result has dimension i paired with i + h/2 either way: attention only needs queries and
  keys to agree.
  """
  half = x.shape[-1] // 2
  a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
