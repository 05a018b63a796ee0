"""The learner: accumulates the REINFORCE gradient over micro-batches and takes a step.

The same learner makes the starting policy (advantage 1 on demonstrations) and trains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np
import optax

from kr.model import lora as lora_lib
from kr.model import sharding
from kr.model import transformer
from kr.model.config import Execution, ModelConfig
from kr.model.lora import Lora
from kr.model.transformer import Params
from kr.rl import loss as loss_lib
from kr.rl.batch import Batch


def stale(batch: Batch, version: int | None) -> np.ndarray:
  """Which tokens another policy than `version` sampled, [B,T] bool; None: none.

  An older one as a rule; a newer one where a run went back to an earlier checkpoint.
  """
  if version is None:
    return np.zeros(batch.mask.shape, bool)
  return (batch.mask == 1) & (batch.versions != version)


def micro_batches(batch: Batch, rows: int, version: int | None = None,
                  trained_multiple: int = 512, mesh: Mesh | None = None, mask_stale: bool = False
                  ) -> Iterator[loss_lib.Rows]:
  """Cuts a batch into micro-batches of `rows` rows, padded so that few shapes are compiled.

  The batch's row count must be a multiple of `rows` (`pack` sees to it), and `rows` one of the
  mesh's row axes. The number of trained tokens is rounded up, see `padded`. version: the policy
  that is updated, for `stale`. mask_stale: leave the stale tokens out. A micro-batch with no
  token to train is left out.
  """
  is_stale = stale(batch, version)
  mask = (batch.mask == 1) & ~is_stale if mask_stale else batch.mask == 1
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
    row, at = np.nonzero(mask[part])
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
    turns = None
    if (old := of(is_stale)).any():
      # A turn is a run of sampled tokens: an observation or another segment follows it.
      begins = np.diff(row * (T + 1) + at, prepend=-2) != 1
      turns = column(np.where(old, np.cumsum(begins), 0), np.int32)
    yield loss_lib.Rows(
      tokens=batch.tokens[part][:, order],
      positions=batch.positions[part][:, order],
      segment_ids=batch.segment_ids[part][:, order],
      row=column(row % (rows // across), np.int32),
      before=column(before % (T // along), np.int32),
      target=column(of(batch.tokens), np.int32),
      advantage=column(of(batch.advantages), np.float32),
      weight=column(of(batch.weights), np.float32),
      behaviour=column(of(batch.logprobs), np.float32),
      stale_turn=turns,
    )


def padded(n: int, multiple: int) -> int:
  """n rounded up to one of few sizes, at most a quarter above it, if n is above 4 multiples."""
  step = multiple
  while n > 8 * step:
    step *= 2
  return -(-n // step) * step


class Learner:
  """What is trained, the optimizer's state, and one `update` a step.

  params: the policy, a tree of host or device arrays. mesh: where it is put, as the table in
  `kr.model.sharding` says; None: the default device, in a copy. Arrays that lie on the mesh
  already become the learner's own, and its first update gives their memory away. how: precision,
  rematerialisation and so on. lora: the policy is frozen, and adapters beside it are trained
  (made from `seed`). off_policy: what becomes of tokens that another version of the policy
  sampled: `strict` refuses them, `mask` trains without them, `tis`, `topr` and `keep` weigh them
  (see `kr.rl.loss.Correction`); ratio_cap: where `tis` truncates the ratio.

  `params` is what is trained: the policy, or its adapters. `policy` is the policy either way.
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
    lora: Lora | None = None,
    seed: int = 0,
    off_policy: str = "strict",
    ratio_cap: float = 2.0,
  ):
    if off_policy not in loss_lib.KINDS:
      raise ValueError(f"off_policy={off_policy!r} is none of {', '.join(loss_lib.KINDS)}")
    if not ratio_cap > 0:
      raise ValueError(f"ratio_cap={ratio_cap} must be above 0: it bounds the weight of a token")
    self.correction = loss_lib.Correction(off_policy, float(ratio_cap))
    self.cfg, self.optimizer, self.micro_rows = cfg, optimizer, micro_rows
    self.mesh, self.how, self.lora = mesh, how, lora
    self._shapes = set()  # of micro-batches, each of which was compiled once
    self._frozen = None
    if lora is None:
      self.params = self._put(params, transformer.declare(cfg))
    else:
      self._frozen = self._put(params, transformer.declare(cfg))
      declared = _trained(cfg, lora)
      self.params = self._put(transformer.draw(declared, seed), declared)
    with self._on_mesh():
      self.opt_state = (_init(self.params, optimizer, cfg, lora) if opt_state is None
                        else opt_state)

  @property
  def policy(self) -> Params:
    """The policy's whole tree, adapters merged: what is published and exported."""
    if self.lora is None:
      return self.params
    with self._on_mesh():
      return _merge(self._frozen, self.params, self.cfg, self.lora)

  def state(self) -> tuple[Params, Any]:
    """(policy, optimizer tree), what a checkpoint holds: arrays that carry their shardings.

    With adapters, the optimizer tree holds these too, unmerged.
    """
    if self.lora is None:
      return self.params, self.opt_state
    return self.policy, {"adapters": self.params, "optimizer": self.opt_state}

  def load(self, policy: Params, optimizer_tree: Any) -> None:
    """Takes back what `state` gave, from here or from a learner on another mesh.

    With adapters, the frozen policy stays the one that this learner was made from: a merged
    one would not come apart to the same bits.
    """
    if self.lora is None:
      self.params, self.opt_state = policy, optimizer_tree
    else:
      self.params, self.opt_state = optimizer_tree["adapters"], optimizer_tree["optimizer"]

  def park(self) -> None:
    """Moves the optimizer's state to the host's memory, where it waits while others need the
    devices'. `update` brings it back."""
    self.opt_state = sharding.park(self.opt_state)

  def update(self, batch: Batch | Sequence[Batch], version: int | None = None
             ) -> dict[str, float]:
    """One optimizer step on packed rows; returns means over their trained tokens.

    version: the policy that is updated (None: it sampled all tokens itself). `logprob_gap` is
    the mean absolute difference to the behaviour logprobs, over the tokens that it sampled.
    A batch without a single trained token changes nothing. A non-finite gradient is skipped and
    reported as `skipped` = 1. `compiles` counts the programs that this learner's micro-batches
    took: few, see `pack_by_length` and `padded`.

    `stale_tokens` of the batch's sampled tokens are another policy's; `masked_tokens` of them
    get no gradient. Where others do, `ratio_mean` and `ratio_max` tell their ratios before
    clipping, and `clipped_share` how many were clipped. Raises ValueError for a stale token
    if `off_policy` is `strict`, before anything is computed.
    """
    batches = [batch] if isinstance(batch, Batch) else batch
    stale_tokens, masked = self._check_stale(batches, version), self.correction.kind == "mask"
    with self._on_mesh():
      grads, sums = None, []
      for part in batches:
        rows_of = self.micro_rows * part.split
        for rows in micro_batches(part, rows_of, version, mesh=self.mesh, mask_stale=masked):
          if grads is None:
            grads = _zeros(self.params, self.cfg, self.lora)
          self._shapes.add((rows.tokens.shape, rows.target.shape, rows.stale_turn is None))
          # Without a stale token all settings run one program.
          kind = () if rows.stale_turn is None else (self.correction,)
          grads, aux = _accumulate(self.params, self._frozen, grads, self._place(rows), self.cfg,
                                   self.how, self.lora, *kind)
          sums.append(aux)
      counts = {"compiles": len(self._shapes), "stale_tokens": stale_tokens,
                "masked_tokens": stale_tokens * masked}
      if not sums:
        return {"loss": 0.0, "trained_tokens": 0, "skipped": 0, **counts}
      self.opt_state = sharding.unpark(self.opt_state)
      self.params, self.opt_state, norm = _apply(
          self.params, self.opt_state, grads, self.optimizer, self.cfg, self.lora)
    return {**counts, **_means([{k: float(v) for k, v in s.items()} for s in sums]),
            "grad_norm": float(norm), "skipped": int(not np.isfinite(float(norm)))}

  def _check_stale(self, batches: Sequence[Batch], version: int | None) -> int:
    """How many tokens are stale. Raises ValueError if there may be none."""
    odd = [part.versions[stale(part, version)] for part in batches]
    count = sum(map(len, odd))
    if count and self.correction.kind == "strict":
      others = ", ".join(map(str, np.unique(np.concatenate(odd))))
      raise ValueError(
        f"{count} tokens of the batch were sampled by policy {others}, but policy {version} is "
        "updated, and off_policy=strict allows none of another: roll out without pauses and "
        "ahead of no update, or set off_policy to mask, tis, topr or keep")
    return count

  def _on_mesh(self) -> contextlib.AbstractContextManager:
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def _put(self, params: Params, declared: Any) -> Params:
    if self.mesh is None:
      return jax.tree.map(jnp.array, params)  # its own copy: an update donates its buffers
    return sharding.shard(self.mesh, params, declared)

  def _place(self, rows: loss_lib.Rows) -> loss_lib.Rows:
    if self.mesh is None:
      return rows
    by_row = NamedSharding(self.mesh, sharding.spec(self.mesh, ("rows", "tokens")))
    by_piece = NamedSharding(self.mesh, P(loss_lib.PIECES, None))
    return loss_lib.Rows(*(
      jax.make_array_from_callback(
        a.shape, by_row if name in ("tokens", "positions", "segment_ids") else by_piece,
        lambda index, a=a: a[index])
      for name, a in rows._asdict().items() if a is not None))


