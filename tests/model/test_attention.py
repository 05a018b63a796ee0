"""Every kind of attention computes the same: against the formula, in values and gradients."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kr.model import attention, blockwise, splash
from kr.model.config import SHARED

Where = attention.Where


def draw(B, T, H, K, key, value, *, seed=0, mean=0, padding=0, permuted=False):
  """q, k, v, the output's cotangent (0 where the result is not used), and Where."""
  rng = np.random.default_rng(seed)
  q, k, v, g = (rng.standard_normal((B, T, n, h), np.float32)
                for n, h in ((H, key), (K, key), (K, value), (H, value)))
  segment = np.ones((B, T), np.int32)
  if mean:
    segment += np.cumsum(rng.random((B, T)) < 1 / mean, 1, dtype=np.int32)
  for row in range(B):
    segment[row, T - row * padding:] = 0
  index = np.arange(T, dtype=np.int32)
  if permuted:
    index = rng.permutation(index)
    segment = segment[:, index]
  return q * key**-0.5, k, v, g * (segment > 0)[..., None, None], Where(index, segment)


def by_formula(q, k, v, where, window):
  """Softmax over what each query sees, one query at a time, in float64."""
  out = np.zeros((*q.shape[:3], v.shape[-1]))
  for b, t, h in np.ndindex(q.shape[:3]):
    back = where.index[t] - where.index
    seen = (back >= 0) & np.isin(where.segment[b], [where.segment[b, t], SHARED])
    if window:
      seen &= back < window
    head = h // (q.shape[2] // k.shape[2])
    weight = np.exp(k[b, seen, head].astype(float) @ q[b, t, h])
    out[b, t, h] = weight / weight.sum() @ v[b, seen, head]
  return out


def both_ways(f, q, k, v, g):
  """-> output, and the gradients of q, k and v."""
  @jax.jit
  def run(q, k, v, g):
    out, back = jax.vjp(f, q, k, v)
    return out, *back(g)

  return [np.asarray(x) for x in run(q, k, v, g)]


def assert_same(got, want, where, atol=1e-5):
  assert all(np.isfinite(x).all() for x in got)
  real = (where.segment > 0)[..., None, None]
  for a, b in zip(got, want):
    np.testing.assert_allclose(a * real, b * real, atol=atol)


@pytest.mark.parametrize("window", [0, 5])
def test_plain_is_the_formula(window):
  q, k, v, _, where = draw(2, 13, 4, 2, 6, 3, mean=6, padding=2, permuted=True)
  got = attention.attend(q, k, v, where, window=window, kind="plain")
  np.testing.assert_allclose(got, by_formula(q, k, v, where, window), atol=2e-6)


# T is no multiple of a block; 3 rows; packed, with padding, windows, permuted places.
@pytest.mark.parametrize("T, window, heads, widths, mean, permuted, blocks", [
  (37, 0, (4, 2), (8, 8), 0, False, (8, 8)),
  (37, 0, (6, 2), (8, 4), 9, False, (8, 16)),
  (37, 6, (4, 4), (4, 8), 15, True, (16, 8)),
  (50, 20, (3, 1), (8, 8), 9, True, (8, 8)),
])
def test_blockwise_equals_plain_in_values_and_gradients(
    T, window, heads, widths, mean, permuted, blocks):
  q, k, v, g, where = draw(3, T, *heads, *widths, mean=mean, padding=9, permuted=permuted)
  got = both_ways(lambda q, k, v: blockwise.attend(q, k, v, where, where, window, *blocks),
                  q, k, v, g)
  want = both_ways(lambda q, k, v: attention.attend(q, k, v, where, window=window, kind="plain"),
                   q, k, v, g)
  assert_same(got, want, where)


# The prefix ends inside a block of keys; without it no block would be seen from other segments.
@pytest.mark.parametrize("shared, permuted, blocks", [
  (5, False, (8, 8)), (19, False, (8, 16)), (16, False, (8, 8)), (11, True, (16, 8))])
