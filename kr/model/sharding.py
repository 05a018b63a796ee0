"""Meshes: one table from the names of dimensions to the axes of the machine.

Every parameter and every array that matters names its dimensions (`kr.model.transformer`);
`RULES` says which mesh axes split them. On one device, without a mesh, nothing here does
anything.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

# data: copies of the policy that see different rows. fsdp: parameters and optimizer are split,
# and gathered layer by layer; rows are split too. context: the tokens of a row are split.
# tensor: heads and MLP columns are split. expert: experts are split, and rows.
AXES = ("data", "fsdp", "expert", "context", "tensor")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "rows": ("data", "fsdp", "expert"),
    "tokens": "context",
    "width": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    None: None,
}


class Param(NamedTuple):
  """One parameter: its shape, its dimensions' names (in `RULES`), and its initial values.

  `fan_in`: normal with variance 1 / fan_in; ONES (norms) or ZEROS (biases).
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  fan_in: float


ONES, ZEROS = 0.0, -1.0


def parse(text: str) -> dict[str, int]:
  """"fsdp=4,tensor=2" -> {"fsdp": 4, "tensor": 2}; one axis may be -1: what is left.

  Raises ValueError naming what is wrong.
  """
  sizes: dict[str, int] = {}
  for part in filter(None, text.replace(" ", "").split(",")):
    name, _, size = part.partition("=")
    if name not in AXES:
      raise ValueError(f"mesh axis {name!r} is none of {', '.join(AXES)}")
    if name in sizes:
      raise ValueError(f"mesh axis {name} is given twice")
    try:
      sizes[name] = int(size)
    except ValueError:
      raise ValueError(f"mesh axis {name} needs a whole number, not {size!r}") from None
    if sizes[name] < 1 and sizes[name] != -1:
      raise ValueError(f"mesh axis {name} needs a size of at least 1, or -1 for what is left")
  return sizes


def make_mesh(text: str, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh of all axes, sizes from `parse(text)`; an axis not named has size 1.

  Raises ValueError if the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = {**dict.fromkeys(AXES, 1), **parse(text)}
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ValueError(f"only one mesh axis can be -1, not {' and '.join(free)}")
  known = math.prod(size for size in sizes.values() if size != -1)
  if free:
    sizes[free[0]] = max(len(devices) // known, 1)
  if math.prod(sizes.values()) != len(devices):
    given = ", ".join(f"{k}={v}" for k, v in sizes.items() if v != 1) or "one device"
    raise ValueError(f"the mesh {given} needs {math.prod(sizes.values())} devices, there are "
                     f"{len(devices)}")
  return jax.make_mesh(tuple(sizes[a] for a in AXES), AXES, (AxisType.Auto,) * len(AXES),
                       devices=devices)


def enough(text: str) -> tuple[list[jax.Device], list[jax.Device]]:
  """(the first, the last) devices of this process that a mesh of these sizes takes: all of them
  where an axis is -1, or where there are too few."""
  count = math.prod(parse(text).values())
  all_of_them = jax.local_devices()
  if not 0 < count <= len(all_of_them):
    return all_of_them, all_of_them
  return all_of_them[:count], all_of_them[-count:]


def devices(mesh: Mesh | None) -> set[jax.Device]:
  """The devices of a mesh; without one, the default device."""
  return set(mesh.devices.flat) if mesh else {jax.local_devices()[0]}


def current() -> jax.sharding.AbstractMesh | None:
  """The mesh of `jax.set_mesh`, or None if there is none."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def size(mesh: Any, axis: str | tuple[str, ...] | None) -> int:
  """How many ways a mesh axis, or several together, split a dimension."""
  axes = (axis,) if isinstance(axis, str) else axis or ()
  return math.prod(mesh.shape[a] for a in axes)


def spec(mesh: Any, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> P:
  """The PartitionSpec of an array whose dimensions are named `axes`.

  With `shape`, a dimension that its mesh axes do not divide stays whole: grouped heads are
  often fewer than the tensor axis is long. Dimensions behind the last one that is split are not
  named: that is how JAX names the layout of a result, and two names would compile twice.
  """
  out = []
  for i, name in enumerate(axes):
    axis = RULES[name]
    whole = shape is not None and shape[i] % size(mesh, axis)
    out.append(None if whole or size(mesh, axis) == 1 else axis)
  while out and out[-1] is None:
    out.pop()
  return P(*out)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Pins an intermediate array to the layout that the table gives its dimensions."""
  mesh = current()
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, spec(mesh, axes, x.shape))


def pin(tree: Any, declared: Any) -> Any:
  """`constrain` for the parameters that are `declared`, or what is kept for each of them.

  Such as an optimizer's state: a leaf whose path ends like a parameter's, and that is as
  large, lies where the parameter does; all else lies whole on every device.
  """
  if current() is None:
    return tree
  is_param = lambda p: isinstance(p, Param)
  known = {_names(path): p for path, p in
           jax.tree_util.tree_flatten_with_path(declared, is_leaf=is_param)[0]}

  def one(path: tuple, x: jax.Array) -> jax.Array:
    p = known.get(_names(path))
    return constrain(x, *(p.axes if p and p.shape == x.shape else (None,) * x.ndim))

  return jax.tree_util.tree_map_with_path(one, tree)


def _names(path: tuple) -> tuple[str, ...]:
  """The dictionary keys that a path ends with."""
  out: list[str] = []
  for key in reversed(path):
    if not isinstance(key, jax.tree_util.DictKey):
      break
    out.insert(0, key.key)
  return tuple(out)


def shard(mesh: Mesh, tree: Any, declared: Any) -> Any:
  """Puts a tree of host arrays onto a mesh as `kr.model.transformer.declare` says.

  Each process hands its devices their pieces; every process must hold the same arrays. What
  lies there already is taken as it is, not copied.
  """
  def one(x: Any, p: Any) -> jax.Array:
    sharding = NamedSharding(mesh, spec(mesh, p.axes, p.shape))
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
      return jax.device_put(x, sharding)  # which may name the same layout in other words
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(one, tree, declared)


def park(tree: Any) -> Any:
  """Arrays in the memory of their devices' hosts, laid out as they are; `unpark` brings them back.

  The devices' own memory is free as soon as nobody holds the old arrays.
  """
  return jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("pinned_host")), tree)


def unpark(tree: Any) -> Any:
  """What `park` put aside, in the devices' memory again; other arrays as they are."""
  def one(a: jax.Array) -> jax.Array:
    parked = isinstance(a, jax.Array) and a.sharding.memory_kind == "pinned_host"
    return jax.device_put(a, a.sharding.with_memory_kind("device")) if parked else a

  return jax.tree.map(one, tree)


def zigzag(tokens: int, parts: int) -> np.ndarray:
  """The order in which a row's tokens are laid over `parts` devices, so that each has as much
  causal attention to compute: part i holds the i-th piece from the front and from the back.

  -> [tokens] int32, the token that stands at each place.
  """
  if parts == 1:
    return np.arange(tokens, dtype=np.int32)
  if tokens % (2 * parts):
    raise ValueError(f"a row of {tokens} tokens cannot be split over context={parts}: make "
                     f"row_tokens a multiple of {2 * parts}")
  pieces = np.arange(tokens, dtype=np.int32).reshape(2 * parts, -1)
  return np.concatenate([np.concatenate([pieces[i], pieces[2 * parts - 1 - i]])
                         for i in range(parts)])