def _means(sums: Sequence[dict[str, float]]) -> dict[str, float]:
  """The metrics of an update from the sums of its micro-batches."""
  total = lambda key: sum(s.get(key, 0.0) for s in sums)
  most = lambda key: max(s.get(key, 0.0) for s in sums)
  n, of_others = total("trained_tokens"), total("stale_tokens")
  means = {
    "loss": total("loss"),
    "trained_tokens": int(n),
    "log_prob": total("log_prob") / n,
    "entropy": total("entropy") / n,
    "logprob_gap": total("gap") / max(total("compared_tokens"), 1),
    "logprob_gap_max": most("max_gap"),
  }
  if of_others:
    means |= {"ratio_mean": total("ratio") / of_others, "ratio_max": most("max_ratio"),
              "clipped_share": total("clipped") / of_others}
  return means


# -------------------------------------------------------------------- compiled once for all


def _trained(cfg: ModelConfig, lora: Lora | None) -> dict[str, Any]:
  """The declarations of what is trained."""
  declared = transformer.declare(cfg)
  return {"layers": lora_lib.declare(declared["layers"], lora)} if lora else declared


@functools.partial(jax.jit, static_argnames=("cfg", "lora"))
def _zeros(params, cfg, lora):
  return sharding.pin(jax.tree.map(jnp.zeros_like, params), _trained(cfg, lora))