def test_all_segments_see_the_shared_tokens_at_the_head_of_their_row(shared, permuted, blocks):
  q, k, v, g, where = draw(3, 53, 4, 2, 8, 6, mean=7, padding=9)
  where.segment[:, :shared] = SHARED
  if permuted:
    order = np.random.default_rng(1).permutation(53)
    where = Where(where.index[order], where.segment[:, order])
    g = g[:, order]
  plain = lambda q, k, v: attention.attend(q, k, v, where, kind="plain")
  real = (where.segment > 0)[..., None, None]
  np.testing.assert_allclose(plain(q, k, v) * real, by_formula(q, k, v, where, 0) * real, atol=2e-6)
  got = both_ways(lambda q, k, v: blockwise.attend(q, k, v, where, where, 0, *blocks), q, k, v, g)
  assert_same(got, both_ways(plain, q, k, v, g), where)


def test_attend_runs_long_rows_blockwise_on_cpu():
  q, k, v, g, where = draw(2, 300, 2, 1, 8, 8, mean=90, padding=40)
  run = lambda kind: both_ways(lambda q, k, v: attention.attend(q, k, v, where, kind=kind),
                               q, k, v, g)
  got = run("auto")
  assert_same(got, run("plain"), where)
  assert np.array_equal(got[0][1, 260:], np.zeros((40, 2, 8)))  # padding: only blockwise says 0


def test_scores_far_apart_do_not_overflow():
  q, k, v, g, where = draw(1, 40, 2, 2, 8, 8)
  kinds = [both_ways(lambda q, k, v: f(q, k, v), q * 300, k, v, g) for f in (
    lambda q, k, v: blockwise.attend(q, k, v, where, where, 0, 8, 8),
    lambda q, k, v: attention.attend(q, k, v, where, kind="plain"))]
  for a, b in zip(*kinds):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_bfloat16_inputs_give_bfloat16_and_are_summed_in_float32():
  q, k, v, g, where = draw(1, 200, 2, 1, 16, 16)
  half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, g)]
  f = lambda q, k, v: blockwise.attend(q, k, v, where, where, 0, 32, 32)
  got = both_ways(f, *half)
  assert all(x.dtype == jnp.bfloat16 for x in got)
  for a, b in zip(got, both_ways(f, *(x.astype(jnp.float32) for x in half))):
    assert np.abs(a.astype(np.float32) - b).max() < 0.02 * np.abs(b).max()


@pytest.mark.parametrize("window, packed, blocks", [
  (0, False, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),  # nothing of the future
  (5, False, [[0], [0, 1], [1, 2], [2, 3]]),  # nothing beyond the window
  (0, True, [[0], [0, 1], [2], []]),  # nothing of other segments, nothing for padding
])
def test_only_blocks_with_something_to_see_are_visited(window, packed, blocks):
  segment = np.repeat([1, 1, 2, 0] if packed else [1, 1, 1, 1], 4)[None]
  at = blockwise._blocks(jnp.arange(16), jnp.asarray(segment), 4)
  for i, want in enumerate(blocks):
    places, count = blockwise._visible(at, at, i, window)
    assert list(places[:count]) == want


def test_split_rows_visit_as_many_blocks_on_each_device():
  from kr.model import sharding
  index = sharding.zigzag(64, 4)
  keys = blockwise._blocks(jnp.asarray(index), jnp.ones((1, 64), jnp.int32), 8)
  pieces = index.reshape(4, 16)
  visited = [sum(int(blockwise._visible(
    blockwise._blocks(jnp.asarray(piece), jnp.ones((1, 16), jnp.int32), 8), keys, i, 0)[1])
    for i in range(2)) for piece in pieces]
  assert visited == [9, 9, 9, 9]  # of 4 x 2 x 8: the 36 of a triangle


