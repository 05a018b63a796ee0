"""Context managers: what the policy sees next, s_{t+1} = context(s_t, think_t, observation_t).

A context manager is a pure function of the trajectory so far, whose last turn has its results but
no observation in the segment yet. It answers None (append the observation) or a whole rewritten
prompt: the loop then closes the segment and opens the next with it. Being pure, it gives the same
after a pause and in another process.
"""

from __future__ import annotations

from typing import Protocol

from kr.agent.chat import Chat
from kr.types import Trajectory, Turn, ToolResult

PLACEHOLDER = "(dropped)"


class Context(Protocol):
  def __call__(self, trajectory: Trajectory, chat: Chat) -> list[int] | None: ...


def keep(trajectory: Trajectory, chat: Chat) -> None:
  """Keeps everything: segments only grow."""


def window(last: int, over_tokens: int = 0, placeholder: str = PLACEHOLDER) -> Context:
  """Keeps the last `last` observations; earlier ones shrink to a placeholder.

  Thinking and calls all stay: they are the policy's notes. Nothing is rewritten while the
  context holds at most `over_tokens` tokens (0: rewrite as soon as an observation leaves the
  window), since each rewrite costs the server its cache. Raises ValueError when `last` < 1.
  """
  if last < 1:
    raise ValueError(f"window keeps at least the newest observation, not {last}")

  def rewrite(trajectory: Trajectory, chat: Chat) -> list[int] | None:
    turns = trajectory.turns
    newest = chat.observation(turns[-1].results)
    length = len(trajectory.segments[-1]) + len(newest)
    if len(turns) <= last or length <= over_tokens:
      return None
    first = trajectory.turns[0]
    ids = list(trajectory.segments[0].tokens[:first.start])
    for i, turn in enumerate(turns):
      ids += sampled_ids(trajectory, turn)
      if i < len(turns) - last:
        ids += chat.observation([ToolResult(placeholder) for _ in turn.results])
      else:
        ids += chat.observation(turn.results)
    return ids if len(ids) < length else None

  return rewrite


def sampled_ids(trajectory: Trajectory, turn: Turn) -> list[int]:
  """The ids that were sampled in a turn."""
  return trajectory.segments[turn.segment].tokens[turn.start:turn.stop]
