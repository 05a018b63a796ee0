"""Who gets how much of the outcome: rewards, advantages, and which trajectories train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kr import types
from kr.rl import advantage
from kr.rl import reward
from kr.rl import rollout


def assign(trajectories: Sequence[types.Trajectory], *, gamma: float, format_penalty: float,
           negatives_keep: float, protect_faults: bool, seed: Sequence[int]
           ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
  """Per trajectory: step rewards [T], step advantages [T], and whether it trains (bool).

  protect_faults: negative sample control discards no trajectory with a format fault.
  """
  rewards = {t.id: reward.step_rewards(t.stop, t.correct, len(t.turns), gamma, format_penalty)
             for t in trajectories}
  advantages: dict[str, np.ndarray] = {}
  for group in rollout.by_group(trajectories):
    advantages.update(zip([t.id for t in group],
                          advantage.step_advantages([rewards[t.id] for t in group])))
  keep = advantage.negative_sample_control(
      [advantages[t.id] for t in trajectories], negatives_keep, np.random.default_rng(seed),
      protected=[protect_faults and t.stop in types.FORMAT_FAULTS for t in trajectories])
  return ([rewards[t.id] for t in trajectories], [advantages[t.id] for t in trajectories], keep)
