"""Decoding with a KV cache: the learner's forward pass, a few tokens at a time.

`kr.model.transformer.hidden` takes an `attend`; the ones here read earlier keys and
values from a cache, so that the server's pass is the learner's own. Each program first
copies the part of the cache that its rows attend to, works on that copy together with
the new tokens, and at the end writes the new keys and values into the donated cache in
place: the large buffer is touched once a call, not once a token. `decode` puts the copy where
the call before had its own: on CPU, new memory costs more than what is written to it.

Letters: N slots, C slot capacity in tokens, S attended span, B rows, T tokens in a
chunk, L layers, H heads, K kv heads, k and v dimensions of a key and a value, V vocabulary.
Shapes are static; the engine pads to a few buckets. Padding rows point at the last slot, which
nobody reads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kr.model import sharding
from kr.model import transformer
from kr.model.config import ModelConfig


class Cache(NamedTuple):
  """Keys and values, one array a layer, laid out as the two matrix products read them."""
  k: tuple[jax.Array, ...]  # L x [N,K,k,C]
  v: tuple[jax.Array, ...]  # L x [N,K,C,v]


class Rows(NamedTuple):
  """The rows of one decode call; every field has B as its first axis."""
  slot: Any  # [B] int32
  token: Any  # [B] int32, the newest token, not in the cache yet
  position: Any  # [B] int32, its position = number of cached tokens
  seed: Any  # [B,2] uint32
  temperature: Any  # [B] float32, 0 = greedy
  top_p: Any  # [B] float32, 1 = off
  top_k: Any  # [B] int32, V = off
  min_p: Any  # [B] float32, 0 = off


def init_cache(cfg: ModelConfig, slots: int, capacity: int) -> Cache:
  """An empty float32 cache: `slots` sequences of `capacity` tokens."""
  K = cfg.heads if cfg.mla else cfg.kv_heads  # latent attention is expanded to full heads
  k, v = (slots, K, cfg.key_dim, capacity), (slots, K, capacity, cfg.value_dim)
  return Cache(tuple(jnp.zeros(k, jnp.float32) for _ in range(cfg.layers)),
               tuple(jnp.zeros(v, jnp.float32) for _ in range(cfg.layers)))


def _read(cache: Cache, slot: jax.Array, span: int) -> Cache:
  """The first `span` tokens of some slots: L x [B,K,h,S], L x [B,K,S,h].

  The barrier makes it a copy, not a view that later products read the cache through.
  """
  return jax.lax.optimization_barrier(Cache(
      tuple(k[slot, :, :, :span] for k in cache.k), tuple(v[slot, :, :span] for v in cache.v)))


def _write(cache: Cache, new: Cache, old: Cache, slot: jax.Array, start: jax.Array) -> Cache:
  """Writes new [B,K,h,T], [B,K,T,h] at each row's slot and start; in place when donated.

  `old` is what was read: no write may come before it, or XLA copies the whole cache.
  """
  new, _ = jax.lax.optimization_barrier((new, old))

  def scatter(old, update, axis):
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis))
    out = jax.lax.scatter(old, jnp.stack([slot, start], -1), update, numbers, mode="clip")
    return sharding.constrain(out, None, "kv_heads", None, None)  # where it lay: it is donated

  return Cache(tuple(scatter(o, n, 3) for o, n in zip(cache.k, new.k)),
               tuple(scatter(o, n, 2) for o, n in zip(cache.v, new.v)))


def _attention(q, old_k, old_v, new_k, new_v, visible):
  """Softmax attention over cached and new keys together.

  q [B,T,H,k], scaled; old_k [B,K,k,S], old_v [B,K,S,v]; new_k [B,K,k,n], new_v [B,K,n,v];
  visible [B,T,S+n] bool -> [B,T,H,v].
  """
  B, T, H, h = q.shape
  K, S, v = old_k.shape[1], old_k.shape[3], old_v.shape[3]
  q = q.reshape(B, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, h)  # [B,K,G*T,k]
  dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)  # as the learner's
  scores = jnp.concatenate([dot(q, old_k), dot(q, new_k)], -1)
  scores = scores.reshape(B, K, H // K, T, -1)
  scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, -1).reshape(B, K, -1, scores.shape[-1])
  out = dot(weights[..., :S], old_v) + dot(weights[..., S:], new_v)  # [B,K,G*T,v]
  return out.reshape(B, K, H // K, T, v).transpose(0, 3, 1, 2, 4).reshape(B, T, H, v)


def _ages(start, span: int, T: int):
  """How many tokens before each of T new ones its keys stand, cached then new: [B,T,span+T].

  start [B]: the position of the first new one. Negative for what is not there yet, or padding.
  """
  query = start[:, None, None] + jnp.arange(T)[:, None]  # [B,T,1]
  cached = jnp.arange(span)  # in a slot, a token's place is its position
  old = jnp.where(cached < start[:, None, None], query - cached, -1)
  new = jnp.arange(T)[:, None] - jnp.arange(T)
  return jnp.concatenate([old, jnp.broadcast_to(new, (len(start), T, T))], -1)


def _visible(ages, window: int):
  """ages [B,T,S] -> bool [B,T,S]; window: tokens looked back, the query's own included; 0: all."""
  return (ages >= 0) & (ages < window) if window else ages >= 0


