"""Outcome reward, spread over the steps of a trajectory. numpy only."""

from __future__ import annotations

import numpy as np

from kr import types


def step_rewards(stop: types.StopReason, correct: bool | None, turns: int, gamma: float,
                 format_penalty: float) -> np.ndarray:
  """Per-step rewards of one finished trajectory, float64 [T], T = `turns`.

  A correct answer gives step i (counted from 1) the reward γ^(T−i): the last step gets 1
  and earlier ones less, so of two correct trajectories the shorter earns more per step.
  A wrong answer gives zeros. A format fault (invalid action, context or turn limit) gives
  −`format_penalty` at every step, flat: whatever the steps did, no answer came of them, and
  a decay would leave the early steps of a long faulty trajectory unpunished. A fault
  before the first turn (T = 0) gives an empty array.

  Raises ValueError for what has no reward: paused, unfinished and infrastructure stops, an
  answer that was not graded, or parameters out of range.
  """
  if not 0 < gamma <= 1:
    raise ValueError(f"gamma must be in (0, 1], not {gamma}")
  if format_penalty < 0:
    raise ValueError(f"format_penalty is subtracted and must be >= 0, not {format_penalty}")
  if turns < 0:
    raise ValueError(f"turns must be >= 0, not {turns}")
  if stop in types.FORMAT_FAULTS:
    return np.full(turns, -float(format_penalty))
  if stop != types.StopReason.ANSWERED:
    raise ValueError(f"a trajectory that stopped as {stop and stop.value!r} has no reward: "
                     "only finished trajectories without infrastructure failures are scored")
  if correct is None:
    raise ValueError("the answer was not graded: grade it before asking for its reward")
  if turns == 0:
    raise ValueError("an answered trajectory has at least one turn")
  if not correct:
    return np.zeros(turns)
  return float(gamma) ** np.arange(turns - 1, -1, -1)
