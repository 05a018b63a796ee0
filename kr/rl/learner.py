"""The learner: accumulates the REINFORCE gradient over micro-batches and applies AdamW.

The same learner makes the starting policy (advantage 1 on demonstrations) and trains it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np
import optax

from kr.model import sharding
from kr.model import transformer
from kr.model.config import Execution, ModelConfig
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
                  trained_multiple: int = 512, mesh: Mesh | None = None
                  ) -> Iterator[loss_lib.Rows]:
  """Cuts a batch into micro-batches of `rows` rows, padded so that few shapes are compiled.

  The batch's row count must be a multiple of `rows` (`pack` sees to it), and `rows` one of the
  mesh's row axes. The number of trained tokens is rounded up, see `padded`. version: the policy
  that is updated; the behaviour logprobs of others' tokens become NaN, since they may differ.
  """
  logprobs = batch.logprobs
  if version is not None:
    logprobs = np.where(batch.versions == version, logprobs, np.nan)
  T = batch.tokens.shape[1]
  across = sharding.size(mesh, sharding.RULES["rows"]) if mesh else 1
  along = sharding.size(mesh, "context") if mesh else 1
  if rows % across:
    raise ValueError(f"micro_rows={rows} is not a multiple of the {across} parts that the mesh "
                     "cuts rows into")
  order = sharding.zigzag(T, along)
  place = np.argsort(order)  # where each token of a row stands
  for start in range(0, batch.tokens.shape[0], rows):
    part = slice(start, start + rows)
    row, at = np.nonzero(batch.mask[part])
    if not row.size:
      continue
    before = place[at - 1]
    piece = row // (rows // across) * along + before // (T // along)
    count = np.bincount(piece, minlength=across * along)
    slot = np.arange(row.size) - (np.cumsum(count) - count)[np.sort(piece)]
    slot[np.argsort(piece, kind="stable")] = slot.copy()
    shape = (across * along, padded(int(count.max()), trained_multiple))

    def column(values: np.ndarray, dtype: Any) -> np.ndarray:
      out = np.zeros(shape, dtype)
      out[piece, slot] = values
      return out

    of = lambda a: a[part][row, at]
    yield loss_lib.Rows(
      tokens=batch.tokens[part][:, order],
      positions=batch.positions[part][:, order],
      segment_ids=batch.segment_ids[part][:, order],
      row=column(row % (rows // across), np.int32),
      before=column(before % (T // along), np.int32),
      target=column(of(batch.tokens), np.int32),
      advantage=column(of(batch.advantages), np.float32),
      weight=column(of(batch.weights), np.float32),
      behaviour=column(of(logprobs), np.float32),
    )


def padded(n: int, multiple: int) -> int:
  """n rounded up to one of few sizes, at most a quarter above it, if n is above 4 multiples."""
  step = multiple
  while n > 8 * step:
    step *= 2
  return -(-n // step) * step


class Learner:
  """Parameters, optimizer state, and one `update` a step.

  params: a tree of host or device arrays. mesh: where they are put, as the table in
  `kr.model.sharding` says; None: the default device. how: precision, rematerialisation and so on.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    params: Params,
    optimizer: optax.GradientTransformation,
    opt_state: Any = None,
    micro_rows: int = 8,
    mesh: Mesh | None = None,
    how: Execution = transformer.PLAIN,
  ):
    self.cfg, self.optimizer, self.micro_rows = cfg, optimizer, micro_rows
    self.mesh, self.how = mesh, how
    if mesh is None:
      self.params = jax.tree.map(jnp.array, params)  # its own copy: an update donates its buffers
    else:
      self.params = sharding.shard(mesh, params, transformer.declare(cfg))
    with self._on_mesh():
      self.opt_state = self._init_optimizer() if opt_state is None else opt_state
    self._zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p),
                          out_shardings=self._layout(self.params))

  def update(self, batch: Batch, version: int | None = None) -> dict[str, float]:
    """One optimizer step on a packed batch; returns means over its trained tokens.

    `logprob_gap` is the mean absolute difference to the behaviour logprobs, over the tokens
    that policy `version` sampled (None: all). A batch without a single trained token changes
    nothing. A non-finite gradient is skipped and reported as `skipped` = 1.
    """
    with self._on_mesh():
      grads, sums = self._zeros(self.params), []
      for rows in micro_batches(batch, self.micro_rows, version, mesh=self.mesh):
        grads, aux = _accumulate(self.params, grads, self.cfg, self._place(rows), self.how)
        sums.append(aux)
      if not sums:
        return {"loss": 0.0, "trained_tokens": 0, "skipped": 0}
      self.params, self.opt_state, norm = _apply(
          self.params, self.opt_state, grads, self.optimizer)
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

  def _on_mesh(self) -> contextlib.AbstractContextManager:
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def _layout(self, tree: Any) -> Any:
    """The shardings of a tree of arrays, or None for wherever JAX likes."""
    return jax.tree.map(lambda a: a.sharding, tree) if self.mesh else None

  def _init_optimizer(self) -> Any:
    if self.mesh is None:
      return self.optimizer.init(self.params)
    # What the optimizer keeps for each parameter lies where the parameter does.
    whole = NamedSharding(self.mesh, P())
    shapes = jax.eval_shape(self.optimizer.init, self.params)
    layout = optax.tree_utils.tree_map_params(
        self.optimizer, lambda _, p: p.sharding, shapes, self.params,
        transform_non_params=lambda _: whole)
    return jax.jit(self.optimizer.init, out_shardings=layout)(self.params)

  def _place(self, rows: loss_lib.Rows) -> loss_lib.Rows:
    if self.mesh is None:
      return rows
    by_row = NamedSharding(self.mesh, sharding.spec(self.mesh, ("rows", "tokens")))
    by_piece = NamedSharding(self.mesh, P(loss_lib.PIECES, None))
    return loss_lib.Rows(*(
      jax.make_array_from_callback(
        a.shape, by_row if name in ("tokens", "positions", "segment_ids") else by_piece,
        lambda index, a=a: a[index])
      for name, a in rows._asdict().items()))


@functools.partial(jax.jit, static_argnames=("cfg", "how"), donate_argnames="grads")
def _accumulate(params, grads, cfg, rows, how):
  gradient = jax.value_and_grad(loss_lib.reinforce, has_aux=True)
  (loss, aux), new = gradient(params, cfg, rows, how)
  return jax.tree.map(jnp.add, grads, new), {**aux, "loss": loss}


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def _apply(params, opt_state, grads, optimizer):
  norm = optax.global_norm(grads)
  finite = jnp.isfinite(norm)
  updates, new_state = optimizer.update(grads, opt_state, params)
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
  return keep(optax.apply_updates(params, updates), params), keep(new_state, opt_state), norm
