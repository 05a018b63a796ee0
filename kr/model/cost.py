"""What a training step costs by formula, and what chips can do: the two sides of a bound."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import NamedTuple

from kr.model import lora
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.sharding import RULES, Param


class Chip(NamedTuple):
  """Published peaks of one chip.

  flops: dense bfloat16, a second. hbm_bytes, hbm_bandwidth: its memory and bytes a second.
  link_bandwidth: bytes a second that it receives from its `domain` neighbours over the fast
  interconnect, all links together; outside_bandwidth: from chips beyond them.
  """

  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  domain: int
  outside_bandwidth: float


# TPU: https://docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e. Links are half of the "bidirectional
# inter-chip interconnect bandwidth"; outside is the data center network (v5e: 6.4 Tb/s for a pod
# of 256 chips; v5p: 50 Gb/s a chip; v6e: 25.6 Tb/s a pod).
# GPU: https://www.nvidia.com/en-us/data-center/h100, /h200: SXM, without sparsity. Links are half
# of NVLink's 900 GB/s among the 8 of a server; outside is one 400 Gb/s adapter a GPU (DGX H100).
CHIPS = {
  "v5e": Chip(197e12, 16e9, 819e9, 200e9, 256, 3.1e9),
  "v5p": Chip(459e12, 95e9, 2765e9, 600e9, 8960, 6.25e9),
  "v6e": Chip(918e12, 32e9, 1638e9, 400e9, 256, 12.5e9),
  "h100": Chip(989e12, 80e9, 3350e9, 450e9, 8, 50e9),
  "h200": Chip(989e12, 141e9, 4800e9, 450e9, 8, 50e9),
}


def active_parameters(cfg: ModelConfig) -> tuple[float, float]:
  """Parameters that multiply one token: (in the layers, in the output head).

  Of E experts a token visits `active`; the input embedding is a look-up and multiplies nothing.
  """
  layers = 0.0
  for name, p in transformer.declare(cfg)["layers"].items():
    if p.fan_in > 0:  # a matrix: no norm, no bias
      share = cfg.moe.active / cfg.moe.experts if name.startswith("experts_") else 1
      layers += _size(p) * share
  return layers, float(cfg.vocab * cfg.width)


def total_parameters(cfg: ModelConfig) -> float:
  """All parameters."""
  tree = transformer.declare(cfg)
  return float(sum(_size(p) for p in tree["layers"].values())
               + sum(_size(p) for name, p in tree.items() if name != "layers"))


def _size(p: Param) -> int:
  return math.prod(p.shape)


def step_flops(cfg: ModelConfig, tokens: float, segment_tokens: float, trained_tokens: float,
               again: float = 0.0) -> float:
  """FLOPs of forward and backward over `tokens` tokens in segments of `segment_tokens`.

  6 for each parameter and token (Kaplan et al., 2020, section 2.1), the head over the trained
  tokens alone, and 6 (k + v) for each head and pair of a query and a key that it sees: the causal
  half, no further than a window. again: share of the layers' forward pass that the backward
  pass computes anew (rematerialisation); 0 counts the model's FLOPs alone.
  """
  layers, head = active_parameters(cfg)
  pairs = 0.0  # of a query and a key, for one query, summed over layers
  for layer in range(cfg.layers):
    window = cfg.window_of(layer)
    full = min(window, segment_tokens) if window else segment_tokens
    pairs += full * (1 - full / segment_tokens / 2)
  attention = 2 * cfg.heads * (cfg.key_dim + cfg.value_dim) * pairs  # forward, a token
  forward = 2 * layers + attention
  return tokens * (3 + again) * forward + trained_tokens * 6 * head


def step_bytes(cfg: ModelConfig, tokens: float, trained_tokens: float, micro_batches: float,
               mesh: Mapping[str, int], item_bytes: int, again: float = 0.0) -> float:
  """Bytes that one device must move between its memory and its cores for all gradients of a step.

  Each matrix product reads its inputs and its matrix and writes its outputs, forward, backward
  twice, and `again` as in `step_flops`; what lies between them is thought fused, and attention's
  scores never in memory. tokens, trained_tokens: the device's own.
  """
  matrices = values = 0.0  # elements of matrices on the device; inputs and outputs of a token
  for name, p in transformer.declare(cfg)["layers"].items():
    if p.fan_in <= 0:
      continue
    visits = cfg.moe.active if name.startswith("experts_") else 1
    piece = [n / _cut(n, axis, mesh) for n, axis in zip(p.shape, p.axes)]
    inputs, outputs = lora.matrix_axes(name, len(p.shape)) or ((1,), (2,))  # the router's
    matrices += math.prod(piece)
    values += p.shape[0] * visits * (
      math.prod(piece[i] for i in inputs) + math.prod(piece[i] for i in outputs))
  vocab = cfg.vocab / _cut(cfg.vocab, "vocab", mesh)
  elements = ((3 + again) * (micro_batches * matrices + tokens * values)
              + 3 * (micro_batches * vocab * cfg.width + trained_tokens * (vocab + cfg.width)))
  return elements * item_bytes


def _cut(n: int, axis: str | None, mesh: Mapping[str, int]) -> int:
  """In how many parts a device holds a dimension while it computes: fsdp is gathered."""
  parts = mesh.get(RULES[axis], 1) if RULES[axis] in ("tensor", "expert") else 1
  return 1 if n % parts else parts


def link_bandwidth(chip: Chip, group: tuple[int, ...]) -> float:
  """Bytes a second that a chip receives from the devices of a group that it is in."""
  inside = len({device // chip.domain for device in group}) == 1
  return chip.link_bandwidth if inside else chip.outside_bandwidth
