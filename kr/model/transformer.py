"""The policy network: pure functions over a parameter tree, and its Flax NNX face.

One forward pass serves learner and server: both call `hidden`, each with its own
`attend`. The learner's sees whole packed rows (`kr.model.attention`), the server's writes to
and reads from a KV cache (`kr.model.decode`). A layer is attention (grouped heads in
`kr.model.layers`, or latent in `kr.model.mla`) and an MLP (dense, or the experts of
`kr.model.moe`); the config says which. Letters: B rows, T tokens, D width, H heads, K kv
heads, k and v dimensions of a head's key and value, F mlp, L layers, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from kr.model import attention
from kr.model import layers
from kr.model import mla
from kr.model import moe
from kr.model import ops
from kr.model import rope
from kr.model import sharding
from kr.model.config import Execution, ModelConfig
from kr.model.sharding import ONES, Param

Params = dict[str, Any]
# attend(layer, q [B,T,H,k], k [B,T,K,k], v [B,T,K,v]) -> [B,T,H,v]. q is scaled already. Of a
# scanned run of equal layers, `layer` is the first.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
PLAIN = Execution(remat="none")  # float32, nothing recomputed, unrolled


# -------------------------------------------------------------------- parameters


def declare(cfg: ModelConfig) -> dict[str, Any]:
  """Every parameter, once. Those of the layers are stacked on axis 0 over the layers that
  have them: `gate` over the dense ones, `experts_gate` over the mixtures."""
  D, V = cfg.width, cfg.vocab
  stacked = {
    name: Param((len(layers_of(cfg, name)), *p.shape), (None, *p.axes), p.fan_in)
    for name, p in _of_layers(cfg).items()
  }
  tree: dict[str, Any] = {
    "embed": Param((V, D), ("vocab", "width"), D),
    "layers": stacked,
    "final_norm": Param((D,), (None,), ONES),
  }
  if not cfg.tied:
    tree["head"] = Param((D, V), ("width", "vocab"), D)
  return tree


def _of_layers(cfg: ModelConfig) -> dict[str, Param]:
  norm = Param((cfg.width,), (None,), ONES)
  out = {"attn_norm": norm, "mlp_norm": norm}
  out |= mla.declare(cfg) if cfg.mla else layers.declare_heads(cfg)
  if any(not cfg.is_moe(i) for i in range(cfg.layers)):
    out |= layers.declare_mlp(cfg)
  if any(cfg.is_moe(i) for i in range(cfg.layers)):
    out |= moe.declare(cfg)
  return out


def layers_of(cfg: ModelConfig, name: str) -> list[int]:
  """The indices of the layers over which the parameter `name`, or its adapter, is stacked."""
  name = name.partition("_lora_")[0]
  if name in layers.declare_mlp(cfg):
    return [i for i in range(cfg.layers) if not cfg.is_moe(i)]
  if cfg.moe and name in moe.declare(cfg):
    return [i for i in range(cfg.layers) if cfg.is_moe(i)]
  return list(range(cfg.layers))


def declared_map(f: Callable[[Param], Any], cfg: ModelConfig) -> dict[str, Any]:
  """The tree of f(parameter) over all parameters."""
  return jax.tree.map(f, declare(cfg), is_leaf=lambda p: isinstance(p, Param))


def shapes(cfg: ModelConfig) -> dict[str, Any]:
  """The tree of all parameters' shapes."""
  return declared_map(lambda p: p.shape, cfg)


def init(cfg: ModelConfig, seed: int = 0) -> Params:
  """Random float32 parameters, as `declare` says."""
  return draw(declare(cfg), seed)


def draw(declared: dict[str, Any], seed: int) -> Params:
  """Random float32 parameters, as they are declared."""
  rng = np.random.default_rng(seed)

  def one(p: Param) -> jax.Array:
    if p.fan_in <= 0:
      return jnp.full(p.shape, 1.0 if p.fan_in == ONES else 0.0, jnp.float32)
    return jnp.asarray(rng.standard_normal(p.shape, np.float32) * np.float32(p.fan_in**-0.5))

  return jax.tree.map(one, declared, is_leaf=lambda p: isinstance(p, Param))


# -------------------------------------------------------------------- forward


def block(
  p: Params, cfg: ModelConfig, layer: int, x: jax.Array, angles: tuple[jax.Array, jax.Array],
  attend: Attend, how: Execution,
) -> jax.Array:
  """One layer. p: that layer's parameters; x [B,T,D] -> [B,T,D]."""
  x = checkpoint_name(sharding.constrain(x, "rows", "tokens", None), "block_input")
  heads = mla.heads if cfg.mla else layers.heads
  y = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
  x = x + heads(p, cfg, y, angles, functools.partial(attend, layer), how)
  y = ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps)
  return x + (moe.apply(p, cfg, y, how) if cfg.is_moe(layer) else layers.mlp(p, y, how))


