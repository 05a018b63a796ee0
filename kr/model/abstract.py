"""Arrays without values, from which a step is compiled for a mesh that is not at hand."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
import jax.numpy as jnp

from kr.model import sharding


def arrays(declared: Any, mesh: Mesh | None) -> Any:
  """float32 arrays without values, laid out on the mesh as declared."""
  def one(p: sharding.Param) -> jax.ShapeDtypeStruct:
    where = NamedSharding(mesh, sharding.spec(mesh, p.axes, p.shape)) if mesh else None
    return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=where)

  return jax.tree.map(one, declared, is_leaf=lambda p: isinstance(p, sharding.Param))


def bytes_of(tree: Any) -> float:
  """Bytes of a tree of abstract arrays on one device."""
  def one(a: jax.ShapeDtypeStruct) -> float:
    shape = a.sharding.shard_shape(a.shape) if a.sharding else a.shape
    return math.prod(shape) * a.dtype.itemsize

  return float(sum(map(one, jax.tree.leaves(tree))))


def group_products() -> None:
  """Has the CPU lower `jax.lax.ragged_dot` to what it is on accelerators: each row times one
  expert's matrix. XLA's own way on CPU multiplies every row with all experts, in memory too.

  Shapes, FLOPs and memory are those of a grouped product; the numbers would be wrong, so this
  is for programs that are compiled and not run.
  """
  def one_expert(x, w, sizes, *, ragged_dot_dimension_numbers, preferred_element_type, **_):
    dims = ragged_dot_dimension_numbers
    product = functools.partial(jax.lax.dot_general, preferred_element_type=preferred_element_type)
    (x_summed, w_summed), batch = dims.dot_dimension_numbers
    if not dims.rhs_group_dimensions:  # the gradient of the matrices: rows are summed
      y = product(x, w, ((x_summed, w_summed), batch))
      return jnp.broadcast_to(y, (*sizes.shape, *y.shape))
    (group,) = dims.rhs_group_dimensions
    w = jax.lax.index_in_dim(jax.lax.optimization_barrier(w), 0, group, keepdims=False)
    w_summed = [d - (d > group) for d in w_summed]
    return product(x, w, ((x_summed, w_summed), batch))

  a = jnp.zeros((1, 1, 1))
  primitive = jax.make_jaxpr(jax.lax.ragged_dot)(a[0], a, jnp.ones(1, jnp.int32)).eqns[0].primitive
  mlir.register_lowering(primitive, mlir.lower_fun(one_expert, multiple_results=False),
                         platform="cpu")