def test_memory_grows_with_the_row_and_not_with_its_square():
  def temporary(T):
    shape = lambda n: jax.ShapeDtypeStruct((1, T, n, 8), jnp.float32)
    where = Where(jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((1, T), jnp.int32))
    loss = lambda q, k, v, where: attention.attend(q, k, v, where, kind="blockwise").sum()
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape(2), shape(1), shape(1), where)
    return compiled.compile().memory_analysis().temp_size_in_bytes

  small, middle, large = (temporary(T) for T in (8192, 32768, 131072))
  assert large - middle == pytest.approx(4 * (middle - small), rel=0.05)
  assert large < 131072 * 8 * 4 * 30  # some 30 arrays of [T,8]; scores would be 64 GiB a head


@pytest.mark.parametrize("window, permuted, T", [(0, False, 200), (37, True, 256)])
def test_splash_equals_plain_in_values_and_gradients(window, permuted, T):
  q, k, v, g, where = draw(2, T, 4, 2, 16, 8, mean=60, padding=30, permuted=permuted)
  run = lambda kind: both_ways(
    lambda q, k, v: attention.attend(q, k, v, where, window=window, kind=kind), q, k, v, g)
  assert_same(run("splash"), run("plain"), where)


def test_splash_skips_the_future_and_what_is_beyond_the_window():
  made = splash.kernel(np.arange(1024, dtype=np.int32), 1, 1, 200)
  # Blocks of 512: the second sees itself and, within the window, the first; not the reverse.
  assert np.array_equal(np.asarray(made.fwd_mask_info.block_mask)[0] > 0, [[1, 0], [1, 1]])


def test_splash_wants_an_order_that_is_known_when_compiling():
  q, k, v, _, where = draw(1, 8, 1, 1, 4, 4)
  with pytest.raises(ValueError, match="NumPy"):
    attention.attend(q, k, v, Where(jnp.asarray(where.index), where.segment), kind="splash")


@pytest.mark.parametrize("window, permuted", [(0, False), (6, True)])
def test_what_cudnn_is_asked_for_is_the_formula(window, permuted):
  # The same call with XLA's own attention in its place: the kernel itself needs a GPU.
  q, k, v, g, where = draw(2, 24, 4, 2, 8, 4, mean=8, padding=5, permuted=permuted)
  visible = attention.see(where, where, window)
  got = both_ways(lambda q, k, v: attention.cudnn(
    q, k, v, visible, causal=not permuted, implementation="xla", dtype=jnp.float32), q, k, v, g)
  want = both_ways(lambda q, k, v: attention.plain(q, k, v, visible), q, k, v, g)
  assert_same(got, want, where)


@pytest.mark.parametrize("platform, T, width, dtype, numpy, want", [
  ("cpu", 128, 64, "float32", True, "plain"),
  ("cpu", 256, 64, "float32", True, "blockwise"),
  ("tpu", 8192, 64, "bfloat16", True, "splash"),
  ("tpu", 8192, 64, "bfloat16", False, "blockwise"),
  ("gpu", 8192, 64, "bfloat16", True, "cudnn"),
  ("gpu", 8192, 64, "float32", True, "blockwise"),
  ("gpu", 8192, 192, "bfloat16", True, "blockwise"),
  ("gpu", 131072, 64, "bfloat16", True, "blockwise"),
])
def test_auto_is_what_suits_the_platform(platform, T, width, dtype, numpy, want):
  q = jax.ShapeDtypeStruct((1, T, 2, width), dtype)
  index = np.arange(T) if numpy else jnp.arange(T)
  assert attention._suited(q, q, Where(index, None), platform) == want


def test_an_unknown_kind_is_refused_by_name():
  q, k, v, _, where = draw(1, 4, 1, 1, 4, 4)
  with pytest.raises(ValueError, match="flush.*auto, plain, blockwise, splash, cudnn"):
    attention.attend(q, k, v, where, kind="flush")


def test_meshes_equal_one_device_in_values_and_gradients():
  script = pathlib.Path(__file__).with_name("attention_mesh.py")
  root = script.parents[2]
  done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=root,
                        env={**os.environ, "PYTHONPATH": str(root)})
  assert done.returncode == 0, done.stderr[-2000:]
  errors = json.loads(done.stdout)
  assert len(errors) == 7 and max(errors.values()) < 1e-5, errors
