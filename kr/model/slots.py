"""Which slot of the KV cache holds what: plain bookkeeping on the host, no device.

A slot's tokens outlive its request, so that a later request can continue there (the next
turn of a trajectory) or copy a prefix from there (the question that a group shares).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SHARE_TOKENS = 16  # a shorter common prefix is not worth a copy between slots


class Place(NamedTuple):
  """Where a request goes: its slot, and how many leading tokens it need not compute.

  `source` != `slot`: these tokens must first be copied from there.
  """
  slot: int
  source: int
  reused: int


class Slots:
  """The contents of `count` slots of `capacity` tokens, and one more for padding rows.

  held [N+1,C]: token ids. known [N+1]: how many of them are meant. filled [N+1]: how
  many of those have their keys and values in the cache. busy: has a request. stale: its
  keys and values are of older weights, so nobody else may use them.
  """

  def __init__(self, count: int, capacity: int):
    self.count, self.capacity = count, capacity
    self.held = np.zeros((count + 1, capacity), np.int32)
    self.known = np.zeros(count + 1, np.int64)
    self.filled = np.zeros(count + 1, np.int64)
    self.busy = np.zeros(count + 1, bool)
    self.stale = np.zeros(count + 1, bool)
    self._used = np.zeros(count + 1, np.int64)
    self._tick = 0

  def place(self, tokens: np.ndarray, usable: int) -> Place | None:
    """Finds a slot for tokens [T], of which the first `usable` may come from the cache.

    None: wait; every slot is busy, or the prefix is being computed for another request.
    """
    n = self.count
    if self.busy[:n].all():
      return None
    differs = self.held[:n, :usable] != tokens[:usable]
    differs = np.concatenate([differs, np.ones((n, 1), bool)], 1)  # at `usable` at the latest
    common = np.where(self.stale[:n], 0, differs.argmax(1))
    have = np.minimum(common, self.filled[:n])
    source = int(have.argmax())
    if np.minimum(common, self.known[:n]).max() >= have[source] + 2 * SHARE_TOKENS:
      return None
    continues = np.where(self.busy[:n] | (have < self.filled[:n]), 0, have)
    slot = int(continues.argmax())
    if not continues[slot] or continues[slot] < have[source]:
      age = np.where(self.filled[:n] > 0, self._used[:n], -1)  # empty slots first
      slot = int(np.where(self.busy[:n], np.iinfo(np.int64).max, age).argmin())
    if have[source] < have[slot] + SHARE_TOKENS:
      source = slot
    return Place(slot, source, int(have[source]))

  def take(self, place: Place, tokens: np.ndarray) -> None:
    """Puts a request's tokens [T] into its place."""
    slot = place.slot
    self.held[slot, :len(tokens)] = tokens
    self.known[slot], self.filled[slot], self.busy[slot] = len(tokens), place.reused, True

  def extend(self, slot: int, ids: list[int]) -> None:
    """Appends sampled ids; the newest is known but not yet in the cache."""
    known = int(self.known[slot])
    self.held[slot, known:known + len(ids)] = ids
    self.known[slot] += len(ids)
    self.filled[slot] += len(ids)

  def release(self, slot: int, keep: bool = True) -> None:
    """Ends a request; the slot keeps what is in the cache unless it is stale or not `keep`."""
    if self.stale[slot] or not keep:
      self.filled[slot] = 0
    self.known[slot] = self.filled[slot]
    self.busy[slot] = self.stale[slot] = False
    self._tick += 1
    self._used[slot] = self._tick

  def flush(self) -> None:
    """Empties the free slots; the busy ones keep theirs for themselves only."""
    self.stale |= self.busy
    self.known[~self.busy] = self.filled[~self.busy] = 0

  def missing(self, slot: int) -> int:
    """Prompt tokens that must still be computed before the slot can decode."""
    return int(self.known[slot] - 1 - self.filled[slot])
