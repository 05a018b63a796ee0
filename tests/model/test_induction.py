"""A fresh policy from `induction.init` copies; an ordinary one does not."""

import jax.numpy as jnp
import numpy as np
import pytest

from kr.model import induction
from kr.model import transformer
from kr.model.config import ModelConfig

CFG = ModelConfig(
  vocab=512, width=192, layers=2, heads=3, kv_heads=3, head_dim=64, mlp=64, rope_theta=1e6
)


def copied_share(params):
  """Share of tokens predicted right where a random sequence repeats a stretch of itself."""
  rng = np.random.default_rng(0)
  first = rng.integers(0, CFG.vocab, (2, 120))
  tokens = jnp.asarray(np.concatenate([first, first[:, 30:60]], 1))
  positions = jnp.broadcast_to(jnp.arange(150), tokens.shape)
  x = transformer.forward(params, CFG, tokens, positions, jnp.ones_like(tokens))
  predicted = np.argmax(transformer.logits(params, x), -1)
  return np.mean(predicted[:, 121:149] == np.asarray(tokens)[:, 122:150])


def test_untrained_policy_copies_what_stood_before():
  assert copied_share(induction.init(CFG, seed=0)) > 0.9
  assert copied_share(transformer.init(CFG, seed=0)) < 0.1


def test_shape_without_room_for_the_circuit_is_refused():
  with pytest.raises(ValueError, match="width >= 3"):
    induction.init(
      ModelConfig(vocab=512, width=64, layers=2, heads=2, kv_heads=2, head_dim=32, mlp=64)
    )
  with pytest.raises(ValueError, match="rope_theta"):
    induction.init(
      ModelConfig(
        vocab=512, width=48, layers=2, heads=2, kv_heads=2, head_dim=16, mlp=64, rope_theta=10.0
      )
    )
