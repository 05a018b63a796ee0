"""What the trainer asks of a step: its tasks, its groups, and how old its tokens may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kr import types


def pick_tasks(train: Sequence[types.Task], seed: int, step: int, count: int) -> list[types.Task]:
  """The tasks of a step: a walk through seeded permutations, the same after every restart."""
  chosen = []
  for number in range((step - 1) * count, step * count):
    epoch, at = divmod(number, len(train))
    chosen.append(train[np.random.default_rng([seed, epoch]).permutation(len(train))[at]])
  return list({task.id: task for task in chosen}.values())  # a step may span two epochs


def by_group(trajectories: Iterable[types.Trajectory]) -> list[list[types.Trajectory]]:
  """Splits a step's trajectories into its groups (one step's samples of one task), in order."""
  groups: dict[tuple[int, str], list[types.Trajectory]] = {}
  for t in trajectories:
    groups.setdefault((t.meta["step_made"], t.task.id), []).append(t)
  return list(groups.values())


def versions(trajectory: types.Trajectory) -> set[int]:
  """The versions of the policy that sampled its tokens."""
  return {v for s in trajectory.segments for v, m in zip(s.versions, s.mask) if m}


def assert_on_policy(trajectories: Sequence[types.Trajectory], version: int,
                     oldest: int = 0) -> None:
  """Checks that the policy which is updated, `version`, sampled every token itself, or one that
  is at most `oldest` versions behind it did."""
  allowed = range(version - oldest, version + 1)
  for t in trajectories:
    if odd := versions(t) - set(allowed):
      raise AssertionError(f"trajectory {t.id} holds tokens of policy {sorted(odd)} in a step that "
                           f"updates policy {version} and allows {oldest} versions behind it")
