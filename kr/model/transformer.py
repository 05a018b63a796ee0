"""The policy network: pure functions over a parameter tree, and its Flax NNX face.

One forward pass serves learner and server: both call `hidden`, each with its own
`attend`. The learner's sees whole packed rows (`causal`), the server's writes to and
reads from a KV cache (`kr.model.decode`). Letters: B rows, T tokens, D width, H heads,
K kv heads, h head_dim, F mlp, L layers, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kr.model.config import ModelConfig

Params = dict[str, Any]
# attend(layer, q [B,T,H,h], k [B,T,K,h], v [B,T,K,h]) -> [B,T,H,h]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def shapes(cfg: ModelConfig) -> dict[str, Any]:
  """Every parameter once: name -> shape. Layers are stacked on axis 0."""
  L, D, H, K, h, F = cfg.layers, cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.mlp
  tree = {
    "embed": (cfg.vocab, D),
    "layers": {
      "attn_norm": (L, D),
      "wq": (L, D, H, h),
      "wk": (L, D, K, h),
      "wv": (L, D, K, h),
      "wo": (L, H, h, D),
      "q_norm": (L, h),
      "k_norm": (L, h),
      "mlp_norm": (L, D),
      "gate": (L, D, F),
      "up": (L, D, F),
      "down": (L, F, D),
    },
    "final_norm": (D,),
  }
  if not cfg.tied:
    tree["head"] = (D, cfg.vocab)
  return tree


def init(cfg: ModelConfig, seed: int = 0) -> Params:
  """Random float32 parameters: norms 1, matrices normal with variance 1 / fan_in.

  The projections back into the residual stream are smaller by sqrt(2 L), as in GPT-2.
  """
  rng = np.random.default_rng(seed)
  fan_in = {"embed": cfg.width, "head": cfg.width, "wo": cfg.heads * cfg.head_dim, "down": cfg.mlp}

  def one(path, shape):
    name = path[-1].key
    if name.endswith("norm"):
      return jnp.ones(shape, jnp.float32)
    scale = fan_in.get(name, cfg.width) ** -0.5
    if name in ("wo", "down"):
      scale /= (2 * cfg.layers) ** 0.5
    return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))

  return jax.tree_util.tree_map_with_path(one, shapes(cfg), is_leaf=lambda x: isinstance(x, tuple))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) · weight, over the last axis (Zhang and Sennrich, 2019)."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotary positions (Su et al., 2021), dimension i paired with i + h/2.

  x [B,T,H,h], positions [B,T].
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B,T,1,h/2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(
  p: Params,
  cfg: ModelConfig,
  x: jax.Array,
  positions: jax.Array,
  attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """One layer. p: that layer's parameters; x [B,T,D] -> [B,T,D]."""
  y = rms_norm(x, p["attn_norm"], cfg.norm_eps)
  q = rms_norm(jnp.einsum("btd,dhk->bthk", y, p["wq"]), p["q_norm"], cfg.norm_eps)
  k = rms_norm(jnp.einsum("btd,dhk->bthk", y, p["wk"]), p["k_norm"], cfg.norm_eps)
  v = jnp.einsum("btd,dhk->bthk", y, p["wv"])
  o = attend(rope(q, positions, cfg.rope_theta), rope(k, positions, cfg.rope_theta), v)
  x = x + jnp.einsum("bthk,hkd->btd", o, p["wo"])
  y = rms_norm(x, p["mlp_norm"], cfg.norm_eps)
  return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def hidden(
  params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> jax.Array:
  """The residual stream after the final norm: tokens, positions [B,T] -> [B,T,D]."""
  x = params["embed"][tokens]
  for layer in range(cfg.layers):  # unrolled: decodes faster than a scan on CPU
    p = jax.tree.map(lambda a: a[layer], params["layers"])
    x = block(p, cfg, x, positions, lambda q, k, v: attend(layer, q, k, v))
  return rms_norm(x, params["final_norm"], cfg.norm_eps)


def logits(params: Params, x: jax.Array) -> jax.Array:
  """x [...,D] -> float32 logits [...,V]."""
  head = params["head"] if "head" in params else params["embed"].T
  return (x @ head).astype(jnp.float32)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
  """Softmax attention. q [B,T,H,h]; k, v [B,S,K,h]; visible [B,T,S] bool -> [B,T,H,h].

  Every query must see at least one key.
  """
  B, T, H, h = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, H // K, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * h**-0.5
  scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, -1)
  return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, H, h)


def causal(segment_ids: jax.Array) -> Attend:
  """Attention inside packed rows: to earlier tokens of the same segment. segment_ids [B,T]."""
  T = segment_ids.shape[1]
  visible = jnp.tril(jnp.ones((T, T), bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])
  return lambda layer, q, k, v: attention(q, k, v, visible)


def forward(
  params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Whole packed rows: tokens, positions, segment_ids [B,T] -> hidden [B,T,D]."""
  return hidden(params, cfg, tokens, positions, causal(segment_ids))


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
