"""What splits what: the table, its words, and the order of tokens over a context axis.

That meshes compute what one device computes is tested in tests/rl/test_learner.py.
"""

import types

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from kr.model import sharding
from kr.model import transformer
from kr.model.config import ModelConfig


def mesh(**sizes):
  """As much of a mesh as `spec` reads."""
  return types.SimpleNamespace(shape={**dict.fromkeys(sharding.AXES, 1), **sizes})


def test_a_mesh_is_read_from_its_text():
  assert sharding.parse("fsdp=4, tensor=2") == {"fsdp": 4, "tensor": 2}
  assert sharding.parse("data=-1") == {"data": -1} and sharding.parse("") == {}
  one = sharding.make_mesh("fsdp=-1", jax.devices()[:1])
  assert dict(one.shape) == dict.fromkeys(sharding.AXES, 1)


@pytest.mark.parametrize("text, message", [
  ("pipeline=2", "'pipeline' is none of data, fsdp, expert, context, tensor"),
  ("fsdp=2,fsdp=4", "fsdp is given twice"),
  ("fsdp=two", "fsdp needs a whole number, not 'two'"),
  ("fsdp=0", "fsdp needs a size of at least 1"),
  ("fsdp=-1,data=-1", "only one mesh axis can be -1, not data and fsdp"),
  ("fsdp=64", "the mesh fsdp=64 needs 64 devices, there are 1"),
])
def test_a_mesh_that_cannot_be_says_why(text, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(text, jax.devices()[:1])


@pytest.mark.parametrize("axes, shape, expected", [
  (("width", "heads", None), (8, 4, 2), P("fsdp", "tensor")),
  (("width", "kv_heads", None), (8, 3, 2), P("fsdp")),  # 3 heads cannot be halved
  (("heads", None, "width"), (4, 2, 8), P("tensor", None, "fsdp")),
  (("experts", "width", "mlp"), (4, 8, 6), P(None, "fsdp", "tensor")),  # no expert axis here
  ((None,), (8,), P()),
])
def test_the_table_splits_what_it_can(axes, shape, expected):
  assert sharding.spec(mesh(fsdp=4, tensor=2), axes, shape) == expected


def test_rows_are_split_by_every_axis_that_sees_other_rows():
  assert sharding.spec(mesh(data=2, fsdp=2, expert=2, context=2), ("rows", "tokens", None)) == P(
    ("data", "fsdp", "expert"), "context")


def test_every_parameter_names_its_dimensions_by_the_table():
  cfg = ModelConfig(vocab=8, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16,
                    qkv_bias=True, out_bias=True, mlp_bias=True, tied=False)
  declared = jax.tree.leaves(
    transformer.declare(cfg), is_leaf=lambda p: isinstance(p, sharding.Param))
  assert len(declared) > 15
  for p in declared:
    assert len(p.axes) == len(p.shape) and set(p.axes) <= set(sharding.RULES), p


def test_zigzag_gives_each_part_as_much_causal_attention():
  np.testing.assert_array_equal(sharding.zigzag(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
  for parts in (1, 2, 4):
    order = sharding.zigzag(64, parts)
    assert sorted(order) == list(range(64))
    visible = (order.reshape(parts, -1) + 1).sum(1)  # keys that each part's queries see
    assert len(set(visible)) == 1


def test_a_row_that_a_context_axis_cannot_cut_names_the_fix():
  with pytest.raises(ValueError, match="make row_tokens a multiple of 8"):
    sharding.zigzag(12, 4)


def test_without_a_mesh_nothing_is_pinned():
  tree = {"a": np.ones(3)}
  assert sharding.pin(tree, {}) is tree and sharding.constrain(tree["a"], "width") is tree["a"]
