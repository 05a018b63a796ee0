"""A mixture of experts in place of the MLP, dropless: every token visits all it chose.

Tokens are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`). On a mesh,
each device of the expert axis computes its own experts for the tokens of all of them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp

from kr.model import layers
from kr.model import lora
from kr.model import ops
from kr.model import sharding
from kr.model.config import Execution, ModelConfig
from kr.model.sharding import ZEROS, Param


def declare(cfg: ModelConfig) -> dict[str, Param]:
  """Parameters of one mixture."""
  m, D = cfg.moe, cfg.width
  E, F = m.experts, m.mlp
  out = {
    "router": Param((D, E), (None, None), D),
    "experts_gate": Param((E, D, F), ("experts", "width", "mlp"), D),
    "experts_up": Param((E, D, F), ("experts", "width", "mlp"), D),
    "experts_down": Param((E, F, D), ("experts", "mlp", "width"), 2 * cfg.layers * F),
  }
  if m.score == "sigmoid":
    out["router_bias"] = Param((E,), (None,), ZEROS)
  if m.shared:
    S = F * m.shared
    out |= {
      "shared_gate": Param((D, S), ("width", "mlp"), D),
      "shared_up": Param((D, S), ("width", "mlp"), D),
      "shared_down": Param((S, D), ("mlp", "width"), 2 * cfg.layers * S),
    }
  return out


def route(p: dict[str, Any], cfg: ModelConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x [B,T,D] -> (weights [B,T,A] float32, experts [B,T,A] int32), A experts a token.

  softmax: the A most probable. sigmoid (DeepSeek-AI, 2024, DeepSeek-V3, section 2.1.2): the bias
  helps to choose, but is not part of the weight; groups of experts are chosen first, by the sum
  of their two best.
  """
  m = cfg.moe
  # Always in float32: it decides.
  scores = ops.einsum("btd,de->bte", x.astype(jnp.float32), p["router"].astype(jnp.float32))
  if m.score == "softmax":
    scores = choice = jax.nn.softmax(scores, -1)
  else:
    scores = jax.nn.sigmoid(scores)
    choice = scores + jax.lax.stop_gradient(p["router_bias"])
    if m.groups > 1:
      grouped = choice.reshape(*x.shape[:2], m.groups, -1)
      best = jax.lax.top_k(grouped, 2)[0].sum(-1)  # [B,T,groups]
      _, kept = jax.lax.top_k(best, m.active_groups)
      kept = jax.nn.one_hot(kept, m.groups, dtype=bool).any(2)  # [B,T,groups]
      choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
  _, experts = jax.lax.top_k(jax.lax.stop_gradient(choice), m.active)
  weights = jnp.take_along_axis(scores, experts, -1)
  if m.normalise:
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
  return weights * m.scaling, experts


def apply(p: dict[str, Any], cfg: ModelConfig, x: jax.Array, how: Execution) -> jax.Array:
  """x [B,T,D] -> [B,T,D]."""
  router = {name: p[name] for name in ("router", "router_bias") if name in p}
  stacks = tuple(lora.matrix(p, f"experts_{name}") for name in ("gate", "up", "down"))
  mesh = sharding.current()
  if mesh is None:
    y = _visit(x, *route(router, cfg, x), *stacks, 0, how)
  else:
    y = _visit_on_mesh(mesh, cfg, x, router, stacks, how)
  if cfg.moe.shared:
    y = y + layers.mlp(p, x, how, prefix="shared_")
  return y


def _visit(x, weights, experts, gate, up, down, first, how: Execution) -> jax.Array:
  """What the experts first, first + 1, … [E,…] contribute: x [B,T,D] -> [B,T,D]."""
  B, T, D = x.shape
  E, A = gate.shape[0], experts.shape[-1]
  dtype = x.dtype if how.precision == "float32" else jnp.bfloat16
  precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None  # as in `ops.einsum`
  mine = experts.reshape(-1) - first  # [N·A]
  mine = jnp.where((mine >= 0) & (mine < E), mine, E)  # E: another device's
  order = jnp.argsort(mine)  # stable: a token's row keeps its place within an expert
  sizes = jnp.bincount(mine, length=E + 1)[:E].astype(jnp.int32)
  rows = x.reshape(-1, D)[order // A].astype(dtype)  # [N·A,D], sorted by expert

  def product(a: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(a.astype(dtype), w.astype(dtype), sizes, precision=precision,
                              preferred_element_type=jnp.float32)

  y = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)  # rows of others: 0
  y = y * weights.reshape(-1)[order][:, None] * (mine[order] < E)[:, None]
  return jnp.zeros((B * T, D), jnp.float32).at[order // A].add(y).reshape(x.shape).astype(x.dtype)


def _visit_on_mesh(mesh, cfg: ModelConfig, x, router, stacks, how: Execution) -> jax.Array:
  """`_visit` in pieces: a device routes its own tokens (XLA would gather them all for top_k);
  tokens are gathered over the expert axis and parameters over fsdp; contributions are summed
  over expert and tensor, and scattered back."""
  declared = declare(cfg)
  rows = sharding.spec(mesh, ("rows", "tokens", None), x.shape)
  specs = [sharding.spec(mesh, p.axes, p.shape)
           for p in (declared["experts_gate"], declared["experts_up"], declared["experts_down"])]
  split = "expert" in tuple(specs[0])  # else the axis does not divide them: all have all experts
  spread = split and "expert" in jax.tree.leaves(tuple(rows))  # rows are split over it too

  def local(x, router, gate, up, down):
    weights, experts = route(router, cfg, x)
    if spread:
      x, weights, experts = (jax.lax.all_gather(a, "expert", axis=0, tiled=True)
                             for a in (x, weights, experts))
    gate, up, down = (_whole(w, s, "fsdp") for w, s in zip((gate, up, down), specs))
    first = jax.lax.axis_index("expert") * gate.shape[0] if split else 0
    y = _visit(x, weights, experts, gate, up, down, first, how)
    if "tensor" in tuple(specs[0]):
      y = jax.lax.psum(y, "tensor")
    if spread:
      return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
    return jax.lax.psum(y, "expert") if split else y

  return jax.shard_map(local, mesh=mesh, in_specs=(rows, P(), *specs), out_specs=rows,
                       check_vma=False)(x, router, *stacks)


def _whole(w: jax.Array, spec: P, axis: str) -> jax.Array:
  for dimension, name in enumerate(spec):
    if name == axis:
      w = jax.lax.all_gather(w, axis, axis=dimension, tiled=True)
  return w
