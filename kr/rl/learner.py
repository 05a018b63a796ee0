"""The learner: accumulates the REINFORCE gradient over micro-batches and applies AdamW.

The same learner makes the starting policy (advantage 1 on demonstrations) and trains it.
"""

from __future__ import annotations

import functools
from typing import Any, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kr.model.config import ModelConfig
from kr.model.transformer import Params
from kr.rl import loss as loss_lib
from kr.rl.batch import Batch


def make_optimizer(learning_rate: float, warmup_steps: int, clip_norm: float, weight_decay: float,
                   b2: float = 0.95, decay_steps: int | None = None
                   ) -> optax.GradientTransformation:
  """AdamW behind a global-norm clip; linear warm-up, then constant or cosine to a tenth.

  b2: decay of the second moment. RL wants it near 1: as the policy improves, gradients
  shrink, and a short memory would scale their noise up to full steps.
  """
  if decay_steps:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, decay_steps, learning_rate / 10)
  else:
    schedule = optax.linear_schedule(
        learning_rate / max(warmup_steps, 1), learning_rate, warmup_steps)
  decayed = lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: not path[-1].key.endswith("norm"), params)
  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.adamw(schedule, b1=0.9, b2=b2, weight_decay=weight_decay, mask=decayed))


def micro_batches(batch: Batch, rows: int, version: int | None = None,
                  trained_multiple: int = 512) -> Iterator[loss_lib.Rows]:
  """Cuts a batch into micro-batches of `rows` rows, padded so that few shapes are compiled.

  The batch's row count must be a multiple of `rows` (`pack` sees to it). The number of
  trained tokens is rounded up to a multiple of `trained_multiple`. version: the policy that
  is updated; the behaviour logprobs of others' tokens become NaN, since they may differ.
  """
  logprobs = batch.logprobs
  if version is not None:
    logprobs = np.where(batch.versions == version, logprobs, np.nan)
  for start in range(0, batch.tokens.shape[0], rows):
    part = slice(start, start + rows)
    row, at = np.nonzero(batch.mask[part])
    if not row.size:
      continue
    pad = -row.size % trained_multiple
    column = lambda a, dtype: np.pad(np.asarray(a[part][row, at], dtype), (0, pad))
    yield loss_lib.Rows(
      tokens=batch.tokens[part],
      positions=batch.positions[part],
      segment_ids=batch.segment_ids[part],
      row=np.pad(row, (0, pad)).astype(np.int32),
      before=np.pad(at - 1, (0, pad)).astype(np.int32),
      target=column(batch.tokens, np.int32),
      advantage=column(batch.advantages, np.float32),
      weight=column(batch.weights, np.float32),
      behaviour=column(logprobs, np.float32),
    )


class Learner:
  """Parameters, optimizer state, and one `update` a step."""

  def __init__(
    self,
    cfg: ModelConfig,
    params: Params,
    optimizer: optax.GradientTransformation,
    opt_state: Any = None,
    micro_rows: int = 8,
  ):
    self.cfg, self.optimizer, self.micro_rows = cfg, optimizer, micro_rows
    self.params = jax.tree.map(jnp.array, params)  # its own copy: an update donates its buffers
    self.opt_state = optimizer.init(self.params) if opt_state is None else opt_state
    self._zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))

  def update(self, batch: Batch, version: int | None = None) -> dict[str, float]:
    """One optimizer step on a packed batch; returns means over its trained tokens.

    `logprob_gap` is the mean absolute difference to the behaviour logprobs, over the tokens
    that policy `version` sampled (None: all). A batch without a single trained token changes
    nothing. A non-finite gradient is skipped and reported as `skipped` = 1.
    """
    grads, sums = self._zeros(self.params), []
    for rows in micro_batches(batch, self.micro_rows, version):
      grads, aux = _accumulate(self.params, grads, self.cfg, rows)
      sums.append(aux)
    if not sums:
      return {"loss": 0.0, "trained_tokens": 0, "skipped": 0}
    self.params, self.opt_state, norm = _apply(self.params, self.opt_state, grads, self.optimizer)
    sums = [{k: float(v) for k, v in s.items()} for s in sums]
    total = lambda key: sum(s[key] for s in sums)
    n = total("trained_tokens")
    return {
      "loss": total("loss"),
      "grad_norm": float(norm),
      "skipped": int(not np.isfinite(float(norm))),
      "trained_tokens": int(n),
      "log_prob": total("log_prob") / n,
      "entropy": total("entropy") / n,
      "logprob_gap": total("gap") / max(total("compared_tokens"), 1),
      "logprob_gap_max": max(s["max_gap"] for s in sums),
    }


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="grads")
def _accumulate(params, grads, cfg, rows):
  (loss, aux), new = jax.value_and_grad(loss_lib.reinforce, has_aux=True)(params, cfg, rows)
  return jax.tree.map(jnp.add, grads, new), {**aux, "loss": loss}


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def _apply(params, opt_state, grads, optimizer):
  norm = optax.global_norm(grads)
  finite = jnp.isfinite(norm)
  updates, new_state = optimizer.update(grads, opt_state, params)
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
  return keep(optax.apply_updates(params, updates), params), keep(new_state, opt_state), norm
