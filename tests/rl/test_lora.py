"""Adapters: what they compute, what they train, and what they leave alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kr.model import lora as lora_lib
from kr.model import transformer
from kr.model.config import Execution, MlaConfig, ModelConfig, MoeConfig
from kr.model.lora import Lora
from kr.rl import batch as batch_lib
from kr.rl import loss
from kr.rl.learner import Learner, micro_batches
from kr.rl.optim import make_optimizer
from kr import types

DENSE = ModelConfig(vocab=11, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16)
EXPERTS = dataclasses.replace(
  DENSE, kv_heads=2, mla=MlaConfig(6, 8, 4, 4, 4),
  moe=MoeConfig(experts=4, active=2, mlp=8, layers=(1,), shared=1))
OPTIMIZER = make_optimizer(1e-2, 0, 1.0, 0.01)
TOKENS = jnp.asarray([[1, 2, 3, 4, 5, 6]])


def batch():
  t, s = types.Trajectory("t", types.Task("t", "q", "a", "k")), types.Segment()
  s.append_context([1, 2])
  s.append_sampled([3, 4, 5], [-1.0] * 3, 0)
  t.turns.append(types.Turn(0, 2, 5, 0))
  t.segments.append(s)
  return batch_lib.pack([(t, [0.7], True)], 6)


def noisy(adapters, seed=0):
  """Adapters of which no part is zero."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.3, jnp.float32), adapters)


def learner(cfg, lora, optimizer=None, how=transformer.PLAIN):
  return Learner(cfg, transformer.init(cfg, 1), optimizer or optax.sgd(1.0), micro_rows=1, how=how,
                 lora=lora)


def forward(params, cfg, how=transformer.PLAIN):
  run = jax.jit(lambda p: transformer.forward(
    p, cfg, TOKENS, jnp.arange(6)[None], jnp.ones_like(TOKENS), how))
  return np.asarray(run(params))


def test_training_starts_at_the_frozen_policy_to_the_bit():
  one = learner(DENSE, Lora(2, 4.0))
  jax.tree.map(np.testing.assert_array_equal, one.policy, transformer.init(DENSE, 1))
  assert set(one.params["layers"]) == {
    f"{name}_lora_{part}" for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")
    for part in "ab"}


@pytest.mark.parametrize("cfg", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_merged_policy_computes_what_the_adapters_compute(cfg):
  """All matrices that there are; layers unrolled and scanned."""
  declared = transformer.declare(cfg)["layers"]
  every = tuple(name for name in declared if lora_lib.matrix_axes(name, len(declared[name].shape)))
  assert ("experts_down" in every and "wkv_b" in every) == (cfg is EXPERTS)
  lora = Lora(2, 3.0, every)
  params = transformer.init(cfg, 1)
  adapters = noisy(transformer.draw({"layers": lora_lib.declare(declared, lora)}, 0))
  apart = lora_lib.attach(params, adapters, lora)
  merged = lora_lib.merge(params, adapters, lora)
  expected = forward(merged, cfg)
  np.testing.assert_allclose(forward(apart, cfg), expected, atol=1e-5)
  np.testing.assert_allclose(forward(apart, cfg, Execution(scan=True)), expected, atol=1e-5)
  assert np.abs(expected - forward(params, cfg)).max() > 0.1  # they do something
  assert jax.tree.map(np.shape, merged) == transformer.shapes(cfg)


def test_a_step_is_the_chain_rule_through_the_merged_weights():
  """w' = w + s·a·b, s = alpha / rank: ∂a = s·∂w'·bᵀ and ∂b = s·aᵀ·∂w' (plain gradient descent)."""
  lora, s = Lora(2, 3.0, ("wq", "wo", "down")), 1.5
  one = learner(DENSE, lora)
  before = one.params = noisy(one.params)
  a = jax.tree.map(np.asarray, before["layers"])
  (rows,) = micro_batches(batch(), 1)
  full = jax.jit(jax.grad(lambda p: loss.reinforce(p, DENSE, rows)[0]))(one.policy)
  dw = jax.tree.map(np.asarray, full["layers"])
  one.update(batch())
  after = one.params["layers"]
  for name, d, into, out in (("wq", 8, 8, 8), ("wo", 8, 8, 8), ("down", 16, 16, 8)):
    A = a[f"{name}_lora_a"].reshape(2, into, 2)
    B = a[f"{name}_lora_b"].reshape(2, 2, out)
    dW = dw[name].reshape(2, into, out)
    for part, w, step in (("a", A, s * dW @ B.transpose(0, 2, 1)),
                          ("b", B, s * A.transpose(0, 2, 1) @ dW)):
      got = np.asarray(after[f"{name}_lora_{part}"]).reshape(w.shape)
      np.testing.assert_allclose(got, w - step, atol=1e-5, err_msg=name + part)
      assert np.abs(step).max() > 1e-3


def test_only_adapters_are_trained_and_the_frozen_weights_keep_their_bits():
  one = learner(DENSE, Lora(2, 4.0, ("wq", "gate")), make_optimizer(1e-2, 0, 1.0, 0.01))
  for _ in range(2):
    assert one.update(batch())["skipped"] == 0
  start, policy = transformer.init(DENSE, 1), one.policy
  for name, w in start["layers"].items():
    moved = np.abs(np.asarray(policy["layers"][name]) - np.asarray(w)).max()
    assert (moved > 0) == (name in ("wq", "gate")), name
  np.testing.assert_array_equal(policy["embed"], start["embed"])
  jax.tree.map(np.testing.assert_array_equal, one._frozen, start)
  # What the optimizer keeps: two moments of each adapter and a few counts.
  trained = sum(a.size for a in jax.tree.leaves(one.params))
  assert trained == 2 * 2 * ((8 + 8) + (8 + 16))
  assert sum(a.size for a in jax.tree.leaves(one.opt_state)) < 2 * trained + 5


def test_a_state_with_adapters_continues_to_the_bit():
  make = lambda: learner(DENSE, Lora(2, 4.0, ("wq", "gate")), OPTIMIZER)
  one = make()
  one.update(batch())
  saved = jax.tree.map(np.asarray, one.state())
  one.update(batch())
  other = make()
  other.load(*saved)
  other.update(batch())
  jax.tree.map(np.testing.assert_array_equal, one.state(), other.state())


def test_a_target_that_the_model_lacks_is_refused_with_what_it_has():
  with pytest.raises(ValueError, match="lora_targets has q_proj; .* wq, wk, wv, wo"):
    learner(DENSE, Lora(2, 4.0, ("wq", "q_proj")))
  with pytest.raises(ValueError, match="lora_rank=1000 is more than"):
    learner(DENSE, Lora(1000, 4.0))
  with pytest.raises(ValueError, match="lora_rank=0"):
    Lora(0, 4.0)
