"""The REINFORCE loss: the whole of what kr optimises, for demonstrations and for RL alike.

    loss = -(1/N) Σ_trajectories Σ_sampled tokens  A_t · log π(token_t | what came before)

N counts trajectories, not segments, and includes those whose gradient negative sample
control discarded. With A = 1 on demonstrated tokens it is the likelihood of imitation.
There is no ratio and no clipping: every token was sampled from the policy that is
updated (Williams, 1992).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kr.model import transformer
from kr.model.config import ModelConfig


class Rows(NamedTuple):
  """A micro-batch: B packed rows of T tokens, and the N trained tokens in them.

  tokens, positions, segment_ids: [B,T] int32. The other fields are [N], one entry a
  trained token, padded with weight 0: `row` and `before` address the position that
  predicts it (the one before it), `target` is its id, `advantage` its step's advantage,
  `weight` is 1 / number of trajectories, `behaviour` the logprob it was sampled with, NaN
  where another policy than this one sampled it (only pauses can bring that about).
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


def reinforce(
  params: transformer.Params, cfg: ModelConfig, rows: Rows
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch (a sum, so micro-batches add up) and sums for metrics.

  Only the positions that predict a trained token pass through the output head.
  """
  x = transformer.forward(params, cfg, rows.tokens, rows.positions, rows.segment_ids)  # [B,T,D]
  log_p = jax.nn.log_softmax(transformer.logits(params, x[rows.row, rows.before]), -1)  # [N,V]
  log_prob = jnp.take_along_axis(log_p, rows.target[:, None], -1)[:, 0]  # [N]
  loss = -jnp.sum(rows.weight * rows.advantage * log_prob)
  real = rows.weight > 0
  compared = real & ~jnp.isnan(rows.behaviour)
  gap = jnp.where(compared, jnp.abs(log_prob - rows.behaviour), 0.0)
  return loss, jax.lax.stop_gradient(
    {
      "trained_tokens": jnp.sum(real),
      "log_prob": jnp.sum(jnp.where(real, log_prob, 0.0)),
      "entropy": jnp.sum(jnp.where(real, entropy(log_p), 0.0)),
      "compared_tokens": jnp.sum(compared),
      "gap": jnp.sum(gap),
      "max_gap": jnp.max(gap),
    }
  )


def entropy(log_p: jax.Array) -> jax.Array:
  """-Σ p log p in nats over the last axis: log_p [...,V] -> [...]."""
  return -jnp.sum(jnp.exp(log_p) * log_p, -1)
