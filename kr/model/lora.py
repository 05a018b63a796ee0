"""Low-rank adapters (Hu et al., 2021): a frozen matrix w computes as w + alpha / rank · a·b.

The adapter of `wq` is `wq_lora_a` [layers, inputs…, rank] and `wq_lora_b` [layers, rank,
outputs…], beside it in the tree of the layers; `kr.model.ops.linear` takes the detour through
them. b starts at zero, so that training starts at the frozen policy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kr.model import ops
from kr.model.sharding import ZEROS, Param


@dataclasses.dataclass(frozen=True)
class Lora:
  """rank: dimensions of the detour. alpha: its weight is alpha / rank. targets: the matrices
  that get one, such as wq; (): all of attention and of dense and shared MLPs, no experts'."""

  rank: int
  alpha: float
  targets: tuple[str, ...] = ()

  def __post_init__(self):
    object.__setattr__(self, "targets", tuple(self.targets))
    if self.rank < 1 or not 0 < self.alpha < math.inf:
      raise ValueError(f"lora_rank={self.rank} must be at least 1, and lora_alpha={self.alpha} "
                       "above 0 and finite")


def matrix_axes(name: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """(input axes, output axes) of a matrix of the layers or of its adapter; None for all else.

  Axis 0 is the layer, and axis 1 the expert where the name says experts.
  """
  base, _, part = name.partition("_lora_")
  if not base.startswith(("w", "gate", "up", "down", "shared_", "experts_")):
    return None
  first = 2 if base.startswith("experts_") else 1
  inputs = 2 if base == "wo" and part != "b" else 1  # wo takes heads and their dimensions
  return tuple(range(first, first + inputs)), tuple(range(first + inputs, ndim))


def declare(declared: dict[str, Param], lora: Lora) -> dict[str, Param]:
  """The adapters' parameters, beside those of the stacked layers that are `declared`.

  Raises ValueError for a target that is no matrix of theirs.
  """
  matrices = [name for name, p in declared.items() if matrix_axes(name, len(p.shape))]
  targets = lora.targets or [name for name in matrices if not name.startswith("experts_")]
  if unknown := [name for name in targets if name not in matrices]:
    raise ValueError(f"lora_targets has {', '.join(unknown)}; this model's matrices are "
                     f"{', '.join(matrices)}")
  sides = lambda name: [math.prod(declared[name].shape[i] for i in axes)
                        for axes in matrix_axes(name, len(declared[name].shape))]
  if lora.rank > (most := max(min(sides(name)) for name in targets)):
    raise ValueError(f"lora_rank={lora.rank} is more than the {most} that the largest of these "
                     f"matrices has: {', '.join(targets)}")
  out = {}
  for name in targets:
    p = declared[name]
    inputs, outputs = matrix_axes(name, len(p.shape))
    pick = lambda values, axes: tuple(values[i] for i in axes)
    batch = tuple(range(inputs[0]))
    fan_in = math.prod(pick(p.shape, inputs))
    out[f"{name}_lora_a"] = Param((*pick(p.shape, batch + inputs), lora.rank),
                                  (*pick(p.axes, batch + inputs), None), fan_in)
    out[f"{name}_lora_b"] = Param((*pick(p.shape, batch), lora.rank, *pick(p.shape, outputs)),
                                  (*pick(p.axes, batch), None, *pick(p.axes, outputs)), ZEROS)
  return out


def attach(params: dict[str, Any], adapters: dict[str, Any], lora: Lora) -> dict[str, Any]:
  """The whole tree that the forward pass takes: a carries the factor alpha / rank there."""
  scaled = {name: a * (lora.alpha / lora.rank) if name.endswith("_a") else a
            for name, a in adapters["layers"].items()}
  return {**params, "layers": {**params["layers"], **scaled}}


def merge(params: dict[str, Any], adapters: dict[str, Any], lora: Lora) -> dict[str, Any]:
  """The tree without adapters that computes the same: w + alpha / rank · a·b."""
  tree = attach(params, adapters, lora)["layers"]
  return {**params, "layers": {name: matrix(tree, name, 1) for name in params["layers"]}}


def matrix(p: dict[str, Any], name: str, stacked: int = 0) -> Any:
  """The matrix `name` of p with its adapter added, if it has one.

  stacked: 1 if p holds all layers, on axis 0; 0 if p holds one.
  """
  w = p[name]
  if f"{name}_lora_a" not in p:
    return w
  inputs, _ = matrix_axes(name, w.ndim + 1 - stacked)
  letters = "abcdefgh"[:w.ndim]
  first, split = inputs[0] - 1 + stacked, inputs[-1] + stacked
  batch = letters[:first]
  spec = f"{letters[:split]}z,{batch}z{letters[split:]}->{letters}"
  return w + ops.einsum(spec, p[f"{name}_lora_a"], p[f"{name}_lora_b"]).astype(w.dtype)
