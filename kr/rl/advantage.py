"""Group baseline and negative sample control. numpy only.

The group (all samples of one task in one step) is the unit of the baseline. Lists run
over its trajectories; trajectory j has T_j steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ZERO = 1e-9  # differences below this are rounding


def baseline(means: np.ndarray) -> np.ndarray:
  """Leave-one-out mean over the group: [G] mean step rewards -> [G] baselines.

  b[j] = (Σ means − means[j]) / (G − 1): it does not depend on the trajectory's own
  actions, so subtracting it leaves the policy gradient unbiased (Kool et al., 2019, "Buy 4
  REINFORCE samples, get a baseline for free"). A group of one has baseline 0.
  """
  means = np.asarray(means, np.float64)
  if len(means) < 2:
    return np.zeros(len(means))
  return (means.sum() - means) / (len(means) - 1)


def has_spread(rewards: Sequence[np.ndarray]) -> bool:
  """Whether the group tells better from worse: it has one member, or their mean rewards differ."""
  means = [r.mean() for r in rewards if len(r)]
  return len(means) == 1 or (len(means) > 1 and float(np.ptp(means)) > _ZERO)


def step_advantages(rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Advantages of one group: A_j[i] = rewards_j[i] − baseline_j, each float64 [T_j].

  A group without spread gets zeros: nothing in it was better than the rest, and with
  γ < 1 the differences between the steps alone would push all its members alike. A
  trajectory without turns took no action: it enters no baseline and gets an empty array.
  """
  acted = [j for j, r in enumerate(rewards) if len(r)]
  result = [np.zeros(len(r)) for r in rewards]
  if has_spread(rewards):
    for j, b in zip(acted, baseline([rewards[j].mean() for j in acted])):
      result[j] = np.asarray(rewards[j], np.float64) - b
  return result


def negative_sample_control(advantages: Sequence[np.ndarray], keep: float, rng: np.random.Generator,
                            protected: Sequence[bool] | None = None) -> np.ndarray:
  """Which trajectories train: a bool mask [N]; the rest give no gradient.

  Pushing probability away from many negative samples collapses the entropy, so among
  those with a negative mean advantage a share of 1 − `keep` (rounded half up) is
  discarded, drawn by `rng`. `protected[j]` exempts trajectory j (format faults, which
  would otherwise be unlearned more slowly than they are found). Call it after
  `step_advantages`, over the whole batch: the discarded have then counted in the baselines, and
  `batch.pack` counts them in N.
  """
  if not 0 <= keep <= 1:
    raise ValueError(f"keep must be in [0, 1], not {keep}")
  mask = np.ones(len(advantages), bool)
  negative = [j for j, a in enumerate(advantages)
              if len(a) and a.mean() < -_ZERO and not (protected is not None and protected[j])]
  count = int(np.floor((1 - keep) * len(negative) + 0.5 + _ZERO))
  if count:
    mask[rng.choice(negative, size=count, replace=False)] = False
  return mask