def hidden(
  params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, attend: Attend,
  how: Execution = PLAIN,
) -> jax.Array:
  """The residual stream after the final norm: tokens, positions [B,T] -> [B,T,D].

  Where layers are unrolled, params["layers"] may hold tuples instead of stacks.
  """
  # The table is gathered over fsdp first: rows are split over that axis too.
  table = sharding.constrain(params["embed"], "vocab", None)
  x = sharding.constrain(table[tokens], "rows", "tokens", None)
  x = x.astype(jnp.bfloat16) if how.precision == "bfloat16" else x
  angles = rope.angles(cfg, positions)

  def step(layer: int, x: jax.Array, p: Params) -> jax.Array:
    f = lambda x, p: block(p, cfg, layer, x, angles, attend, how)
    return _remat(f, how)(x, p)

  if how.scan:
    for start, stop in _runs(cfg):
      p = {name: a[_slice(cfg, name, start, stop)] for name, a in params["layers"].items()
           if start in layers_of(cfg, name)}
      x, _ = jax.lax.scan(lambda x, p: (step(start, x, p), None), x, p)
  else:
    single = {name: dict(zip(layers_of(cfg, name), a if isinstance(a, tuple) else ops.unstack(a)))
              for name, a in params["layers"].items()}
    for layer in range(cfg.layers):
      x = step(layer, x, {name: a[layer] for name, a in single.items() if layer in a})
  return ops.rms_norm(x, params["final_norm"], cfg.norm_eps)


def _remat(f: Callable, how: Execution) -> Callable:
  policies = jax.checkpoint_policies
  if how.remat == "none":
    return f
  policy = {
    "block": None,
    "dots": policies.dots_with_no_batch_dims_saveable,
    "offload": policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[], names_which_can_be_offloaded=["block_input"],
      offload_src="device", offload_dst="pinned_host"),
  }[how.remat]
  return jax.checkpoint(f, policy=policy, prevent_cse=not how.scan)


def _runs(cfg: ModelConfig) -> list[tuple[int, int]]:
  """Maximal ranges (start, stop) of layers that are computed alike."""
  kinds = [(cfg.is_moe(i), cfg.window_of(i)) for i in range(cfg.layers)]
  starts = [i for i in range(cfg.layers) if i == 0 or kinds[i] != kinds[i - 1]]
  return list(zip(starts, starts[1:] + [cfg.layers]))


def _slice(cfg: ModelConfig, name: str, start: int, stop: int) -> slice:
  """Where the layers start … stop-1 stand in the stack of `name`."""
  first = layers_of(cfg, name).index(start)
  return slice(first, first + stop - start)


def logits(params: Params, x: jax.Array, how: Execution = PLAIN) -> jax.Array:
  """x [...,D] -> float32 logits [...,V]."""
  flat = x.reshape(-1, x.shape[-1])
  if "head" in params:
    out = ops.project("nd,dv->nv", flat, params["head"], how, jnp.float32)
  else:
    out = ops.project("nd,vd->nv", flat, params["embed"], how, jnp.float32)
  return out.reshape(*x.shape[:-1], -1)


def forward(
  params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array,
  segment_ids: jax.Array, how: Execution = PLAIN,
) -> jax.Array:
  """Whole packed rows: tokens, positions, segment_ids [B,T] -> hidden [B,T,D].

  Where the mesh has a context axis, the rows' tokens must stand in the order of `order`.
  """
  where = attention.Where(order(tokens.shape[1]), segment_ids)
  attend = lambda layer, q, k, v: attention.attend(
    q, k, v, where, window=cfg.window_of(layer), kind=how.attention)
  return hidden(params, cfg, tokens, positions, attend, how)


def order(tokens: int) -> np.ndarray:
  """[tokens] int32: which token of a row stands at each place on the current mesh."""
  mesh = sharding.current()
  return sharding.zigzag(tokens, mesh.shape["context"] if mesh else 1)


class Transformer(nnx.Module):
  """The policy as an NNX module: holds the parameters, calls the pure functions.

  `nnx.to_pure_dict(nnx.state(model))["params"]` is the tree that everything else takes.
  """

  def __init__(self, cfg: ModelConfig, params: Params | None = None, seed: int = 0):
    self.cfg = cfg
    self.params = nnx.data(jax.tree.map(nnx.Param, init(cfg, seed) if params is None else params))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """tokens [B,T], one segment a row -> logits [B,T,V]."""
    params = jax.tree.map(lambda p: p[...], self.params, is_leaf=lambda p: isinstance(p, nnx.Param))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return logits(params, forward(params, self.cfg, tokens, positions, jnp.ones_like(tokens)))
