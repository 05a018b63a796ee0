"""What every part of the model computes with: matrix products in the chosen precision, norms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kr.model import sharding
from kr.model.config import Execution


def project(spec: str, x: jax.Array, w: jax.Array, how: Execution, out: Any = None) -> jax.Array:
  """`einsum(spec, x, w)` for a parameter w, in the precision of `how`, of type `out`, or x's.

  Every letter must be in two of the three places (input, parameter, output), as in a matrix
  product: the gradient is then the same product with its places exchanged.
  """
  if how.precision == "float32":
    return _product(spec, jnp.float32, x, w)
  return _product(spec, jnp.bfloat16, x, w).astype(out or x.dtype)


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`jnp.einsum`, summed and returned in float32.

  Where both are float32 they are multiplied as such: left to itself a GPU would round them to
  TF32's 10 bits, and a TPU to bfloat16's 7.
  """
  exact = a.dtype == b.dtype == jnp.float32
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32,
                    precision=jax.lax.Precision.HIGHEST if exact else None)


def linear(spec: str, x: jax.Array, p: dict[str, Any], name: str, how: Execution) -> jax.Array:
  """`project` with the parameter `name` of p, and with its adapter where p has one.

  An adapter (Hu et al., 2021; `kr.model.lora`) is a narrow detour beside the matrix: x to its
  z dimensions, and from there to the output.
  """
  y = project(spec, x, p[name], how)
  if f"{name}_lora_a" not in p:
    return y
  inputs, out = spec.split("->")
  given, matrix = inputs.split(",")
  narrow = "".join(c for c in given if c not in matrix) + "z"
  enter = "".join(c for c in matrix if c in given) + "z"
  leave = "z" + "".join(c for c in matrix if c not in given)
  z = project(f"{given},{enter}->{narrow}", x, p[f"{name}_lora_a"], how)
  return y + project(f"{narrow},{leave}->{out}", z, p[f"{name}_lora_b"], how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(spec, kind, x, w):
  return einsum(spec, x.astype(kind), w.astype(kind))


def _forward(spec, kind, x, w):
  x_type, w_type = (jnp.zeros((), a.dtype) for a in (x, w))
  x, w = x.astype(kind), w.astype(kind)
  # Not by `_product`: a rematerialisation policy looks for products, and not into a custom_vjp.
  return einsum(spec, x, w), (x, w, x_type, w_type)


def _backward(spec, kind, saved, g):
  # Left to itself, JAX would multiply the float32 cotangent with a bfloat16 operand, and
  # transpose the gradient of w, which XLA on CPU turns into slow transposes of its operands.
  x, w, x_type, w_type = saved
  inputs, out = spec.split("->")
  a, b = inputs.split(",")
  g = g.astype(kind)
  d_x = einsum(f"{out},{b}->{a}", g, w)
  if kind == jnp.bfloat16 and sharding.current() is None:
    a, out, x, g = _two_sums(a, b, out, x, g)
  return d_x.astype(x_type.dtype), einsum(f"{a},{out}->{b}", x, g).astype(w_type.dtype)


def _two_sums(a, b, out, x, g):
  """Splits the summed dimension of the gradient of w in two, if there is but one.

  XLA on CPU has its fast product only where the left operand is summed over its last
  dimension. To get there it transposes the operand if it is summed over two dimensions, but
  not if over one: 2.3 times slower.
  """
  summed = [c for c in a if c not in b and x.shape[a.index(c)] > 1]
  if len(summed) != 1 or x.shape[a.index(summed[0])] % 2:
    return a, out, x, g
  letter = summed[0]

  def split(letters, y):
    i = letters.index(letter)
    shape = (*y.shape[:i], 2, y.shape[i] // 2, *y.shape[i + 1:])
    return letters.replace(letter, "Z" + letter), y.reshape(shape)

  (a, x), (out, g) = split(a, x), split(out, g)
  return a, out, x, g


_product.defvjp(_forward, _backward)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) · weight, over the last axis, in float32 (Zhang and Sennrich, 2019)."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * weight
  return y.astype(x.dtype)


@jax.custom_vjp
def unstack(a: jax.Array) -> tuple[jax.Array, ...]:
  """[L,…] -> L x […]. Its gradient is one stack, where that of indexing would be L sums."""
  return tuple(a[i] for i in range(a.shape[0]))


unstack.defvjp(lambda a: (unstack(a), None), lambda _, g: (jnp.stack(g),))
