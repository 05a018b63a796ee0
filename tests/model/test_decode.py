"""Cached decoding is the learner's full forward pass, and sampling follows its distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kr.model import decode
from kr.model import transformer
from kr.model.config import ModelConfig

CFG = ModelConfig(vocab=61, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32)
PARAMS = jax.tree.map(lambda a: a * 1.5, transformer.init(CFG, 3))


@jax.jit
def _logits(tokens):
  positions = jnp.arange(tokens.shape[1])[None]
  return transformer.logits(
      PARAMS, transformer.forward(PARAMS, CFG, tokens, positions, jnp.ones_like(tokens)))


def reference(tokens, temperature=1.0):
  """log p [T,V] after each token, by the learner's forward pass over the whole sequence."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, :len(tokens)] = tokens
  logits = np.asarray(_logits(padded), np.float64)[0, :len(tokens)] / temperature
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def rows(slot, token, position, *, seed=None, temperature=1.0, top_p=1.0, top_k=None, min_p=0.0):
  B = len(slot)

  def full(value, dtype=np.float32):
    return np.broadcast_to(np.asarray(value, dtype), (B,)).copy()

  seed = np.arange(2 * B).reshape(B, 2) if seed is None else seed
  return decode.Rows(full(slot, np.int32), full(token, np.int32), full(position, np.int32),
                     np.asarray(seed, np.uint32), full(temperature), full(top_p),
                     full(CFG.vocab if top_k is None else top_k, np.int32), full(min_p))


def pad(parts, T):
  out = np.zeros((len(parts), T), np.int32)
  for i, part in enumerate(parts):
    out[i, :len(part)] = part
  return out


def test_cached_decoding_equals_the_full_forward_pass():
  # Ragged prompts, prefilled in two chunks into slots that another request had before.
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 61, n).tolist() for n in (21, 9, 14)]
  slot = np.array([4, 0, 2], np.int32)
  cache = decode.init_cache(CFG, 6, 64)
  junk = rng.integers(0, 61, (3, 32)).astype(np.int32)
  cache = decode.prefill(PARAMS, cache, junk, slot, np.zeros(3, np.int32), cfg=CFG, span=0)
  first = [p[:min(8, len(p) - 1)] for p in prompts]
  rest = [p[len(f):-1] for p, f in zip(prompts, first)]
  start = np.array([len(f) for f in first], np.int32)
  cache = decode.prefill(PARAMS, cache, pad(first, 16), slot, start * 0, cfg=CFG, span=0)
  cache = decode.prefill(PARAMS, cache, pad(rest, 16), slot, start, cfg=CFG, span=32)
  seqs = [list(p) for p in prompts]
  scratch = decode.init_cache(CFG, 3, 32)
  for _ in range(2):
    r = rows(slot, [s[-1] for s in seqs], [len(s) - 1 for s in seqs], temperature=[1.0, 0.7, 1.3])
    tokens, logprobs, cache, scratch = decode.decode(
        PARAMS, cache, scratch, r, cfg=CFG, span=32, steps=4, truncate=False)
    tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
    for s, t, l, temperature in zip(seqs, tokens, logprobs, (1.0, 0.7, 1.3)):
      want = reference(s + t.tolist(), temperature)[len(s) - 1:-1]
      np.testing.assert_allclose(l, want[np.arange(4), t], atol=2e-5)
      s += t.tolist()


def test_scoring_gives_each_tokens_logprob():
  rng = np.random.default_rng(1)
  seq = rng.integers(0, 61, 31).tolist()
  cache = decode.init_cache(CFG, 2, 64)
  zero = np.zeros(1, np.int32)
  a, cache = decode.score(PARAMS, cache, pad([seq[:16]], 16), pad([seq[1:17]], 16), zero, zero,
                          cfg=CFG, span=0)
  b, cache = decode.score(PARAMS, cache, pad([seq[16:30]], 16), pad([seq[17:]], 16), zero,
                          zero + 16, cfg=CFG, span=32)
  got = np.concatenate([np.asarray(a)[0], np.asarray(b)[0, :14]])
  np.testing.assert_allclose(got, reference(seq)[np.arange(30), seq[1:]], atol=2e-5)


