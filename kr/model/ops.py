"""What every part of the model computes with: matrix products in the chosen precision, norms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kr.model.config import Execution


def project(spec: str, x: jax.Array, w: jax.Array, how: Execution, out: Any = None) -> jax.Array:
  """`einsum(spec, x, w)` for a parameter w, in the precision of `how`, of type `out`, or x's.

  Every letter must be in two of the three places (input, parameter, output), as in a matrix
  product: the gradient is then the same product with its places exchanged.
  """
  if how.precision == "float32":
    return jnp.einsum(spec, x, w)
  return _bfloat16(spec, x, w).astype(out or x.dtype)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bfloat16(spec, x, w):
  return jnp.einsum(spec, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16),
                    preferred_element_type=jnp.float32)


def _forward(spec, x, w):
  return _bfloat16(spec, x, w), (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16),
                                 jnp.zeros((), x.dtype), jnp.zeros((), w.dtype))


def _backward(spec, saved, g):
  # Left to itself, JAX would multiply the float32 cotangent with a bfloat16 operand.
  x, w, x_type, w_type = saved
  inputs, out = spec.split("->")
  a, b = inputs.split(",")
  g = g.astype(jnp.bfloat16)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  return (product(f"{out},{b}->{a}", g, w).astype(x_type.dtype),
          product(f"{a},{out}->{b}", x, g).astype(w_type.dtype))


_bfloat16.defvjp(_forward, _backward)


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
