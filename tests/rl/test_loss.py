"""The REINFORCE loss and the learner, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kr import types
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.rl import batch as batch_lib
from kr.rl import loss
from kr.rl.learner import Learner, micro_batches
from kr.rl.optim import make_optimizer

CFG = ModelConfig(vocab=11, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16, max_len=64)
PARAMS = transformer.init(CFG, seed=1)
GRADIENT = jax.jit(jax.value_and_grad(loss.reinforce, has_aux=True), static_argnums=1)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, other summation orders


def trajectory(name, prompt, *turns):
  """One segment: a prompt, then sampled turns with an observation token between them."""
  t = types.Trajectory(name, types.Task(name, "q", "a", "k"))
  segment = types.Segment()
  segment.append_context(prompt)
  for ids in turns:
    start = len(segment)
    segment.append_sampled(ids, [-1.0] * len(ids), 0)
    t.turns.append(types.Turn(0, start, len(segment), 0))
    segment.append_context([10])
  t.segments.append(segment)
  return t


def batch_of(items, row_tokens=16, rows=1):
  return batch_lib.pack([(t, a, True) for t, a in items], row_tokens, rows)


def loss_of(batch, rows, params=PARAMS):
  """Loss, gradient and metric sums over all micro-batches."""
  total, grads, sums = 0.0, jax.tree.map(jnp.zeros_like, params), []
  for part in micro_batches(batch, rows, trained_multiple=4):
    (value, aux), grad = GRADIENT(params, CFG, part)
    total, grads = total + value, jax.tree.map(jnp.add, grads, grad)
    sums.append(aux)
  return float(total), grads, sums


def log_probs(ids):
  """log softmax at each position of one unpacked sequence: [T,V]."""
  tokens = jnp.asarray([ids])
  x = transformer.forward(PARAMS, CFG, tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens))
  return np.asarray(jax.nn.log_softmax(transformer.logits(PARAMS, x), -1))[0]


def test_loss_is_minus_advantage_times_logprob_over_trajectories():
  a = trajectory("a", [1, 2], [3, 4], [5])  # tokens 1 2 | 3 4 | 10 | 5
  b = trajectory("b", [1], [6])
  value, _, _ = loss_of(batch_of([(a, [0.5, -2.0]), (b, [3.0])]), 1)
  pa, pb = log_probs([1, 2, 3, 4, 10, 5]), log_probs([1, 6])
  expected = -(0.5 * (pa[1, 3] + pa[2, 4]) - 2.0 * pa[4, 5] + 3.0 * pb[0, 6]) / 2
  assert value == pytest.approx(expected, abs=1e-5)


def test_entropy_of_known_distributions():
  halves = jnp.log(jnp.asarray([[0.5, 0.5], [0.25, 0.75]]))
  # ln 2, and -(1/4 ln 1/4 + 3/4 ln 3/4)
  np.testing.assert_allclose(loss.entropy(halves), [0.693147, 0.562335], atol=1e-6)


def test_reported_gap_and_entropy_are_those_of_the_trained_tokens_alone():
  a = trajectory("a", [1, 2], [3, 4])
  _, _, sums = loss_of(batch_of([(a, [1.0])]), 1)
  p = log_probs([1, 2, 3, 4])
  own = np.asarray([p[1, 3], p[2, 4]])
  assert sums[0]["trained_tokens"] == 2
  assert sums[0]["gap"] == pytest.approx(
    np.abs(own + 1.0).sum(), abs=1e-5
  )  # behaviour logprobs are -1
  assert sums[0]["entropy"] == pytest.approx(-(np.exp(p[1:3]) * p[1:3]).sum(), abs=1e-5)


def test_packed_and_unpacked_batches_give_the_same_loss_and_gradient():
  items = [
    (trajectory("a", [1, 2], [3, 4], [5]), [0.5, -2.0]),
    (trajectory("b", [7], [6, 2, 2]), [3.0]),
    (trajectory("c", [4, 4, 4], [1]), [-1.0]),
  ]
  packed, grads, _ = loss_of(batch_of(items, row_tokens=16), 1)
  single, single_grads, _ = loss_of(batch_of(items, row_tokens=6), 1)  # a row each
  assert packed == pytest.approx(single, abs=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), grads, single_grads)


def test_padding_rows_and_columns_change_nothing():
  items = [(trajectory("a", [1, 2], [3, 4], [5]), [0.5, -2.0])]
  value, grads, _ = loss_of(batch_of(items, row_tokens=6), 1)
  padded, padded_grads, _ = loss_of(batch_of(items, row_tokens=32, rows=4), 4)
  assert padded == pytest.approx(value, abs=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), padded_grads, grads)


def test_no_gradient_reaches_what_the_policy_did_not_sample():
  """The gradient with respect to the logits is zero at every position that predicts context."""
  batch = batch_of([(trajectory("a", [1, 2, 9], [3, 4], [5]), [0.5, -2.0])])
  (rows,) = micro_batches(batch, 1, trained_multiple=4)
  x = transformer.forward(PARAMS, CFG, rows.tokens, rows.positions, rows.segment_ids)

  def from_logits(all_logits):  # [B,T,V]
    log_p = jax.nn.log_softmax(all_logits[rows.row[0], rows.before[0]], -1)
    log_prob = jnp.take_along_axis(log_p, rows.target[0][:, None], -1)[:, 0]
    return -jnp.sum(rows.weight * rows.advantage * log_prob)

  logits = transformer.logits(PARAMS, x)
  assert float(from_logits(logits)) == pytest.approx(loss_of(batch, 1)[0], abs=1e-6)
  touched = np.abs(np.asarray(jax.grad(from_logits)(logits)))[0].sum(-1) > 0  # [T]
  # Tokens: 1 2 9 | 3 4 | 10 | 5. Predicting positions: 2 and 3 for 3 4, and 5 for 5.
  assert np.flatnonzero(touched).tolist() == [2, 3, 5]


def test_changing_context_targets_changes_no_gradient():
  """Two batches that differ in mask 0 advantages alone have one gradient."""
  t = trajectory("a", [1, 2], [3, 4], [5])
  batch = batch_of([(t, [0.5, -2.0])])
  noisy = batch_of([(t, [0.5, -2.0])])
  noisy.advantages[noisy.mask == 0] = 1e6
  noisy.weights[noisy.mask == 0] = 7.0
  a, b = loss_of(batch, 1)[1], loss_of(noisy, 1)[1]
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_discarded_trajectories_give_no_gradient_but_count_in_the_mean():
  a, b = trajectory("a", [1, 2], [3]), trajectory("b", [4], [5])
  both = batch_lib.pack([(a, [1.0], True), (b, [9.0], False)], 16)
  value, _, _ = loss_of(both, 1)
  assert value == pytest.approx(-log_probs([1, 2, 3])[1, 3] / 2, abs=1e-6)


def test_accumulated_micro_batches_equal_one_batch():
  items = [(trajectory(str(i), [i % 9, 2], [3, i % 7], [5]), [1.0, float(i)]) for i in range(6)]
  updates = []
  for rows in (1, 6):
    learner = Learner(CFG, PARAMS, make_optimizer(1e-2, 0, 1.0, 0.0), micro_rows=rows)
    metrics = learner.update(batch_lib.pack([(t, a, True) for t, a in items], 6, 6))
    updates.append((learner.params, metrics))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), updates[0][0], updates[1][0])
  assert updates[0][1]["loss"] == pytest.approx(updates[1][1]["loss"], abs=1e-5)
  assert updates[0][1]["trained_tokens"] == updates[1][1]["trained_tokens"] == 18


def test_positive_advantage_raises_the_logprob_and_negative_lowers_it():
  for sign in (1.0, -1.0):
    t = trajectory("a", [1, 2], [3, 4])
    learner = Learner(CFG, PARAMS, make_optimizer(1e-3, 0, 1.0, 0.0), micro_rows=1)
    before = learner.update(batch_of([(t, [sign])]))["log_prob"]
    after = learner.update(batch_of([(t, [sign])]))["log_prob"]
    assert (after - before) * sign > 0


def test_non_finite_gradient_is_skipped_and_reported():
  learner = Learner(CFG, PARAMS, make_optimizer(1e-2, 0, 1.0, 0.0), micro_rows=1)
  metrics = learner.update(batch_of([(trajectory("a", [1, 2], [3]), [float("nan")])]))
  assert metrics["skipped"] == 1
  jax.tree.map(np.testing.assert_array_equal, learner.params, PARAMS)


def test_batch_without_trained_tokens_changes_nothing():
  learner = Learner(CFG, PARAMS, make_optimizer(1e-2, 0, 1.0, 0.0), micro_rows=1)
  metrics = learner.update(batch_lib.pack([(trajectory("a", [1, 2], [3]), [1.0], False)], 8))
  assert metrics["trained_tokens"] == 0
  jax.tree.map(np.testing.assert_array_equal, learner.params, PARAMS)


def test_gap_is_taken_over_the_tokens_of_the_policy_that_is_updated():
  t = trajectory("a", [1, 2], [3, 4], [5])
  t.segments[0].versions[5] = 7  # the last turn ran under newer weights, after a pause
  learner = Learner(CFG, PARAMS, make_optimizer(1e-2, 0, 1.0, 0.0), micro_rows=1,
                    off_policy="keep")
  gap = learner.update(batch_of([(t, [1.0, 1.0])]), version=7)["logprob_gap"]
  assert gap == pytest.approx(abs(log_probs([1, 2, 3, 4, 10, 5])[4, 5] + 1.0), abs=1e-5)
