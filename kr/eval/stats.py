"""Evaluation statistics: pass@k, the bootstrap over tasks, and the table of an evaluation.

Every metric is a ratio of two sums over tasks, so that one resampling of the tasks gives
the interval of each: a per-task estimate over one for pass@k, a total over a number of
trajectories for the rest.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
import math
from typing import Any

import numpy as np

from kr.types import FORMAT_FAULTS, StopReason, Trajectory

METRICS = ("pass@1", "pass@4", "turns", "turns_correct", "tool_calls", "pages",
           "format_fault_rate")
RESAMPLES = 2000


def pass_at_k(n: int, c: int, k: int) -> float:
  """The unbiased estimate of "at least one of k samples is right": 1 − C(n−c, k) / C(n, k).

  n samples were drawn and c of them are right (Chen et al. 2021, arXiv 2107.03374, eq. 1).
  Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
  """
  if not 0 <= c <= n:
    raise ValueError(f"pass@k needs 0 <= c <= n, got n={n}, c={c}")
  if not 1 <= k <= n:
    raise ValueError(f"pass@{k} needs at least {k} samples a task and k >= 1, got n={n}")
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def resampled_counts(tasks: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
  """How often each task is drawn in each bootstrap resample: float64 [resamples, tasks]."""
  rng = np.random.default_rng(seed)
  return rng.multinomial(tasks, np.full(tasks, 1.0 / tasks), size=resamples).astype(np.float64)


def interval(
    numerator: np.ndarray, denominator: np.ndarray, counts: np.ndarray
) -> dict[str, float | None]:
  """The ratio Σ numerator / Σ denominator and its 95 % percentile bootstrap over tasks.

  numerator, denominator: [tasks]; counts: [resamples, tasks] from `resampled_counts`.
  Resamples with an empty denominator are left out. All three values are None where the
  metric has no data (as the turns of correct trajectories when none is correct).
  """
  if not denominator.sum():
    return {"mean": None, "low": None, "high": None}
  top, bottom = counts @ numerator, counts @ denominator  # [resamples] each
  ratios = top[bottom > 0] / bottom[bottom > 0]
  low, high = np.percentile(ratios, [2.5, 97.5])
  return {"mean": float(numerator.sum() / denominator.sum()),
          "low": float(low), "high": float(high)}


def bootstrap(values: Iterable[float], resamples: int = RESAMPLES, seed: int = 0
              ) -> dict[str, float | None]:
  """The mean of one value a task, with its 95 % bootstrap interval over the tasks."""
  values = np.asarray(list(values), np.float64)
  if not values.size:
    return {"mean": None, "low": None, "high": None}
  return interval(values, np.ones_like(values), resampled_counts(len(values), resamples, seed))


def table(
    trajectories_by_task: Mapping[str, list[Trajectory]], *, resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
  """The table of one evaluation.

  For each name in METRICS: {"mean", "low", "high"}, None where there is no data. Turns,
  tool calls, pages and faults are means over trajectories; `turns_correct` over the correct
  ones. pass@k leaves out tasks with fewer than k scored samples. Infrastructure failures
  are left out of everything and counted in "infrastructure". Besides: "tasks" and
  "trajectories" (scored ones), "stops" and "faults" (counts by name), and "by_kind" and
  "by_hops", which map a kind or a number of hops (as text) to the same metrics and counts.
  Raises ValueError for a trajectory that has not ended or was not graded.
  """
  tasks = [_scored(ts) for ts in trajectories_by_task.values()]
  scored = [ts for ts in tasks if ts]
  flat = [t for ts in scored for t in ts]
  result = _metrics(scored, resamples, seed)
  result["infrastructure"] = sum(len(ts) for ts in trajectories_by_task.values()) - len(flat)
  result["stops"] = dict(collections.Counter(t.stop.value for t in flat))
  result["faults"] = dict(collections.Counter(
      t.fault or t.stop.value for t in flat if t.stop in FORMAT_FAULTS))
  result["by_kind"] = _grouped(scored, lambda t: t.task.kind, resamples, seed)
  result["by_hops"] = _grouped(scored, lambda t: t.task.hops, resamples, seed)
  return result


def by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
  """Trajectories grouped by their task's id, in the order of first appearance."""
  groups: dict[str, list[Trajectory]] = {}
  for t in trajectories:
    groups.setdefault(t.task.id, []).append(t)
  return groups


def _scored(trajectories: list[Trajectory]) -> list[Trajectory]:
  for t in trajectories:
    if t.stop is None or t.stop is StopReason.PAUSED:
      raise ValueError(f"trajectory {t.id} of task {t.task.id} has not ended")
    if t.correct is None and t.stop is not StopReason.INFRASTRUCTURE:
      raise ValueError(f"trajectory {t.id} of task {t.task.id} was not graded")
  return [t for t in trajectories if t.stop is not StopReason.INFRASTRUCTURE]


def _grouped(scored: list[list[Trajectory]], key: Callable[[Trajectory], Any], resamples: int,
             seed: int) -> dict[str, Any]:
  groups: dict[Any, list[list[Trajectory]]] = {}
  for ts in scored:
    groups.setdefault(key(ts[0]), []).append(ts)
  return {str(k): _metrics(groups[k], resamples, seed) for k in sorted(groups)}


def _metrics(scored: list[list[Trajectory]], resamples: int, seed: int) -> dict[str, Any]:
  """METRICS with intervals over `scored`, the non-empty list of trajectories of each task."""
  counts = resampled_counts(len(scored), resamples, seed) if scored else np.zeros((1, 0))
  n = np.array([len(ts) for ts in scored], np.float64)
  c = np.array([sum(bool(t.correct) for t in ts) for ts in scored], np.float64)

  def total(value: Callable[[Trajectory], float]) -> np.ndarray:  # [tasks]
    return np.array([sum(value(t) for t in ts) for ts in scored], np.float64)

  def passes(k: int) -> dict[str, float | None]:
    enough = n >= k
    estimates = [pass_at_k(int(ni), int(ci), k) if ok else 0.0
                 for ni, ci, ok in zip(n, c, enough)]
    return interval(np.array(estimates), enough.astype(np.float64), counts)

  return {
      "pass@1": passes(1),
      "pass@4": passes(4),
      "turns": interval(total(lambda t: len(t.turns)), n, counts),
      "turns_correct": interval(total(lambda t: len(t.turns) if t.correct else 0), c, counts),
      "tool_calls": interval(total(lambda t: sum(len(s.calls) for s in t.turns)), n, counts),
      "pages": interval(total(lambda t: len(t.pages)), n, counts),
      "format_fault_rate": interval(total(lambda t: t.stop in FORMAT_FAULTS), n, counts),
      "tasks": len(scored),
      "trajectories": int(n.sum()),
  }
