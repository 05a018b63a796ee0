"""The device side of the engine: weights, KV cache, and the choice of compiled shapes.

Batches are padded to a few sizes, so that there are few programs to compile. Host side
in numpy: every call takes slots as plain lists and reads their tokens from `Slots`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
import jax.numpy as jnp
import numpy as np

from kr.model import decode
from kr.model import layers
from kr.model import sharding
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.slots import Slots

# Prompt tokens that a row takes in one prefill call -> the numbers of rows of such a call.
PREFILL_ROWS = {16: (4, 32), 64: (4, 32), 256: (8,)}
DECODE_ROWS = (8, 32)  # and the number of slots
# Of a model with that many bytes of weights, more than a processor caches, padding rows cost more
# than further calls, and a sequence by itself is worth a program.
LARGE_BYTES = 64 * 2 ** 20
LARGE_PREFILL_ROWS = {16: (1, 4, 16), 64: (1, 4, 16), 256: (1, 4)}
LARGE_DECODE_ROWS = (1, 8, 32)


def bucket(n: int, sizes: tuple[int, ...]) -> int:
  """The smallest size that holds n, or else the largest."""
  return next((s for s in sizes if s >= n), sizes[-1])


class Device:
  """One model and its cache. max_len: tokens of a sequence; steps: tokens per decode call.

  mesh: where they lie, heads and MLP columns over its `tensor` axis; None: the default device.
  """

  def __init__(self, params: Any, cfg: ModelConfig, slots: int, max_len: int, steps: int,
               mesh: Mesh | None = None):
    self.cfg, self.steps, self.mesh = cfg, steps, mesh
    self.slots = Slots(slots, max_len + steps)  # a decode call may run past the last token
    capacity = self.slots.capacity
    self.spans = tuple(2 ** i for i in range(7, 31) if 2 ** i < capacity) + (capacity,)
    self.prefill_spans = self.spans[1:] or self.spans
    large = sum(4 * np.size(a) for a in jax.tree.leaves(params)) > LARGE_BYTES
    chunks = LARGE_PREFILL_ROWS if large else PREFILL_ROWS
    self.chunks = {c: rows for c, rows in chunks.items() if c <= capacity} or {capacity: (4,)}
    self.rows = LARGE_DECODE_ROWS if large else DECODE_ROWS
    self.rows = tuple(r for r in self.rows if r < slots) + (slots,)
    self._shapes = self._shapes_of(params)
    self._cache: decode.Cache | None = None
    self._scratch: decode.Cache | None = None  # memory for the decode calls of one shape
    self.params: Any = None
    self.load(self.put(params))

  def put(self, params: Any) -> Any:
    """Weights onto the device as float32, each layer's apart from its stack: a program that
    slices the stacks would copy every weight once a token. What lies on devices already moves
    from there, not through the host. Raises ValueError when a weight is not finite."""
    for path, a in jax.tree_util.tree_leaves_with_path(params):
      if not (jnp if isinstance(a, jax.Array) else np).isfinite(a).all():
        raise ValueError(f"the weights {jax.tree_util.keystr(path)} hold NaN or infinity")
    declared = transformer.declare(self.cfg)
    stacks = params["layers"]
    if self.mesh is None and not self.cfg.mla:  # on a mesh, its parts would lie elsewhere
      stacks = layers.fuse_heads(stacks)
    axes = {name: p.axes[1:] for name, p in declared["layers"].items()}
    placed = {name: self._place(a, declared[name].axes)
              for name, a in params.items() if name != "layers"}
    placed["layers"] = {name: tuple(self._place(a[i], axes.get(name)) for i in range(len(a)))
                        for name, a in stacks.items()}
    return jax.block_until_ready(placed)

  def _place(self, a: Any, axes: tuple[str | None, ...] | None) -> jax.Array:
    where = jax.local_devices()[0] if self.mesh is None else NamedSharding(
        self.mesh, sharding.spec(self.mesh, axes, a.shape))
    # Never the learner's own array, whose memory its next update gives away.
    return jax.device_put(a.astype(np.float32), where, may_alias=False)

  def load(self, params: Any) -> None:
    """Takes weights that `put` placed, and makes an empty cache if there is none."""
    self.params = params
    if self._cache is None:
      # The last slot takes padding rows.
      self._cache = self._empty(self.slots.count + 1, self.slots.capacity)

  def release(self) -> None:
    """Gives up the memory of weights and cache, until `load`."""
    self.params = self._cache = self._scratch = None

  def _empty(self, slots: int, capacity: int) -> decode.Cache:
    make = functools.partial(decode.init_cache, self.cfg, slots, capacity)
    if self.mesh is None:
      return make()
    kinds = jax.eval_shape(make)
    axes = (None, "kv_heads", None, None)
    return jax.jit(make, out_shardings=jax.tree.map(
        lambda a: NamedSharding(self.mesh, sharding.spec(self.mesh, axes, a.shape)), kinds))()

  def _on_mesh(self) -> contextlib.AbstractContextManager:
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def check(self, params: Any) -> None:
    """Raises ValueError unless the tree has the shapes of the model that is served."""
    old, new = self._shapes, self._shapes_of(params)
    wrong = [f"{k} is {new.get(k, 'missing')}, the model has {old.get(k, 'none')}"
             for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    if wrong:
      raise ValueError("the new weights do not fit the served model: " + "; ".join(wrong[:3]))

  @staticmethod
  def _shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): np.shape(a)
            for path, a in jax.tree_util.tree_leaves_with_path(params)}

  def copy(self, source: int, target: int, tokens: int) -> None:
    """Copies the first tokens of one slot's cache to another's."""
    source, target = np.array([source], np.int32), np.array([target], np.int32)
    with self._on_mesh():
      self._cache = decode.copy(self._cache, source, target, span=bucket(tokens, self.spans))

  def chunk(self, slot: int) -> int:
    """The chunk length that suits what the slot is missing."""
    return bucket(self.slots.missing(slot), tuple(self.chunks))

  def row_limit(self, chunk: int, waiting: int) -> int:
    """How many of the waiting rows one prefill call takes at that chunk length."""
    rows = self.chunks[chunk]
    return max((r for r in rows if r <= waiting), default=rows[0]) if 1 in rows else rows[-1]

  def prefill(self, slots: list[int], T: int, scored: bool) -> list[tuple[int, np.ndarray]]:
    """Computes up to T missing tokens of each slot.

    -> for each slot (first position, logprobs of the tokens from there on), empty unless
    `scored`.
    """
    S = self.slots
    B = bucket(len(slots), self.chunks[T])
    slot = np.full(B, S.count, np.int32)
    slot[:len(slots)] = slots
    # A chunk that would run past the slot's end begins earlier and computes a few tokens again.
    start = np.where(slot < S.count, np.minimum(S.filled[slot], S.capacity - T), 0).astype(np.int32)
    column = start[:, None] + np.arange(T)
    span = bucket(int(start.max()), self.prefill_spans)
    tokens = S.held[slot[:, None], column]
    out = np.zeros((B, 0), np.float32)
    if scored:
      targets = S.held[slot[:, None], np.minimum(column + 1, S.capacity - 1)]
      with self._on_mesh():
        out, self._cache = decode.score(
            self.params, self._cache, tokens, targets, slot, start, cfg=self.cfg, span=span)
      out = np.asarray(out)
    else:
      self._prefill(tokens, slot, start, span)
    scores = []
    for i, s in enumerate(slots):
      n = min(T, int(S.known[s]) - 1 - int(start[i]))
      S.filled[s] = start[i] + n
      scores.append((int(start[i]) + 1, out[i, :n]))
    return scores

  def decode(self, slots: list[int], seeds: list, sampling: np.ndarray) -> tuple[list, list]:
    """Samples `steps` tokens for each slot -> (ids, logprobs), each [len(slots)][steps].

    seeds: [2] uint32 each; sampling [len(slots),4]: temperature, top_p, top_k, min_p.
    """
    S, n = self.slots, len(slots)
    B = bucket(n, self.rows)
    slot = np.full(B, S.count, np.int32)
    slot[:n] = slots
    position = np.where(slot < S.count, S.filled[slot], 0).astype(np.int32)
    seed = np.zeros((B, 2), np.uint32)
    seed[:n] = seeds
    values = np.tile(np.float32([1, 1, self.cfg.vocab, 0]), (B, 1))
    values[:n] = sampling
    off = (values[:, 1] >= 1) & (values[:, 2] >= self.cfg.vocab) & (values[:, 3] <= 0)
    rows = decode.Rows(slot, S.held[slot, position], position, seed, values[:, 0].copy(),
                       values[:, 1].copy(), values[:, 2].astype(np.int32), values[:, 3].copy())
    tokens, logprobs = self._decode(
        rows, bucket(int(position.max()), self.spans), truncate=not off.all())
    return np.asarray(tokens)[:n].tolist(), np.asarray(logprobs)[:n].tolist()

  def _prefill(self, tokens: np.ndarray, slot: np.ndarray, start: np.ndarray, span: int) -> None:
    with self._on_mesh():
      self._cache = decode.prefill(
          self.params, self._cache, tokens, slot, start, cfg=self.cfg, span=span)

  def _decode(self, rows: decode.Rows, span: int, truncate: bool) -> tuple[jax.Array, jax.Array]:
    B = len(rows.slot)
    scratch, self._scratch = self._scratch, None
    if scratch is None or scratch.k[0].shape[::3] != (B, span):
      del scratch  # before there is another
      scratch = self._empty(B, span)
    with self._on_mesh():
      tokens, logprobs, self._cache, self._scratch = decode.decode(
          self.params, self._cache, scratch, rows, cfg=self.cfg, span=span, steps=self.steps,
          truncate=truncate)
    return tokens, logprobs

  def warm_up(self, spans: int) -> None:
    """Compiles what the `spans` shortest spans need, by running it on the padding slot."""
    cfg, last = self.cfg, self.slots.count
    for span in self.spans[:spans]:
      self.copy(last, last, span)
      for B in self.rows:
        zero, one = np.zeros(B, np.int32), np.ones(B, np.float32)
        rows = decode.Rows(zero + last, zero, zero, np.zeros((B, 2), np.uint32), one, one,
                           np.full(B, cfg.vocab, np.int32), one * 0)
        self._decode(rows, span, truncate=False)
    for span in self.prefill_spans[:max(spans - 1, 1)]:
      for T, rows in self.chunks.items():
        for B in rows:
          zero = np.zeros(B, np.int32)
          self._prefill(np.zeros((B, T), np.int32), zero + last, zero, span)
    jax.block_until_ready(self._cache)
