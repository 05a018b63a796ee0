"""Run by test_attention.py in a process of its own: attention on meshes of 8 virtual devices.

Prints one JSON line: by mesh, kind and shape, the largest error in values and gradients.
"""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from kr.model import attention, sharding


def main() -> None:
  errors = {}
  for mesh_text, kind, heads, kv_heads, tokens in (
    ("tensor=2,data=4", "plain", 4, 2, 16),  # tensor divides the kv heads
    ("tensor=4,fsdp=2", "plain", 8, 2, 16),  # two devices share a kv head
    ("tensor=2,expert=4", "blockwise", 12, 3, 16),  # a device needs one and a half
    ("tensor=2,context=2,data=2", "blockwise", 3, 3, 16),  # tensor divides no heads
    ("context=4,data=2", "blockwise", 4, 2, 32),
    ("context=2,tensor=4", "plain", 8, 2, 32),
    ("context=2,tensor=2,data=2", "splash", 4, 1, 256),
  ):
    rng = np.random.default_rng(0)
    draw = lambda n, h: rng.standard_normal((4, tokens, n, h), np.float32)
    q, k, v, g = draw(heads, 8), draw(kv_heads, 8), draw(kv_heads, 4), draw(heads, 4)
    segment = 1 + np.cumsum(rng.random((4, tokens)) < 0.1, 1, dtype=np.int32)
    segment[:, -3:] = 0
    g *= (segment > 0)[..., None, None]
    mesh = sharding.make_mesh(mesh_text)
    index = sharding.zigzag(tokens, mesh.shape["context"])
    window = 0 if kind == "splash" else 7

    def run(q, k, v, g, segment, index, kind):
      f = lambda *x: attention.attend(*x, attention.Where(index, segment), window=window, kind=kind)
      out, back = jax.vjp(f, q, k, v)
      return out, *back(g)

    alone = jax.jit(run, static_argnums=6)(q, k, v, g, segment, jnp.arange(tokens), "plain")
    order = lambda x: jnp.asarray(x[:, index])
    with jax.set_mesh(mesh):
      split = jax.jit(lambda *x: run(*x, index, kind))(*map(order, (q, k, v, g, segment)))
    real = (segment > 0)[:, index, None, None]
    errors[f"{mesh_text} {kind} {heads}/{kv_heads}"] = max(
      float(np.abs((np.asarray(a) - np.asarray(b)[:, index]) * real).max())
      for a, b in zip(split, alone))
  print(json.dumps(errors))


if __name__ == "__main__":
  main()
