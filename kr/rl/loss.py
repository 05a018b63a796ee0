"""REINFORCE: −(1/N) Σ over trajectories Σ over sampled tokens of advantage · log π(token).

N counts trajectories. With advantage 1 on demonstrated tokens it is the likelihood of imitation.
There is no ratio and no clipping: every token was sampled from the policy that is
updated (Williams, 1992). What becomes of tokens that another version of it sampled (stale ones,
which pauses and asynchronous rollouts bring about) is one setting, see `Correction`.
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
  of trajectories, `behaviour` the logprob it was sampled with, `stale_turn` the number of its
  turn where another policy than this one sampled it, 0 elsewhere; None where none is stale.
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
  stale_turn: np.ndarray | None = None


class Correction(NamedTuple):
  """What weighs the gradient of a stale token; fresh tokens always have weight 1.

  With ρ = π/μ, π the policy that is updated and μ the one that sampled, and A the advantage,
  the loss is −(1/N) Σ w · A · log π(token), w without gradient:

  keep: w = 1, as if the token were fresh. Biased; μ is a few steps old at most.
  tis: w = min(ρ, cap), ρ of the token alone. Truncated importance weights, which Espeholt et
    al. (2018, "IMPALA", section 4) put on each action, here a token, as Yao et al. (2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training") do. The truncation
    bounds the variance and biases towards μ.
  topr: w = 1 where A >= 0, and min(ρ, 1) where A < 0, ρ of the whole turn: the product over
    its tokens. Le Roux et al. (2025, "Tapered Off-Policy REINFORCE", the canonical form) weigh a
    response as a whole, so that a bad one which has become unlikely is pushed down no further
    and the objective stays bounded. Here what the policy samples in one go, under one version
    and for one advantage, is a turn: over a trajectory of many turns the product would vanish,
    and single tokens would be pushed on long after the turn has become impossible.
  strict, mask: the learner hands over no stale token.
  """

  kind: str = "keep"
  cap: float = 2.0


KINDS = ("strict", "mask", "tis", "topr", "keep")
PIECES = ("data", "fsdp", "expert", "context")  # the mesh axes that cut rows into pieces


def reinforce(
  params: transformer.Params, cfg: ModelConfig, rows: Rows, how: Execution = transformer.PLAIN,
  correction: Correction = Correction(),
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch (a sum, so micro-batches add up) and sums for metrics.

  Only the positions that predict a trained token pass through the output head, and their
  logits exist `how.head_chunk` tokens at a time. Where stale tokens are to be weighted, they
  pass once more before, without gradient: a turn's weight depends on all of its tokens.
  """
  x = transformer.forward(params, cfg, rows.tokens, rows.positions, rows.segment_ids, how)
  x = _pick(x, rows.row, rows.before)  # [S,N,D]
  head = {name: params[name] for name in (("embed",) if cfg.tied else ("head",))}
  coefficient = rows.weight * rows.advantage
  if rows.stale_turn is not None and correction.kind in ("tis", "topr"):
    still = jax.lax.stop_gradient((head, x))
    (_, before, _), _ = _chunks(*still, rows.target, coefficient, how, gradient=False)
    coefficient *= weights(before - rows.behaviour, rows.advantage, rows.stale_turn, correction)[0]
  loss, log_prob, entropies = score(head, x, rows.target, coefficient, how)
  real = rows.weight > 0
  compared, sums = real, {}
  if rows.stale_turn is not None:
    stale = rows.stale_turn > 0
    compared = real & ~stale
    _, ratio, clipped = weights(
      log_prob - rows.behaviour, rows.advantage, rows.stale_turn, correction)
    sums = {"stale_tokens": jnp.sum(stale), "ratio": jnp.sum(jnp.where(stale, ratio, 0.0)),
            "max_ratio": jnp.max(jnp.where(stale, ratio, 0.0)), "clipped": jnp.sum(clipped)}
  gap = jnp.where(compared, jnp.abs(log_prob - rows.behaviour), 0.0)
  return loss, jax.lax.stop_gradient(
    {
      **sums,
      "trained_tokens": jnp.sum(real),
      "log_prob": jnp.sum(jnp.where(real, log_prob, 0.0)),
      "entropy": jnp.sum(jnp.where(real, entropies, 0.0)),
      "compared_tokens": jnp.sum(compared),
      "gap": jnp.sum(gap),
      "max_gap": jnp.max(gap),
    }
  )


def weights(
  log_ratio: jax.Array, advantage: jax.Array, stale_turn: jax.Array, correction: Correction
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(weight, ratio, whether it was clipped to give the weight) of each token, all [S,N].

  See `Correction`. log_ratio: log π − log μ of the token; the other arrays as in `Rows`. The
  ratio is that of the token, for `topr` that of its turn. Fresh tokens get (1, 1, False).
  """
  stale = stale_turn > 0
  log_ratio = jnp.where(stale, log_ratio, 0.0)
  if correction.kind == "topr":
    of_turn = jax.ops.segment_sum(log_ratio.ravel(), stale_turn.ravel(), log_ratio.size + 1)
    log_ratio = jnp.where(stale, of_turn[stale_turn], 0.0)
  ratio = jnp.exp(log_ratio)
  if correction.kind == "tis":
    bound = jnp.full_like(ratio, correction.cap)
  elif correction.kind == "topr":
    bound = jnp.where(advantage < 0, 1.0, 0.0)  # 0: no ratio at all
  else:
    bound = jnp.zeros_like(ratio)
  weight = jnp.where(stale & (bound > 0), jnp.minimum(ratio, bound), 1.0)
  return weight, ratio, stale & (bound > 0) & (ratio > bound)


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
