"""Optimizers against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kr.rl.optim import make_optimizer, make_schedule

RNG = np.random.default_rng(0)
PARAMS = {
  "embed": RNG.normal(size=(5, 4)).astype(np.float32),
  "layers": {
    "wq": RNG.normal(size=(2, 4, 2, 3)).astype(np.float32),
    "wo": RNG.normal(size=(2, 2, 3, 4)).astype(np.float32),
    "experts_up": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32),
    "q_norm": np.ones((2, 3), np.float32),
    "bq": np.ones((2, 2, 3), np.float32),
    "b_gate": np.ones((2, 5), np.float32),
    "router": RNG.normal(size=(2, 4, 3)).astype(np.float32),
    "router_bias": np.ones((2, 3), np.float32),
  },
}
GRADS = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
GRADS["layers"]["router_bias"] *= 0
RATE, DECAY = 0.1, 0.5


def stepped(**options):
  """The parameters after one step with GRADS."""
  optimizer = make_optimizer(RATE, 0, 1e9, DECAY, **options)
  update = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])
  return optax.apply_updates(PARAMS, update(GRADS, PARAMS))


def adamw(name, w, g):
  """Adam's first step is the sign of the gradient; matrices decay."""
  still = name in ("q_norm", "bq", "b_gate", "router_bias")
  return w - RATE * (np.sign(g) + (0 if still else DECAY) * w)


def muon(w, g, shape):
  """Newton-Schulz in five iterations (Jordan, 2024), one matrix at a time.

  shape: (matrices, inputs, outputs). The step has AdamW's root mean square, 0.2 (Liu et al.,
  2025): that of an orthogonal matrix is 1 / sqrt(max(inputs, outputs)).
  """
  steps = []
  for x in g.reshape(shape).astype(np.float64):
    x = x / np.linalg.norm(x)
    for _ in range(5):
      xx = x @ x.T
      x = 3.4445 * x + (-4.7750 * xx + 2.0315 * xx @ xx) @ x
    steps.append(x * 0.2 * np.sqrt(max(x.shape)))
  return w - RATE * (np.stack(steps).reshape(w.shape) + DECAY * w)


def test_adamw_decays_matrices_and_neither_norms_nor_biases():
  got = stepped()
  np.testing.assert_allclose(got["embed"], adamw("embed", PARAMS["embed"], GRADS["embed"]),
                             atol=1e-5)
  for name, a in got["layers"].items():
    np.testing.assert_allclose(
      a, adamw(name, PARAMS["layers"][name], GRADS["layers"][name]), atol=1e-5, err_msg=name)
  np.testing.assert_array_equal(got["layers"]["router_bias"], 1.0)


def test_muon_orthogonalises_each_layers_and_experts_matrix_and_leaves_the_rest_to_adamw():
  got = stepped(kind="muon")
  matrices = {"wq": (2, 4, 6), "wo": (2, 6, 4), "experts_up": (6, 4, 5)}
  for name, a in got["layers"].items():
    w, g = PARAMS["layers"][name], GRADS["layers"][name]
    expected = muon(w, g, matrices[name]) if name in matrices else adamw(name, w, g)
    np.testing.assert_allclose(a, expected, atol=1e-4, err_msg=name)
  np.testing.assert_allclose(got["embed"], adamw("embed", PARAMS["embed"], GRADS["embed"]),
                             atol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
  # 3-4-5: the norm is 5, so that 1 allows a fifth. Adam's moment holds a tenth of that.
  optimizer = make_optimizer(RATE, 0, 1.0, 0.0)
  params = {"wq": jnp.zeros(1), "wo": jnp.zeros(1)}
  grads = {"wq": jnp.asarray([3.0]), "wo": jnp.asarray([4.0])}
  _, state = optimizer.update(grads, optimizer.init(params), params)
  moment = optax.tree_utils.tree_get(state, "mu")
  np.testing.assert_allclose([moment["wq"][0], moment["wo"][0]], [0.06, 0.08], rtol=1e-6)


@pytest.mark.parametrize("kind, expected", [
  # Warm-up over 2 steps to 1, at step 12 a tenth is left.
  ("constant", {0: 0.5, 1: 0.75, 2: 1, 7: 1, 12: 1, 99: 1}),
  ("cosine", {0: 0.5, 1: 0.75, 2: 1, 7: 0.55, 12: 0.1, 99: 0.1}),
  ("linear", {0: 0.5, 1: 0.75, 2: 1, 7: 0.55, 12: 0.1, 99: 0.1}),
  ("wsd", {0: 0.5, 1: 0.75, 2: 1, 7: 1, 10: 1, 11: 0.55, 12: 0.1, 99: 0.1}),
])
def test_schedules_by_hand(kind, expected):
  schedule = make_schedule(kind, 1.0, 2, 12)
  got = {step: float(schedule(step)) for step in expected}
  assert got == pytest.approx(expected, rel=1e-5)


def test_unknown_or_impossible_settings_are_refused_by_name():
  with pytest.raises(ValueError, match="'sgd' is neither adamw nor muon"):
    make_optimizer(0.1, 0, 1.0, 0.0, kind="sgd")
  with pytest.raises(ValueError, match="'step' is none of constant, cosine, linear, wsd"):
    make_optimizer(0.1, 0, 1.0, 0.0, schedule="step")
  with pytest.raises(ValueError, match="more steps in total than the 5"):
    make_optimizer(0.1, 5, 1.0, 0.0, schedule="cosine", total_steps=5)
