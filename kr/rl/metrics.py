"""Numbers of a step: summed up from its trajectories, written to JSON lines and TensorBoard."""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorboardX

from kr import types


# What a console line says only where it happened: name there -> metric.
_EXCEPTIONS = {"paused": "paused", "resumed": "resumed", "stale": "stale",
               "excluded": "infrastructure", "slow turns": "turn_timeouts",
               "slow tools": "tool_timeouts", "mixed turns": "mixed_versions"}


class MetricsError(Exception):
  """metrics.jsonl cannot be read or written; the text says what to do."""


def summarize(trajectories: Sequence[types.Trajectory], rewards: Sequence[np.ndarray],
              infrastructure: int = 0) -> dict[str, float | int | None]:
  """One flat dict for a step's finished trajectories and their step rewards ([T_j] each).

  Rates are shares of `trajectories`: pass_rate (answered correctly), format_fault_rate.
  Means over them: reward (of the mean step reward; a trajectory without turns is left out),
  turns, tool_calls, pages (distinct URLs opened); turns_correct over the correct ones.
  Sums: sampled_tokens, policy_s and tools_s (seconds, added up over concurrent
  trajectories), and faults/<name>, the count of each format fault (the turn's fault, else the
  limit that was hit). `infrastructure` is passed through: those excluded are not in the list.
  A mean over nothing is None.
  """
  if len(trajectories) != len(rewards):
    raise ValueError(f"{len(trajectories)} trajectories but {len(rewards)} rewards")
  faulty = [t for t in trajectories if t.stop in types.FORMAT_FAULTS]
  correct = [t for t in trajectories if _correct(t)]
  turns = [turn for t in trajectories for turn in t.turns]
  faults = collections.Counter(t.fault or t.stop.value for t in faulty)
  return {
      "trajectories": len(trajectories),
      "reward": _mean([r.mean() for r in rewards if len(r)]),
      "pass_rate": _mean([_correct(t) for t in trajectories]),
      "format_fault_rate": _mean([t.stop in types.FORMAT_FAULTS for t in trajectories]),
      "turns": _mean([len(t.turns) for t in trajectories]),
      "turns_correct": _mean([len(t.turns) for t in correct]),
      "tool_calls": _mean([sum(len(turn.calls) for turn in t.turns) for t in trajectories]),
      "pages": _mean([len(t.pages) for t in trajectories]),
      "sampled_tokens": sum(t.sampled_tokens for t in trajectories),
      "policy_s": float(sum(turn.policy_s for turn in turns)),
      "tools_s": float(sum(turn.tools_s for turn in turns)),
      "infrastructure": infrastructure,
      **{f"faults/{name}": count for name, count in sorted(faults.items())},
  }


def staleness(trajectories: Sequence[types.Trajectory], version: int) -> dict[str, float | int]:
  """How old the trained tokens are in a step that updates policy `version`.

  stale: trajectories that hold a token of an older policy. staleness and staleness_max: mean and
  largest difference of versions, over the sampled tokens.
  """
  ages = [[version - v for s in t.segments for v, m in zip(s.versions, s.mask) if m]
          for t in trajectories]
  tokens = [age for of_one in ages for age in of_one]
  return {"stale": sum(any(of_one) for of_one in ages),
          "staleness": float(np.mean(tokens)) if tokens else 0.0,
          "staleness_max": max(tokens, default=0)}


def console_line(step: int, m: dict[str, Any]) -> str:
  """What a step did, in one line; – where a step has no trajectories to tell it of.

  Trajectories that were paused, resumed, trained with tokens of older policies, or excluded, and
  time-outs, end the line where there were any.
  """
  number = lambda key, form: "–" if m.get(key) is None else format(m[key], form)
  # Tool time is added up over concurrent trajectories: its share of their time is what counts.
  waited = m["policy_s"] + m["tools_s"]
  tools = m["rollout_s"] * m["tools_s"] / waited if waited else 0.0
  return (f"step {step:3d}  reward {number('reward', '+.3f')}  pass {number('pass_rate', '.2f')}  "
          f"faults {number('format_fault_rate', '.2f')}  turns {number('turns', '.2f')}  "
          f"entropy {number('entropy', '.3f')}  gap {number('logprob_gap', '.0e')}  "
          f"{number('tokens_per_s', '.0f')} tok/s  "
          f"rollout {m['rollout_s']:.1f} s (tools {tools:.1f})  "
          f"update {m['update_s']:.1f} s  publish {m['publish_s']:.1f} s"
          + "".join(f"  {name} {m[key]}" for name, key in _EXCEPTIONS.items() if m.get(key)))


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl, in order; a torn last line (kill -9) is left out."""
  path = _path(workdir)
  try:
    with open(path, "rb") as file:
      lines = file.read().split(b"\n")
  except FileNotFoundError:
    return []
  except OSError as e:
    raise MetricsError(f"cannot read {path}: {e.strerror}") from e
  lines, result = lines[:-1], []  # a whole line ends in a newline
  for number, line in enumerate(lines, 1):
    try:
      result.append(json.loads(line))
      int(result[-1]["step"])
    except (ValueError, TypeError, KeyError) as e:
      raise MetricsError(f"line {number} of {path} is damaged: delete that line, then start "
                         "again") from e
  return result


class MetricsWriter:
  """Appends a line a step to `workdir`/metrics.jsonl, and scalars to `workdir`/tensorboard.

  Opening it with the step of the restored checkpoint drops the lines of later steps (they
  will be written again) and what kill -9 left of a torn last one, by an atomic rewrite;
  None keeps every whole line.
  """

  def __init__(self, workdir: str | os.PathLike[str], restored_step: int | None = None):
    self._path = _path(workdir)
    kept = [line for line in read(workdir)
            if restored_step is None or line["step"] <= restored_step]
    try:
      os.makedirs(workdir, exist_ok=True)
      with open(self._path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
      os.replace(self._path + ".tmp", self._path)
      self._file = open(self._path, "a", encoding="utf-8")
      self._board = tensorboardX.SummaryWriter(
          os.path.join(workdir, "tensorboard"),
          purge_step=None if restored_step is None else restored_step + 1)
    except OSError as e:
      raise self._error(e) from e

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line {"step": step, **values}, whole before it returns.

    Numbers of numpy become plain ones, and those that are not finite become null. Finite
    numbers go to TensorBoard as well.
    """
    values = {key: _plain(value) for key, value in values.items()}
    try:
      self._file.write(json.dumps({"step": step, **values}) + "\n")
      self._file.flush()
      for key, value in values.items():
        if isinstance(value, (int, float)):
          self._board.add_scalar(key, value, step)
      self._board.flush()
    except OSError as e:
      raise self._error(e) from e

  def close(self) -> None:
    """Closes both files; a second call does nothing."""
    self._file.close()
    self._board.close()

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _error(self, e: OSError) -> MetricsError:
    return MetricsError(f"cannot write {self._path}: {e.strerror}. Free some space or choose a "
                        "workdir that can be written, then start again")


def _path(workdir: str | os.PathLike[str]) -> str:
  return os.path.join(workdir, "metrics.jsonl")


def _correct(trajectory: types.Trajectory) -> bool:
  return trajectory.stop == types.StopReason.ANSWERED and bool(trajectory.correct)


def _mean(values: Sequence[float]) -> float | None:
  return float(np.mean(values)) if len(values) else None


def _plain(value: Any) -> Any:
  if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy and jax scalars
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