def _chunk(params, cfg: ModelConfig, cache: Cache, tokens, slot, start, span: int):
  """Runs a chunk of known tokens [B,T] at positions start + 0..T-1 -> (hidden [B,T,D], cache)."""
  B, T = tokens.shape
  old = _read(cache, slot, span)
  fresh_k, fresh_v = [], []
  ages = _ages(start, span, T)  # [B,T,S+T]

  def attend(layer, q, k, v):
    fresh_k.append(k.transpose(0, 2, 3, 1))
    fresh_v.append(v.transpose(0, 2, 1, 3))
    return _attention(q, old.k[layer], old.v[layer], fresh_k[-1], fresh_v[-1],
                      _visible(ages, cfg.window_of(layer)))

  x = transformer.hidden(params, cfg, tokens, start[:, None] + jnp.arange(T), attend)
  return x, _write(cache, Cache(tuple(fresh_k), tuple(fresh_v)), old, slot, start)


@functools.partial(jax.jit, static_argnames=("cfg", "span"), donate_argnames="cache")
def prefill(params, cache: Cache, tokens, slot, start, *, cfg: ModelConfig, span: int) -> Cache:
  """Adds known tokens to the cache: tokens [B,T]; slot, start [B].

  `span` >= max(start): how much of a slot is attended to. start + T must not exceed C.
  What a row pads its chunk with is overwritten later, before anything attends to it.
  """
  return _chunk(params, cfg, cache, tokens, slot, start, span)[1]


@functools.partial(jax.jit, static_argnames=("cfg", "span"), donate_argnames="cache")
def score(params, cache: Cache, tokens, targets, slot, start, *, cfg: ModelConfig, span: int):
  """`prefill` that also returns log p(targets [B,T] | the tokens up to there) -> ([B,T], cache)."""
  x, cache = _chunk(params, cfg, cache, tokens, slot, start, span)
  piece = min(tokens.size, 256)  # bounds the logits: 256 x V at a time; sizes are powers of two

  def logprob(args):
    x, targets = args
    logp = jax.nn.log_softmax(transformer.logits(params, x), -1)
    return jnp.take_along_axis(logp, targets[:, None], -1)[:, 0]

  out = jax.lax.map(logprob, (x.reshape(-1, piece, x.shape[-1]), targets.reshape(-1, piece)))
  return out.reshape(tokens.shape), cache


@functools.partial(jax.jit, static_argnames=("cfg", "span", "steps", "truncate"),
                   donate_argnames=("cache", "scratch"), keep_unused=True)
