"""Hugging Face's names and layouts of the parameters.

A linear layer is stored [out, in]; kr's matrices are [in, out], with heads apart. kr stacks
layers on axis 0 and experts on axis 1, where Hugging Face has one tensor each.
"""

from __future__ import annotations

from collections.abc import Iterator
import math
from typing import Any, NamedTuple

import numpy as np

from kr.model import transformer
from kr.model.config import ModelConfig

Slices = tuple[slice, ...]  # of step 1, with start and stop


class Part(NamedTuple):
  """How one parameter is stored.

  name: with {layer} and {expert} where there is one tensor each.
  layout, of one tensor: "same"; "flat": all axes are one; "in": the first axis is the input,
  the others are the output; "out": the last is the output, the others are the input.
  """
  name: str
  layout: str

  @property
  def stacked(self) -> int:
    """How many axes of kr's parameter are a tensor each."""
    return self.name.count("{")


class Tensor(NamedTuple):
  """One tensor of a checkpoint: which part of which parameter it is, and its shape there."""
  path: tuple[str, ...]
  index: tuple[int, ...]
  shape: tuple[int, ...]


_ATTENTION = {
  "wq": ("q_proj.weight", "in"),
  "wk": ("k_proj.weight", "in"),
  "wv": ("v_proj.weight", "in"),
  "wo": ("o_proj.weight", "out"),
  "bq": ("q_proj.bias", "flat"),
  "bk": ("k_proj.bias", "flat"),
  "bv": ("v_proj.bias", "flat"),
  "bo": ("o_proj.bias", "flat"),
  "q_norm": ("q_norm.weight", "same"),
  "k_norm": ("k_norm.weight", "same"),
  "wq_a": ("q_a_proj.weight", "in"),
  "bq_a": ("q_a_proj.bias", "flat"),
  "q_a_norm": ("q_a_layernorm.weight", "same"),
  "wq_b": ("q_b_proj.weight", "in"),
  "wkv_a": ("kv_a_proj_with_mqa.weight", "in"),
  "bkv_a": ("kv_a_proj_with_mqa.bias", "flat"),
  "kv_a_norm": ("kv_a_layernorm.weight", "same"),
  "wkv_b": ("kv_b_proj.weight", "in"),
}
_MLP = {
  "gate": ("gate_proj.weight", "in"),
  "up": ("up_proj.weight", "in"),
  "down": ("down_proj.weight", "in"),
  "b_gate": ("gate_proj.bias", "flat"),
  "b_up": ("up_proj.bias", "flat"),
  "b_down": ("down_proj.bias", "flat"),
  "router": ("gate.weight", "in"),
  "router_bias": ("gate.e_score_correction_bias", "same"),
  "shared_gate": ("shared_experts.gate_proj.weight", "in"),
  "shared_up": ("shared_experts.up_proj.weight", "in"),
  "shared_down": ("shared_experts.down_proj.weight", "in"),
  "experts_gate": ("experts.{expert}.gate_proj.weight", "in"),
  "experts_up": ("experts.{expert}.up_proj.weight", "in"),
  "experts_down": ("experts.{expert}.down_proj.weight", "in"),
}
_PARTS = {
  ("embed",): Part("model.embed_tokens.weight", "same"),
  ("final_norm",): Part("model.norm.weight", "same"),
  ("head",): Part("lm_head.weight", "in"),
  ("layers", "attn_norm"): Part("model.layers.{layer}.input_layernorm.weight", "same"),
  ("layers", "mlp_norm"): Part("model.layers.{layer}.post_attention_layernorm.weight", "same"),
  **{("layers", k): Part("model.layers.{layer}.self_attn." + name, layout)
     for k, (name, layout) in _ATTENTION.items()},
  **{("layers", k): Part("model.layers.{layer}.mlp." + name, layout)
     for k, (name, layout) in _MLP.items()},
}


def parts(cfg: ModelConfig) -> dict[tuple[str, ...], tuple[Part, tuple[int, ...]]]:
  """Path in the parameter tree -> (how it is stored, kr's shape), for every parameter."""
  shapes = transformer.shapes(cfg)
  out = {}
  for name, shape in shapes.items():
    for path, s in ([((name, k), s) for k, s in shape.items()] if isinstance(shape, dict)
                    else [((name,), shape)]):
      out[path] = _PARTS[path], s
  return out


def names(cfg: ModelConfig, path: tuple[str, ...], part: Part, stack: Slices
          ) -> Iterator[tuple[tuple[int, ...], str]]:
  """((place in the stack), Hugging Face's name) for the part of the stack that is asked for."""
  if not part.stacked:
    yield (), part.name
    return
  where = transformer.layers_of(cfg, path[-1])
  for i in range(stack[0].start, stack[0].stop):
    if part.stacked == 1:
      yield (i,), part.name.format(layer=where[i])
      continue
    for e in range(stack[1].start, stack[1].stop):
      yield (i, e), part.name.format(layer=where[i], expert=e)


def whole(shape: tuple[int, ...]) -> Slices:
  """The slices that take all of an array."""
  return tuple(slice(0, size) for size in shape)


def table(cfg: ModelConfig) -> dict[str, Tensor]:
  """Every tensor of the model under Hugging Face's name, layer by layer."""
  out = {}
  for path, (part, shape) in parts(cfg).items():
    stack, rest = shape[:part.stacked], shape[part.stacked:]
    for index, name in names(cfg, path, part, whole(stack)):
      out[name] = Tensor(path, index, hf_shape(part.layout, rest))
  order = lambda item: (item[1].path[0] != "embed", item[1].path[0] != "layers", _layer(item[0]))
  return dict(sorted(out.items(), key=order))


def _layer(name: str) -> int:
  return int(name.split(".")[2]) if name.startswith("model.layers.") else 0


def hf_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape of one tensor in Hugging Face's layout; `shape` is kr's."""
  if layout == "in":
    return (math.prod(shape[1:]), shape[0])
  if layout == "out":
    return (shape[-1], math.prod(shape[:-1]))
  return shape if layout == "same" else (math.prod(shape),)


def to_hf(x: np.ndarray, layout: str) -> np.ndarray:
  """One tensor, kr's layout -> Hugging Face's."""
  if layout == "in":
    return x.reshape(x.shape[0], -1).T
  if layout == "out":
    return x.reshape(-1, x.shape[-1]).T
  return x.reshape(hf_shape(layout, x.shape))


def hf_slices(layout: str, shape: tuple[int, ...], index: Slices) -> Slices:
  """Where the piece `index` of one tensor stands in Hugging Face's layout; shape: kr's, whole."""
  if layout == "in":
    return (_joined(shape[1:], index[1:]), index[0])
  if layout == "out":
    return (index[-1], _joined(shape[:-1], index[:-1]))
  return index if layout == "same" else (_joined(shape, index),)


def from_hf(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
  """A tensor, or what `hf_slices` took of it -> kr's layout, of `shape`."""
  return (x.T if layout in ("in", "out") else x).reshape(shape)


def _joined(shape: tuple[int, ...], index: Slices) -> slice:
  """The slice of several axes taken as one: only the first of them may be cut."""
  if any((s.start, s.stop) != (0, size) for s, size in zip(index[1:], shape[1:])):
    raise ValueError(f"a piece {index} of axes {shape} is not contiguous")
  inner = math.prod(shape[1:])
  return slice(index[0].start * inner, index[0].stop * inner)


def leaf(tree: Any, path: tuple[str, ...]) -> Any:
  """The parameter at a path."""
  for key in path:
    tree = tree[key]
  return tree