@functools.partial(jax.jit, static_argnames=("optimizer", "cfg", "lora"))
def _init(params, optimizer, cfg, lora):
  return sharding.pin(optimizer.init(params), _trained(cfg, lora))


@functools.partial(jax.jit, static_argnames=("cfg", "lora"))
def _merge(frozen, adapters, cfg, lora):
  return sharding.pin(lora_lib.merge(frozen, adapters, lora), transformer.declare(cfg))


@functools.partial(jax.jit, static_argnames=("cfg", "how", "lora", "correction"),
                   donate_argnames="grads")
def _accumulate(params, frozen, grads, rows, cfg, how, lora, correction=loss_lib.Correction()):
  def of(params):
    whole = lora_lib.attach(frozen, params, lora) if lora else params
    return loss_lib.reinforce(whole, cfg, rows, how, correction)

  (loss, aux), new = jax.value_and_grad(of, has_aux=True)(params)
  grads = jax.tree.map(jnp.add, grads, new)
  return sharding.pin(grads, _trained(cfg, lora)), {**aux, "loss": loss}


@functools.partial(jax.jit, static_argnames=("optimizer", "cfg", "lora"), donate_argnums=(0, 1))
def _apply(params, opt_state, grads, optimizer, cfg, lora):
  norm = optax.global_norm(grads)
  finite = jnp.isfinite(norm)
  updates, new_state = optimizer.update(grads, opt_state, params)
  keep = lambda new, old: sharding.pin(
    jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old), _trained(cfg, lora))
  return keep(optax.apply_updates(params, updates), params), keep(new_state, opt_state), norm