def decode(params, cache: Cache, scratch: Cache, rows: Rows, *, cfg: ModelConfig, span: int,
           steps: int, truncate: bool):
  """Samples `steps` tokens for each row -> (tokens [B,steps], logprobs [B,steps], cache, scratch).

  `scratch`: memory of the shape init_cache(cfg, B, span), whatever it holds; to give to the next
  call of that shape. `span` >= max(position). `truncate`: some row uses top_p, top_k or min_p. A
  row whose last useful token comes before `steps` simply ignores the rest.
  """
  old = _read(cache, rows.slot, span)
  ages = _ages(rows.position, span, steps)  # [B,steps,S+steps]

  def step(carry, i):
    token, new = carry
    fresh = Cache(list(new.k), list(new.v))
    age = jax.lax.dynamic_slice_in_dim(ages, i, 1, 1)  # [B,1,S+steps]

    def attend(layer, q, k, v):
      put = jax.lax.dynamic_update_slice_in_dim
      fresh.k[layer] = put(fresh.k[layer], k.transpose(0, 2, 3, 1), i, 3)
      fresh.v[layer] = put(fresh.v[layer], v.transpose(0, 2, 1, 3), i, 2)
      return _attention(q, old.k[layer], old.v[layer], fresh.k[layer], fresh.v[layer],
                        _visible(age, cfg.window_of(layer)))

    position = rows.position + i
    x = transformer.hidden(params, cfg, token[:, None], position[:, None], attend)[:, 0]
    token, logprob = sample(transformer.logits(params, x), rows, position, truncate)
    return (token, Cache(tuple(fresh.k), tuple(fresh.v))), (token, logprob)

  empty = init_cache(cfg, rows.slot.shape[0], steps)
  (_, new), (tokens, logprobs) = jax.lax.scan(step, (rows.token, empty), jnp.arange(steps))
  return tokens.T, logprobs.T, _write(cache, new, old, rows.slot, rows.position), old


@functools.partial(jax.jit, static_argnames=("span",), donate_argnames="cache")
def copy(cache: Cache, source, target, *, span: int) -> Cache:
  """Copies the first `span` tokens of slots source [B] to slots target [B]."""
  read = _read(cache, source, span)
  return _write(cache, read, read, target, jnp.zeros_like(target))


def sample(logits: jax.Array, rows: Rows, position: jax.Array, truncate: bool):
  """Draws one token a row -> (token [B] int32, logprob [B]).

  Logprobs are those of the temperature-scaled distribution before top_k, top_p and
  min_p, as SGLang reports them; at temperature 0 those of temperature 1. The draw
  depends on the row's seed and position only, not on what else is in the batch.
  """
  greedy = rows.temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
  top = scaled.max(-1, keepdims=True)
  p = jnp.exp(scaled - top)
  total = p.sum(-1, keepdims=True)
  if truncate:
    p = _truncated(p / total, rows)
  keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows.seed), position)
  u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  # Greedy: all weight on the likeliest tokens, of which 0 picks the first. XLA's argmax is slow.
  p = jnp.where(greedy[:, None], scaled == top, p)
  token = _draw(p, jnp.where(greedy[:, None], 0.0, u)).astype(jnp.int32)
  chosen = jnp.take_along_axis(scaled, token[:, None], -1)
  return token, (chosen - top - jnp.log(total))[:, 0]


def _truncated(p: jax.Array, rows: Rows) -> jax.Array:
  """Zeroes what top_k, top_p and min_p exclude; each applies to the untruncated p [B,V]."""
  order = jnp.argsort(-p, -1)
  ranked = jnp.take_along_axis(p, order, -1)
  before = jnp.cumsum(ranked, -1) - ranked
  keep = ((jnp.arange(p.shape[-1]) < rows.top_k[:, None])
          & (before <= rows.top_p[:, None])
          & (ranked >= ranked[:, :1] * rows.min_p[:, None]))
  kept = jnp.where(keep, ranked, 0.0)
  return jnp.put_along_axis(jnp.zeros_like(p), order, kept, -1, inplace=False)


def _draw(p: jax.Array, u: jax.Array) -> jax.Array:
  """Inverse-CDF sampling in two levels: a block of the vocabulary, then a token in it.

  p [B,V], not necessarily normalised; u [B,2] uniform in [0,1). Two small cumulative
  sums and two random numbers a row, where Gumbel noise would need V of them.
  """
  B, V = p.shape
  block = 1 << max((V.bit_length() + 1) // 2, 1)
  p = jnp.pad(p, ((0, 0), (0, -V % block))).reshape(B, -1, block)

  def pick(weights, u):  # [B,n], [B] -> [B]: first index whose cumulative weight passes u
    total = jnp.cumsum(weights, -1)
    passed = (total > u[:, None] * total[:, -1:]) & (weights > 0)
    # Rounding may leave nothing passed: then the last index that has weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, -1), last)

  chosen = pick(p.sum(-1), u[:, 0])
  inside = jnp.take_along_axis(p, chosen[:, None, None], 1)[:, 0]
  return chosen * block + pick(inside, u[:, 1])
