"""REINFORCE: −(1/N) Σ over trajectories Σ over sampled tokens of advantage · log π(token).

N counts trajectories. With advantage 1 on demonstrated tokens it is the likelihood of imitation.
There is no ratio and no clipping: every token was sampled from the policy that is
updated (Williams, 1992).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from kr.model import sharding
from kr.model import transformer
from kr.model.config import Execution, ModelConfig


class Rows(NamedTuple):
  """A micro-batch: B packed rows of T tokens, and the trained tokens in them.

  tokens, positions, segment_ids: [B,T] int32. The other fields are [S,N]: the trained tokens
  of each of the S pieces that a mesh cuts the rows into (1 without a mesh), padded with weight
  0. `row` and `before` address, within the piece, the position that predicts the token (the
  one before it), `target` is its id, `advantage` its step's advantage, `weight` is 1 / number
  of trajectories, `behaviour` the logprob it was sampled with, NaN where another policy than
  this one sampled it (only pauses can bring that about).
  """

  tokens: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  row: np.ndarray
  before: np.ndarray
  target: np.ndarray
  advantage: np.ndarray
  weight: np.ndarray
  behaviour: np.ndarray


PIECES = ("data", "fsdp", "expert", "context")  # the mesh axes that cut rows into pieces


def reinforce(
  params: transformer.Params, cfg: ModelConfig, rows: Rows, how: Execution = transformer.PLAIN
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch (a sum, so micro-batches add up) and sums for metrics.

  Only the positions that predict a trained token pass through the output head, and their
  logits exist `how.head_chunk` tokens at a time.
  """
  x = transformer.forward(params, cfg, rows.tokens, rows.positions, rows.segment_ids, how)
  x = _pick(x, rows.row, rows.before)  # [S,N,D]
  head = {name: params[name] for name in (("embed",) if cfg.tied else ("head",))}
  loss, log_prob, entropies = score(head, x, rows.target, rows.weight * rows.advantage, how)
  real = rows.weight > 0
  compared = real & ~jnp.isnan(rows.behaviour)
  gap = jnp.where(compared, jnp.abs(log_prob - rows.behaviour), 0.0)
  return loss, jax.lax.stop_gradient(
    {
      "trained_tokens": jnp.sum(real),
      "log_prob": jnp.sum(jnp.where(real, log_prob, 0.0)),
      "entropy": jnp.sum(jnp.where(real, entropies, 0.0)),
      "compared_tokens": jnp.sum(compared),
      "gap": jnp.sum(gap),
      "max_gap": jnp.max(gap),
    }
  )


def _pick(x: jax.Array, row: jax.Array, before: jax.Array) -> jax.Array:
  """x [B,T,D], row and before [S,N] -> [S,N,D]; each device picks from its own piece."""
  local = lambda x, row, before: x[row[0], before[0]][None]
  mesh = sharding.current()
  if mesh is None:
    return local(x, row, before)
  pieces = P(PIECES, None)
  return jax.shard_map(
    local, mesh=mesh, out_specs=P(PIECES, None, None), check_vma=False,
    in_specs=(sharding.spec(mesh, ("rows", "tokens", None)), pieces, pieces))(x, row, before)


# -------------------------------------------------------------------- output head


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def score(
  head: Any, x: jax.Array, target: jax.Array, coefficient: jax.Array, how: Execution
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(−Σ coefficient · log p(target), log p(target), entropy in nats) of x [S,N,D].

  head: {"embed"} or {"head"}; target, coefficient: [S,N]. The latter two results are [S,N]
  float32 and carry no gradient. In chunks over N: full logits never exist. Since the loss is
  linear in log p, its gradient is known while a chunk's logits are there, and nothing is
  computed twice.
  """
  return _chunks(head, x, target, coefficient, how, gradient=False)[0]


def _score_forward(head, x, target, coefficient, how):
  return _chunks(head, x, target, coefficient, how, gradient=True)


def _score_backward(how, saved, cotangents):
  d_head, d_x = saved
  g = cotangents[0]
  return jax.tree.map(lambda a: a * g, d_head), (d_x * g).astype(d_x.dtype), None, None


def _chunks(head, x, target, coefficient, how, gradient):
  S, N, D = x.shape
  size = min(how.head_chunk, N)
  count = -(-N // size)

  def cut(a: jax.Array) -> jax.Array:  # [S,N,…] -> [count,S,size,…], padded
    a = jnp.pad(a, ((0, 0), (0, count * size - N)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(S, count, size, *a.shape[2:]), 1, 0)

  def chunk(d_head: Any, part: tuple) -> tuple:
    x, target, coefficient = part
    run = lambda head, x: transformer.logits(head, x, how)
    logits, back = jax.vjp(run, head, x) if gradient else (run(head, x), None)  # [S,size,V]
    log_p = logits - jax.nn.logsumexp(logits, -1, keepdims=True)
    p = jnp.exp(log_p)
    log_prob = jnp.take_along_axis(log_p, target[..., None], -1)[..., 0]
    out = (-jnp.sum(coefficient * log_prob), log_prob, entropy(log_p))
    if not gradient:
      return d_head, (out, x)
    # ∂(−c log p(t)) / ∂logits = c (p − onehot(t))
    hit = jax.nn.one_hot(target, logits.shape[-1], dtype=p.dtype)
    more, d_x = back(coefficient[..., None] * (p - hit))
    return jax.tree.map(jnp.add, d_head, more), (out, d_x)

  start = jax.tree.map(jnp.zeros_like, head) if gradient else None
  d_head, ((loss, log_prob, entropies), d_x) = jax.lax.scan(
    chunk, start, (cut(x), cut(target), cut(coefficient)))
  whole = lambda a: jnp.moveaxis(a, 0, 1).reshape(S, count * size, *a.shape[3:])[:, :N]
  return (jnp.sum(loss), whole(log_prob), whole(entropies)), (d_head, whole(d_x))


score.defvjp(_score_forward, _score_backward)


def entropy(log_p: jax.Array) -> jax.Array:
  """-Σ p log p in nats over the last axis: log_p [...,V] -> [...]."""
  return -jnp.sum(jnp.exp(log_p) * log_p, -1)
