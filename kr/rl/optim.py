"""Optimizers: AdamW or Muon behind a global-norm clip, and the schedules of their step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from kr.model import lora

FINAL = 0.1  # of the learning rate is left where a schedule ends


def make_optimizer(learning_rate: float, warmup_steps: int, clip_norm: float, weight_decay: float,
                   b2: float = 0.95, *, kind: str = "adamw", schedule: str = "constant",
                   total_steps: int | None = None) -> optax.GradientTransformation:
  """The optimizer of a step: clip by the global norm, then `kind`.

  b2: decay of the second moment. RL wants it near 1: as the policy improves, gradients
  shrink, and a short memory would scale their noise up to full steps.
  kind: "adamw" (Loshchilov and Hutter, 2019), or "muon" (Jordan, 2024) for the layers' matrices
  and AdamW for the rest: embedding, head, norms, biases, router. Muon's steps have AdamW's root
  mean square (Liu et al., 2025), so that one learning rate serves both.
  Norms, biases and the router's selection bias do not decay. schedule: see `make_schedule`.
  """
  if kind not in ("adamw", "muon"):
    raise ValueError(f"optimizer {kind!r} is neither adamw nor muon")
  rate = make_schedule(schedule, learning_rate, warmup_steps, total_steps)
  adamw = optax.adamw(rate, b1=0.9, b2=b2, weight_decay=weight_decay, mask=_by_name(_decays))
  if kind == "adamw":
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
  muon = contrib.muon(rate, weight_decay=weight_decay, consistent_rms=0.2,
                      muon_weight_dimension_numbers=_by_name(_dimensions))
  label = lambda name, a: "adamw" if _dimensions(name, a) is None else "muon"
  return optax.chain(optax.clip_by_global_norm(clip_norm),
                     optax.partition({"muon": muon, "adamw": adamw}, _by_name(label)))


def make_schedule(kind: str, learning_rate: float, warmup_steps: int, total_steps: int | None
                  ) -> optax.Schedule:
  """Linear warm-up to `learning_rate`, then what `kind` says, down to a tenth at `total_steps`.

  constant: stays. cosine, linear: falls all the way. wsd: stays, and falls over the last fifth
  (warm-up, stable, decay: Hu et al., 2024). Raises ValueError for a kind that it does not know,
  or one that falls without a `total_steps` above `warmup_steps`.
  """
  if kind not in ("constant", "cosine", "linear", "wsd"):
    raise ValueError(f"schedule {kind!r} is none of constant, cosine, linear, wsd")
  if kind != "constant" and (total_steps or 0) <= warmup_steps:
    raise ValueError(f"schedule {kind} needs more steps in total than the {warmup_steps} of its "
                     f"warm-up, not {total_steps}")
  warmup = optax.linear_schedule(
      learning_rate / max(warmup_steps, 1), learning_rate, warmup_steps)
  if kind == "constant":
    return warmup
  rest = total_steps - warmup_steps
  fall = lambda steps: optax.linear_schedule(learning_rate, learning_rate * FINAL, steps)
  if kind == "cosine":
    after = optax.cosine_decay_schedule(learning_rate, rest, FINAL)
  elif kind == "linear":
    after = fall(rest)
  else:
    last = max(rest // 5, 1)
    after = optax.join_schedules([optax.constant_schedule(learning_rate), fall(last)],
                                 [rest - last])
  return optax.join_schedules([warmup, after], [warmup_steps])


def _by_name(f: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
  """tree -> the tree of f(name, leaf)."""
  return lambda tree: jax.tree_util.tree_map_with_path(lambda path, a: f(path[-1].key, a), tree)


def _decays(name: str, _: Any) -> bool:
  return not (name.endswith(("norm", "_bias")) or name.startswith("b"))


def _dimensions(name: str, a: Any) -> contrib.MuonDimensionNumbers | None:
  """How Muon sees a parameter: as one matrix of all heads for each layer, and each expert."""
  axes = lora.matrix_axes(name, a.ndim)
  return axes and contrib.MuonDimensionNumbers(*axes)
