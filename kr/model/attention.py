"""Attention inside packed rows: to earlier tokens of the same segment; one function for all.

A row may begin with tokens that all its segments see, SHARED, which belong before each of them.
Masks come from places and segment ids, never from token ids. The kinds:
  plain      the formula, with all scores in memory; the reference
  blockwise  `kr.model.blockwise`: any platform, memory linear in the row
  splash     `kr.model.splash`: Pallas kernel for TPU, for rows without SHARED
  cudnn      cuDNN's fused kernel for GPU, in bfloat16
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kr.model import blockwise
from kr.model import ops
from kr.model import sharding
from kr.model import splash
from kr.model.config import SHARED

KINDS = ("auto", "plain", "blockwise", "splash", "cudnn")

# Up to so many tokens, `plain` is not slower on CPU, and compiles faster.
PLAIN_TOKENS = 128
# cuDNN takes packing as one more array, of 2 bytes for each pair of tokens of a row: 128 MiB here.
CUDNN_TOKENS = 8192
CUDNN_WIDTH = 128


class Where(NamedTuple):
  """What may see what. index: [T] int32, the token of the row that stands at each place (not
  0, 1, 2, … where a context axis splits the row: `sharding.zigzag`); a NumPy array where it
  is known when compiling, which `splash` needs. segment: [B,T] int32, 0 is padding, and SHARED
  what every later token of the row sees (not with a window, which counts places)."""

  index: jax.Array | np.ndarray
  segment: jax.Array


def attend(q: jax.Array, k: jax.Array, v: jax.Array, where: Where, *, window: int = 0,
           kind: str = "auto") -> jax.Array:
  """q [B,T,H,k], scaled; k [B,T,K,k]; v [B,T,K,v] -> [B,T,H,v], finite for padding.

  window: tokens that a query looks back, itself included; 0: all of its segment.
  kind: one of KINDS; auto: what suits the platform. On a mesh, rows, tokens and heads stay
  split as `sharding.RULES` says; keys and values are gathered over `context`.
  Raises ValueError for an unknown kind.
  """
  if kind not in KINDS:
    raise ValueError(f"attention={kind!r} is none of {', '.join(KINDS)}")
  if kind == "auto":
    kind = _suited(q, v, where, jax.default_backend())
  if kind == "splash" and not isinstance(where.index, np.ndarray):
    raise ValueError("attention='splash' needs Where.index as a NumPy array: its kernel is made "
                     "when compiling")
  mesh = sharding.current()
  if mesh is None or mesh.size == 1:
    made = splash.kernel(where.index, 1, q.shape[2] // k.shape[2], window) \
      if kind == "splash" else None
    return _local(made, q, k, v, where, where, window, kind, where.index)
  return _on_mesh(mesh, q, k, v, where, window, kind)


def _suited(q: jax.Array, v: jax.Array, where: Where, platform: str) -> str:
  T = q.shape[1]
  if platform == "tpu" and isinstance(where.index, np.ndarray):
    return "splash"
  if platform == "gpu":
    widths = max(q.shape[-1], v.shape[-1]), math.gcd(q.shape[-1], v.shape[-1])
    if q.dtype == jnp.bfloat16 and T <= CUDNN_TOKENS and widths[0] <= CUDNN_WIDTH \
        and widths[1] % 8 == 0:
      return "cudnn"
  return "plain" if T <= PLAIN_TOKENS else "blockwise"


def _local(made: Any, q: jax.Array, k: jax.Array, v: jax.Array, queries: Where, keys: Where,
           window: int, kind: str, index: Any) -> jax.Array:
  """One device's queries [B,T,…] against whole rows of keys [B,S,…]; index: the rows' order."""
  if kind == "splash":
    return splash.attend(made, q, k, v, queries.segment, keys.segment, index)
  if kind == "blockwise":
    size = 128 if jax.default_backend() == "cpu" else 512
    return blockwise.attend(q, k, v, queries, keys, window, size, size)
  visible = see(queries, keys, window)
  if kind == "plain":
    return plain(q, k, v, visible)
  in_order = isinstance(index, np.ndarray) and np.array_equal(index, np.arange(q.shape[1]))
  return cudnn(q, k, v, visible, causal=in_order)


def _on_mesh(mesh: Any, q: jax.Array, k: jax.Array, v: jax.Array, where: Where, window: int,
             kind: str) -> jax.Array:
  spec = functools.partial(sharding.spec, mesh)
  H, K = q.shape[2], k.shape[2]
  parts, context = sharding.size(mesh, "tensor"), sharding.size(mesh, "context")
  pick = parts > 1 and H % parts == 0 and K % parts != 0  # query heads are split, kv heads not
  local, group = (H // parts if H % parts == 0 else H), H // K
  share = math.gcd(local, group) if pick else group  # query heads of one device per kv head
  made, made_spec = None, None
  if kind == "splash":
    made = splash.kernel(where.index, context, share, window)
    made_spec = splash.specs(mesh, made)
  index = where.index

  def one(made, q, k, v, queries):
    if pick:
      first = jax.lax.axis_index("tensor") * local
      heads = (first + np.arange(0, local, share)) // group
      k, v = k[:, :, heads], v[:, :, heads]
    keys = queries
    if context > 1:
      gather = lambda x, axis: jax.lax.all_gather(x, "context", axis=axis, tiled=True)
      k, v = gather(k, 1), gather(v, 1)
      keys = Where(gather(queries.index, 0), gather(queries.segment, 1))
    return _local(made, q, k, v, queries, keys, window, kind, index)

  q_spec = spec(("rows", "tokens", "heads", None), q.shape)
  k_spec = spec(("rows", "tokens", "kv_heads", None), k.shape)
  w_spec = Where(spec(("tokens",)), spec(("rows", "tokens"), where.segment.shape))
  where = Where(jnp.asarray(index), where.segment)
  return jax.shard_map(one, mesh=mesh, in_specs=(made_spec, q_spec, k_spec, k_spec, w_spec),
                       out_specs=q_spec, check_vma=False)(made, q, k, v, where)


def see(queries: Where, keys: Where, window: int) -> jax.Array:
  """-> [B,T,S] bool: what each query sees. Padding sees earlier padding."""
  back = queries.index[:, None] - keys.index[None, :]
  visible = (back >= 0) & (back < window) if window else back >= 0
  q, k = queries.segment[:, :, None], keys.segment[:, None, :]
  return visible & ((k == q) | (k == SHARED) & (q > 0))


def plain(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
  """Softmax attention as the formula says. q [B,T,H,k], scaled; k [B,S,K,k]; v [B,S,K,v];
  visible [B,T,S] bool -> [B,T,H,v]. Every query must see at least one key."""
  B, T, H, h = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, H // K, h)
  scores = ops.einsum("btkgh,bskh->bkgts", q, k)
  scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, -1).astype(v.dtype)
  out = ops.einsum("bkgts,bskh->btkgh", weights, v).astype(v.dtype)
  return out.reshape(B, T, H, v.shape[-1])


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, *, causal: bool,
          implementation: str = "cudnn", dtype: Any = jnp.bfloat16) -> jax.Array:
  """cuDNN's fused attention, which computes in bfloat16 and wants keys and values alike wide.

  causal: the places are in the row's order, so that the kernel can skip what lies in the future.
  Shapes as in `plain`. implementation, dtype: "xla" and float32 give what it computes, anywhere.
  """
  width = max(q.shape[-1], v.shape[-1])
  wide = lambda x: jnp.pad(x.astype(dtype), ((0, 0),) * 3 + ((0, width - x.shape[-1]),))
  out = jax.nn.dot_product_attention(
    wide(q), wide(k), wide(v), mask=visible[:, None], scale=1.0, is_causal=causal,
    implementation=implementation)
  return out[..., :v.shape[-1]].astype(q.dtype)
