"""How acting keeps step with learning: when a step has enough, and where turns may begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
import contextlib
import dataclasses


@dataclasses.dataclass(frozen=True)
class Pace:
  """How many trajectories act at once, how far ahead of learning, and when a step has enough.

  concurrency: trajectories that act at once. max_staleness: how many policies before its own a
  step's tasks may begin; at 0 nothing acts while the learner learns. budget_s: seconds after which
  a step trains what is complete (None: no limit). enough: the share of the open groups that is
  enough to train (1: all). What these two leave unfinished is carried to the next step, where it
  goes first; a trajectory outlives `max_pauses` steps at most: then its step waits for it, as long
  as the loop's own limits let it go on.
  """
  concurrency: int
  max_staleness: int = 0
  budget_s: float | None = None
  enough: float = 1.0
  max_pauses: int = 4

  def __post_init__(self):
    if self.concurrency < 1:
      raise ValueError(f"concurrency must be positive, not {self.concurrency}")
    if self.max_staleness < 0:
      raise ValueError(f"max_staleness must not be negative, not {self.max_staleness}")
    if not 0 < self.enough <= 1:
      raise ValueError(f"enough is a share of the groups, above 0 and up to 1, not {self.enough}")
    if self.budget_s is not None and not self.budget_s >= 0:
      raise ValueError(f"budget_s must not be negative, not {self.budget_s}")
    if self.max_pauses < 1:
      raise ValueError(f"max_pauses must be at least 1, not {self.max_pauses}: for no pauses leave "
                       "budget_s at 0 and enough at 1")

  @property
  def partial(self) -> bool:
    """Whether a step may end with unfinished trajectories."""
    return self.budget_s is not None or self.enough < 1

  @property
  def oldest(self) -> int:
    """How many versions a trained token may be behind the policy that is updated."""
    return self.max_staleness + (self.max_pauses if self.partial else 0)


class Gate:
  """Where turns begin. While it is shut none does, so the policy never changes within a turn."""

  def __init__(self):
    self._running = 0
    self._open, self._idle = asyncio.Event(), asyncio.Event()
    self._open.set()
    self._idle.set()

  @contextlib.asynccontextmanager
  async def turn(self) -> AsyncIterator[None]:
    """Encloses the sampling of one turn; waits while the gate is shut."""
    while not self._open.is_set():  # it may have been shut again before this was woken
      await self._open.wait()
    self._running += 1
    self._idle.clear()
    try:
      yield
    finally:
      self._running -= 1
      if not self._running:
        self._idle.set()

  @contextlib.asynccontextmanager
  async def shut(self) -> AsyncIterator[None]:
    """Encloses a publication: entered when the turns that run have ended. Tools go on."""
    self._open.clear()
    try:
      await self._idle.wait()
      yield
    finally:
      self._open.set()
