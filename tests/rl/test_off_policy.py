"""Tokens of older policies: each setting's formula worked out by hand, and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kr import types
from kr.model import transformer
from kr.model.config import Execution, ModelConfig
from kr.rl import batch as batch_lib
from kr.rl import credit
from kr.rl import loss
from kr.rl.learner import Learner, micro_batches
from kr.rl.loss import Correction

CFG = ModelConfig(vocab=11, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=16)
PARAMS = transformer.init(CFG, seed=1)
OPTIMIZER = optax.sgd(1.0)  # an update then is the gradient itself
NOW = 5  # the policy that is updated
WIDTH = 16
HOW = Execution(head_chunk=4)  # cuts turns
EVERY = ("mask", "tis", "topr", "keep")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@jax.jit
def plain_loss(params, tokens, coefficients):
  """−Σ coefficient · log p(token), and the log p: a sequence a row, full logits; all [B,T]."""
  places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  x = transformer.forward(params, CFG, tokens, places, jnp.ones_like(tokens))
  log_p = jax.nn.log_softmax(transformer.logits(params, x), -1)[:, :-1]
  log_p = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
  log_p = jnp.pad(log_p, ((0, 0), (1, 0)))
  return -jnp.sum(coefficients * log_p), log_p


def row(ids, width=WIDTH):
  return np.pad(np.asarray(ids), (0, width - len(ids)))


def trajectory(name, prompt, *turns):
  """turns: (ids, version, ratios); the behaviour logprobs are such that π/μ is as given."""
  t, s = types.Trajectory(name, types.Task(name, "q", "a", "k")), types.Segment()
  ids = list(prompt)
  for sampled, _, _ in turns:
    ids += [*sampled, 10]
  own = np.asarray(plain_loss(PARAMS, row(ids)[None], np.zeros((1, WIDTH)))[1][0])
  s.append_context(list(prompt))
  for sampled, version, ratios in turns:
    start = len(s)
    behaviour = own[start:start + len(sampled)] - np.log(ratios)
    s.append_sampled(list(sampled), behaviour, version)
    t.turns.append(types.Turn(0, start, len(s), version))
    s.append_context([10])
  t.segments.append(s)
  return t


A = trajectory("a", [1, 2], ([3, 4, 3], 3, [3.0, 0.5, 0.5]), ([5], NOW, [1.0]))
B = trajectory("b", [6], ([7, 2], 4, [3.0, 0.25]), ([8, 1], 4, [4.0, 0.5]), ([9], NOW, [1.0]))
C = trajectory("c", [4], ([4, 4], NOW, [1.0, 1.0]))
ITEMS = [(A, [1.0, 0.5], True), (B, [-2.0, -1.0, -0.5], True), (C, [0.7], True)]
# The weights of the tokens of A, B and C, in their order; cap 2.
WEIGHTS = {
  "mask": ([0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 1]),
  "keep": ([1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1]),
  "tis": ([2, 0.5, 0.5, 1], [2, 0.25, 2, 0.5, 1], [1, 1]),
  # A's turn is a positive one; B's turns have ratios 0.75, and 2, which is clipped.
  "topr": ([1, 1, 1, 1], [0.75, 0.75, 1, 1, 1], [1, 1]),
}
FRESH = [(C, [0.7], True), (trajectory("d", [3], ([1, 5], NOW, [1.0, 1.0])), [-0.4], True)]


def learner(kind="strict", rows=1, **options):
  return Learner(CFG, PARAMS, OPTIMIZER, micro_rows=rows, how=HOW, off_policy=kind, **options)


def reference(kind):
  """The loss by plain means, and its gradient, with the weights that are given above."""
  tokens = np.stack([row(t.segments[0].tokens) for t, _, _ in ITEMS])
  coefficients = np.zeros(tokens.shape, np.float32)
  for n, ((t, advantages, _), weight) in enumerate(zip(ITEMS, WEIGHTS[kind], strict=True)):
    at = np.flatnonzero(t.segments[0].mask)
    each = np.repeat(advantages, [turn.stop - turn.start for turn in t.turns])
    coefficients[n, at] = np.multiply(weight, each) / len(ITEMS)
  (loss, _), gradient = REFERENCE(PARAMS, tokens, coefficients)
  return float(loss), gradient


REFERENCE = jax.jit(jax.value_and_grad(plain_loss, has_aux=True))


def assert_same_step(got, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got.params, expected.params)


# -------------------------------------------------------------------- formulas


def weights_of(ratios, advantages, turns, kind, cap=2.0):
  return [np.asarray(a).tolist() for a in loss.weights(
    jnp.log(jnp.asarray([ratios])), jnp.asarray([advantages]), jnp.asarray([turns]),
    Correction(kind, cap))]


def test_a_truncated_importance_weight_is_the_tokens_ratio_up_to_the_cap():
  weight, ratio, clipped = weights_of(
    [0.5, 1.5, 8.0, 8.0], [1.0, -1.0, 1.0, 1.0], [1, 1, 2, 0], "tis", cap=1.75)
  assert weight == [pytest.approx([0.5, 1.5, 1.75, 1.0])]  # the last one is fresh
  assert ratio == [pytest.approx([0.5, 1.5, 8.0, 1.0])]
  assert clipped == [[False, False, True, False]]


def test_topr_clips_the_ratio_of_a_negative_turn_and_leaves_positive_ones():
  # Turn 1: 2 · 0.25 = 0.5. Turn 2: 3 · 0.5 = 1.5, clipped. Turn 3: positive. Then a fresh one.
  weight, ratio, clipped = weights_of(
    [2.0, 0.25, 3.0, 0.5, 0.1, 9.0], [-1.0, -1.0, -2.0, -2.0, 1.0, -1.0], [1, 1, 2, 2, 3, 0],
    "topr")
  assert weight == [pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])]
  assert ratio == [pytest.approx([0.5, 0.5, 1.5, 1.5, 0.1, 1.0])]
  assert clipped == [[False, False, True, True, False, False]]


@pytest.mark.parametrize("kind", EVERY)
def test_loss_and_gradient_equal_a_plain_reference(kind):
  """In rows of several segments, the head in chunks that cut turns."""
  expected, gradient = reference(kind)
  one = learner(kind)
  metrics = one.update(batch_lib.pack(ITEMS, WIDTH), NOW)
  assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
  jax.tree.map(lambda new, old, g: np.testing.assert_allclose(old - new, g, **CLOSE),
               one.params, PARAMS, gradient)


def test_no_gradient_flows_through_the_weight():
  """A single stale token: the gradient is w · A · ∇log π, and not that of the ratio as well."""
  t = trajectory("t", [1, 2], ([3], 4, [0.5]))
  steps = {}
  for kind in ("tis", "keep"):
    one = learner(kind)
    one.update(batch_lib.pack([(t, [-1.0], True)], WIDTH), NOW)
    steps[kind] = jax.tree.map(lambda a, b: np.asarray(a - b), one.params, PARAMS)
  jax.tree.map(lambda tis, keep: np.testing.assert_allclose(tis, 0.5 * keep, **CLOSE),
               steps["tis"], steps["keep"])
  assert max(np.abs(a).max() for a in jax.tree.leaves(steps["tis"])) > 1e-3


def test_metrics_tell_how_stale_the_batch_is():
  batch = batch_lib.pack(ITEMS, WIDTH)
  tis = learner("tis").update(batch, NOW)
  # Ratios 3 0.5 0.5 | 3 0.25 4 0.5; three above the cap. 4 fresh ones among 11.
  assert (tis["stale_tokens"], tis["masked_tokens"], tis["trained_tokens"]) == (7, 0, 11)
  assert tis["ratio_mean"] == pytest.approx(11.75 / 7, rel=1e-4)
  assert tis["ratio_max"] == pytest.approx(4.0, rel=1e-4)
  assert tis["clipped_share"] == pytest.approx(3 / 7)
  topr = learner("topr").update(batch, NOW)
  # Turns: 0.75 three times, 0.75 twice, 2 twice and clipped.
  assert topr["ratio_mean"] == pytest.approx((5 * 0.75 + 2 * 2.0) / 7, rel=1e-4)
  assert topr["clipped_share"] == pytest.approx(2 / 7)
  keep = learner("keep").update(batch, NOW)
  assert keep["ratio_mean"] == pytest.approx(11.75 / 7, rel=1e-4) and keep["clipped_share"] == 0
  masked = learner("mask").update(batch, NOW)
  assert (masked["stale_tokens"], masked["masked_tokens"], masked["trained_tokens"]) == (7, 7, 4)
  assert "ratio_mean" not in masked
  for metrics in (tis, topr, keep, masked):  # over fresh tokens alone, which agree
    assert metrics["logprob_gap"] < 1e-6


# -------------------------------------------------------------------- fresh tokens


def test_every_setting_is_the_same_to_the_bit_when_nothing_is_stale():
  batch = batch_lib.pack(FRESH, WIDTH)
  strict = learner()
  expected = strict.update(batch, NOW)
  for kind in EVERY:
    one = learner(kind)
    assert one.update(batch, NOW) == expected
    jax.tree.map(np.testing.assert_array_equal, one.params, strict.params)
  assert expected["stale_tokens"] == 0 and expected["trained_tokens"] == 4


def test_without_a_version_nothing_is_stale():
  assert learner().update(batch_lib.pack(ITEMS, WIDTH))["stale_tokens"] == 0


# -------------------------------------------------------------------- strict and mask


def test_strict_refuses_a_stale_token_before_anything_changes():
  one = learner("strict")
  with pytest.raises(ValueError, match=r"7 tokens .* policy 3, 4, but policy 5 .*"
                     "set off_policy to mask, tis, topr or keep"):
    one.update([batch_lib.pack(ITEMS, WIDTH), batch_lib.pack(FRESH, WIDTH)], NOW)
  jax.tree.map(np.testing.assert_array_equal, one.params, PARAMS)


def test_a_token_of_a_newer_policy_is_stale_too():
  """A run that went back to an earlier checkpoint finds rollouts of policies yet to come."""
  t = trajectory("t", [1], ([2], NOW + 1, [1.0]))
  with pytest.raises(ValueError, match="policy 6, but policy 5"):
    learner().update(batch_lib.pack([(t, [1.0], True)], WIDTH), NOW)


def test_masked_tokens_leave_the_weight_of_the_others_alone():
  """N counts the trajectories whose tokens are all stale: they are in the baseline as well."""
  stale = (trajectory("s", [1], ([2, 3], 1, [0.5, 2.0])), [4.0], True)
  fresh = (C, [0.7], True)
  one, other = learner("mask"), learner("mask")
  one.update(batch_lib.pack([fresh, stale], WIDTH), NOW)
  other.update(batch_lib.pack([fresh, (*stale[:2], False)], WIDTH), NOW)
  jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_rows_with_nothing_left_to_train_are_left_out():
  prompt = [1] * 9
  stale = [(trajectory(str(i), prompt, ([2, 3, 4], 1, [1.0] * 3)), [1.0], True) for i in range(3)]
  fresh = (trajectory("f", prompt, ([4, 4], NOW, [1.0, 1.0])), [0.7], True)
  batch = batch_lib.pack([*stale, fresh], WIDTH, 4)
  assert (batch.segment_ids.max(1) == 1).all()  # a row each
  rows = list(micro_batches(batch, 1, NOW, mask_stale=True))
  assert len(rows) == 1 and rows[0].stale_turn is None
  one, whole = learner("mask", rows=1), learner("mask", rows=4)
  assert one.update(batch, NOW)["trained_tokens"] == 2
  whole.update(batch, NOW)
  assert_same_step(one, whole)


def test_a_batch_whose_tokens_are_all_masked_changes_nothing():
  one = learner("mask")
  t = trajectory("t", [1], ([2], 1, [1.0]))
  metrics = one.update(batch_lib.pack([(t, [1.0], True)], WIDTH), NOW)
  assert (metrics["trained_tokens"], metrics["masked_tokens"], metrics["skipped"]) == (0, 1, 0)
  jax.tree.map(np.testing.assert_array_equal, one.params, PARAMS)


@pytest.mark.parametrize("options, message", [
  ({"off_policy": "ppo"}, "off_policy='ppo' is none of strict, mask, tis, topr, keep"),
  ({"off_policy": "tis", "ratio_cap": 0.0}, "ratio_cap=0.0 must be above 0"),
])
def test_a_setting_that_cannot_be_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    Learner(CFG, PARAMS, OPTIMIZER, **options)


# -------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("kind", EVERY)
def test_micro_batches_of_stale_and_fresh_rows_take_the_step_of_one(kind):
  one, whole = learner(kind, rows=1), learner(kind, rows=4)
  long = [(trajectory("l", [3] * 12, ([1, 5], NOW, [1.0, 1.0])), [-0.4], True)]
  batch = batch_lib.pack(ITEMS + long, WIDTH, 4)
  assert np.unique(np.nonzero(batch.mask)[0]).tolist() == [0, 1, 2]  # and a row of padding
  a, b = one.update(batch, NOW), whole.update(batch, NOW)
  assert_same_step(one, whole)
  assert a["stale_tokens"] == b["stale_tokens"] == 7
  assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
  if kind != "mask":
    assert a["ratio_mean"] == pytest.approx(b["ratio_mean"], rel=1e-5)
    assert a["clipped_share"] == pytest.approx(b["clipped_share"])


def test_a_turn_has_one_ratio_behind_a_shared_prefix_too():
  items = [(trajectory(str(i), [1, 2, 3, 4], ([5 + i, 6], 2, [0.5, 0.5]), ([7], NOW, [1.0])),
            [-1.0 - i, 0.5], True) for i in range(2)]
  apart, together = learner("topr"), learner("topr")
  a = apart.update(batch_lib.pack(items, WIDTH), NOW)
  (shared,) = batch_lib.pack_by_length(items, WIDTH, share_prefix=True)
  assert shared.padding_share > batch_lib.pack(items, WIDTH).padding_share  # it did share
  b = together.update(shared, NOW)
  assert a["ratio_mean"] == pytest.approx(0.25, rel=1e-4)
  assert b["ratio_mean"] == pytest.approx(0.25, rel=1e-4)
  assert_same_step(together, apart)


def test_a_micro_batch_smaller_than_a_group_trains_as_the_group_does():
  """The baseline is the group's, however it is cut: a group of one would have no advantage."""
  task = types.Task("g", "q", "a", "k")
  group = [dataclasses.replace(
    trajectory(str(i), [1] * 9, ([2 + i, 3], NOW, [1.0, 1.0])), task=task, correct=i < 2,
    stop=types.StopReason.ANSWERED, meta={"step_made": 1}) for i in range(4)]
  _, advantages, keep = credit.assign(
    group, gamma=0.9, format_penalty=0.2, negatives_keep=1.0, protect_faults=True, seed=[0, 1])
  batch = batch_lib.pack(zip(group, advantages, keep), WIDTH, 4)
  assert (batch.segment_ids.max(1) == 1).all()  # a member a row
  one, whole = learner(rows=1), learner(rows=4)
  assert one.update(batch, NOW)["grad_norm"] > 0.1
  whole.update(batch, NOW)
  assert_same_step(one, whole)
