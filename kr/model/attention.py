"""Attention inside packed rows: to earlier tokens of the same segment.

Masks come from places and segment ids, never from token ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Where(NamedTuple):
  """What may see what. index: [T] int32, the token of the row that stands at each place (not
  0, 1, 2, … where a context axis splits the row: `sharding.zigzag`). segment: [B,T] int32,
  0 is padding."""

  index: jax.Array
  segment: jax.Array


def attend(q: jax.Array, k: jax.Array, v: jax.Array, where: Where, *, window: int = 0,
           kind: str = "auto") -> jax.Array:
  """q [B,T,H,k], scaled; k [B,T,K,k]; v [B,T,K,v] -> [B,T,H,v].

  window: tokens that a query looks back, itself included; 0: all of its segment.
  kind: "plain", or "auto" for what suits the platform.
  """
  visible = where.index[:, None] >= where.index[None, :]
  if window:
    visible &= where.index[:, None] - where.index[None, :] < window
  visible = visible & (where.segment[:, :, None] == where.segment[:, None, :])
  return plain(q, k, v, visible)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
  """Softmax attention as the formula says. q [B,T,H,k], scaled; k [B,S,K,k]; v [B,S,K,v];
  visible [B,T,S] bool -> [B,T,H,v]. Every query must see at least one key."""
  B, T, H, h = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, H // K, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, -1).astype(v.dtype)
  return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, H, v.shape[-1])
