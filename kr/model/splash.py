"""Attention on TPU: JAX's Pallas splash kernel, for rows packed and split as kr's are.

Which blocks are computed is fixed when the step is compiled: those of the future and beyond the
window are skipped, those of other segments are computed and masked. Elsewhere than on a TPU the
kernel runs in Pallas' interpreter, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp
import numpy as np

LANES = 128  # the kernel's blocks are multiples of this


class _Visible(masks._ComputableMask):
  """What the queries of tokens `index` see of the keys 0, 1, 2, …; segments come on top."""

  def __init__(self, index: np.ndarray, keys: int, window: int):
    def see(q, k):
      causal = q >= k
      return causal & (q - k < window) if window else causal

    super().__init__((len(index), keys), see)
    self.q_sequence, self.window = index, window

  def __eq__(self, other):
    return isinstance(other, _Visible) and hash(self) == hash(other)

  def __hash__(self):
    return hash((self._shape, self.q_sequence.tobytes(), self.window))


def kernel(index: np.ndarray, parts: int, group: int, window: int) -> Any:
  """The kernel for one kv head and its `group` of query heads.

  index [T] int32: the token that stands at each place of a row, which `parts` devices hold in
  equal pieces. Returns a tree of arrays, whose split over devices `specs` gives.
  """
  return _kernel(index.astype(np.int32).tobytes(), parts, group, window)


@functools.lru_cache(32)
def _kernel(index_bytes: bytes, parts: int, group: int, window: int) -> Any:
  index = np.frombuffer(index_bytes, np.int32)
  keys = len(index) + -len(index) % LANES
  pieces = index.reshape(parts, -1)
  # What fills up a piece sees like the row's last token: it must see something.
  pieces = np.pad(pieces, ((0, 0), (0, -pieces.shape[1] % LANES)), constant_values=keys - 1)
  bq, bk = (next(b for b in (512, 256, LANES) if n % b == 0) for n in (pieces.shape[1], keys))
  blocks = kernels.BlockSizes(block_q=bq, block_kv=bk, block_q_dkv=bq, block_kv_dkv=bk,
                              block_q_dq=bq, block_kv_dq=bk)
  mask = masks.MultiHeadMask([_Visible(pieces.reshape(-1), keys, window)] * group)
  with jax.ensure_compile_time_eval():  # the cache must not hold tracers
    return kernels.make_splash_mqa(
      mask, block_sizes=blocks, head_shards=1, q_seq_shards=parts,
      interpret=jax.default_backend() != "tpu")


def specs(mesh: Any, made: Any) -> Any:
  """How a kernel for a row in several pieces is split over the mesh axis `context`."""
  return made.manual_sharding_spec(
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context")))


def attend(made: Any, q: jax.Array, k: jax.Array, v: jax.Array, q_segment: jax.Array,
           segment: jax.Array, index: np.ndarray) -> jax.Array:
  """q [B,T,H,k], scaled, this device's piece; k [B,S,K,k]; v [B,S,K,v] and `index` [S], whole
  rows; q_segment [B,T], segment [B,S] -> [B,T,H,v]."""
  (B, T, H, _), K = q.shape, k.shape[2]
  if not np.array_equal(index, np.arange(len(index))):
    inverse = np.argsort(index)  # the kernel counts the keys from 0
    k, v, segment = k[:, inverse], v[:, inverse], segment[:, inverse]
  fill = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)) + ((0, 0),) * (x.ndim - 2))
  q, k, v, q_segment, segment = map(fill, (q, k, v, q_segment, segment))
  q = q.reshape(B, -1, K, H // K, q.shape[-1]).transpose(0, 2, 3, 1, 4)  # [B,K,G,T,k]
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B,K,S,·]
  one_head = jax.vmap(lambda q, k, v, ids: made(q, k, v, ids), (0, 0, 0, None))
  out = jax.vmap(one_head)(q, k, v, kernels.SegmentIds(q_segment, segment))
  return out.transpose(0, 3, 1, 2, 4).reshape(B, -1, H, v.shape[-1])[:, :T]