def test_a_copied_slot_continues_like_its_source():
  rng = np.random.default_rng(2)
  seq = rng.integers(0, 61, 17)
  cache = decode.init_cache(CFG, 4, 64)
  one = np.ones(1, np.int32)
  cache = decode.prefill(PARAMS, cache, pad([seq[:16]], 16), one, one * 0, cfg=CFG, span=0)
  cache = decode.copy(cache, one, one * 3, span=32)
  r = rows([1, 3], seq[16], 16, seed=[[5, 6], [5, 6]])
  tokens, logprobs, *_ = decode.decode(PARAMS, cache, decode.init_cache(CFG, 2, 32), r, cfg=CFG,
                                       span=32, steps=4, truncate=False)
  np.testing.assert_array_equal(tokens[0], tokens[1])
  np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-6)


def test_the_cache_and_the_working_copy_stay_in_place():
  cache, scratch = decode.init_cache(CFG, 6, 64), decode.init_cache(CFG, 3, 32)
  places = lambda *caches: [a.unsafe_buffer_pointer() for c in caches for a in (*c.k, *c.v)]
  before = places(cache, scratch)
  zero = np.zeros(3, np.int32)
  cache = decode.prefill(PARAMS, cache, np.zeros((3, 16), np.int32), zero, zero, cfg=CFG, span=32)
  r = rows([0, 1, 2], 1, 0)
  *_, cache, scratch = decode.decode(
      PARAMS, cache, scratch, r, cfg=CFG, span=32, steps=4, truncate=False)
  assert places(cache, scratch) == before


_sample = jax.jit(decode.sample, static_argnums=3)
LOGITS = jnp.asarray(np.random.default_rng(4).normal(0, 1.5, 61), jnp.float32)
DRAWS = 20000


def draw(**settings):
  """Frequencies [V] of many draws from LOGITS, each with its own seed."""
  seed = np.random.default_rng(5).integers(0, 2 ** 32, (DRAWS, 2), np.uint32)
  r = rows(np.zeros(DRAWS, np.int32), 0, 0, seed=seed, **settings)
  truncate = any(k in settings for k in ("top_p", "top_k", "min_p"))
  tokens, logprobs = _sample(jnp.broadcast_to(LOGITS, (DRAWS, 61)), r, r.position, truncate)
  return np.bincount(np.asarray(tokens), minlength=61), np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize("settings,expected", [
    ({}, lambda p: p),
    ({"temperature": 0.5}, lambda p: p ** 2),
    ({"top_k": 5}, lambda p: np.where(p >= np.sort(p)[-5], p, 0)),
    ({"min_p": 0.2}, lambda p: np.where(p >= 0.2 * p.max(), p, 0)),
    # top_p keeps a token when the mass of the likelier ones does not exceed it
    ({"top_p": 0.6}, lambda p: np.where(
        np.array([p[p > x].sum() for x in p]) <= 0.6, p, 0)),
])
def test_samples_follow_the_distribution(settings, expected):
  p = np.exp(np.asarray(LOGITS, np.float64))
  p = expected(p / p.sum())
  p /= p.sum()
  counts, _, _ = draw(**settings)
  assert counts[p == 0].sum() == 0
  support = p > 0
  chi2 = (((counts - DRAWS * p) ** 2)[support] / (DRAWS * p[support])).sum()
  degrees = support.sum() - 1
  assert chi2 < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations; the seed is fixed


def test_logprobs_are_of_the_scaled_distribution_before_truncation():
  _, tokens, logprobs = draw(temperature=0.5, top_k=5)
  want = np.asarray(jax.nn.log_softmax(LOGITS / 0.5))
  np.testing.assert_allclose(logprobs, want[tokens], atol=1e-5)


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one():
  counts, tokens, logprobs = draw(temperature=0.0)
  assert set(tokens) == {int(np.argmax(LOGITS))}
  np.testing.assert_allclose(logprobs, float(jax.nn.log_softmax(LOGITS).max()), atol=1e-5)


def test_a_draw_depends_on_seed_and_position_alone():
  logits = jnp.broadcast_to(LOGITS, (40, 61))
  position = np.arange(40, dtype=np.int32)
  r = rows(np.zeros(40, np.int32), 0, 0, seed=np.full((40, 2), 9))
  tokens, _ = _sample(logits, r, position, False)
  one = rows([0], 0, 0, seed=[[9, 9]])
  alone = [int(_sample(logits[:1], one, position[i:i + 1], False)[0][0]) for i in range(40)]
  assert tokens.tolist() == alone
  assert len(set(alone)) > 5


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2 ** -24])
def test_a_token_without_probability_is_never_drawn(u):
  p = jnp.zeros((2, 61)).at[0, 17].set(1e-8).at[1, 60].set(1.0).at[1, 3].set(1e-12)
  tokens = decode._draw(p, jnp.full((2, 2), u)).tolist()
  assert tokens[0] == 17 and tokens[1] in (3, 60)
