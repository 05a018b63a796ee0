"""Runs an evaluation: every task, several samples each, many at once, resumable.

Each finished sample is one line of a JSONL file, so an interrupted evaluation goes on
where it stopped and the record of it is the trajectories themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
import json
import os
import pathlib
import sys
from typing import Any

import tqdm

from kr.agent import loop
from kr.types import FORMAT_FAULTS, StopReason, Task, Trajectory, trajectory_id

RETRY_WAIT_S = 0.5


class EvaluationStopped(RuntimeError):
  """The evaluation cannot go on; what is finished is kept. The text says what to do."""


class DamagedRecord(ValueError):
  """A stored line is not a trajectory. The text says which and what to do."""


def read(path: str | os.PathLike) -> list[Trajectory]:
  """The trajectories of a JSONL file, in its order; of two with one id the last counts.

  A missing file is an empty one. A torn last line (a write that was interrupted) is
  ignored. Raises DamagedRecord, with the line's number, for any other line that is not a
  trajectory.
  """
  path = pathlib.Path(path)
  found: dict[str, Trajectory] = {}
  if not path.exists():
    return []
  whole = path.read_bytes()[:_whole_bytes(path)]
  for number, line in enumerate(whole.splitlines(), 1):
    try:
      trajectory = Trajectory.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise DamagedRecord(f"{path}, line {number}: not a trajectory ({e}); "
                          "move the file away to evaluate again") from e
    found[trajectory.id] = trajectory
  return list(found.values())


async def evaluate(
    tasks: Sequence[Task], samples: int, *, policy: Any, toolbox: Any, chat: Any,
    limits: loop.Limits, grade: Callable[[Task, str], bool], concurrency: int,
    out_path: str | os.PathLike, seed: int, tag: str, retries: int = 2, progress: bool = True,
    on_progress: Callable[[int, int, Trajectory], None] | None = None,
) -> list[Trajectory]:
  """Runs `samples` rollouts of each task and returns them, task by task, graded.

  out_path: a JSONL file to which each finished sample is appended; samples that it already
  holds (same seed, tag, task and sample) are not run again, except infrastructure failures.
  tag: names what is evaluated; it must differ between two policies that share the file.
  retries: further attempts for an infrastructure failure; after them it is recorded as one.
  on_progress: called with (done, total, trajectory) for each sample that finishes.
  Raises ValueError for arguments out of range, EvaluationStopped when infrastructure fails
  for many samples in a row (the server is gone), OSError when the file cannot be written.
  """
  if samples < 1 or concurrency < 1:
    raise ValueError(f"samples and concurrency must be at least 1, got {samples}, {concurrency}")
  if len({t.id for t in tasks}) != len(tasks):
    raise ValueError("two tasks share an id")
  wanted = {trajectory_id(seed, tag, task.id, s): (task, s)
            for task in tasks for s in range(samples)}
  done = {t.id: t for t in read(out_path) if _finished(t, wanted)}
  todo = iter([(i, task, s) for i, (task, s) in wanted.items() if i not in done])
  path = pathlib.Path(out_path)
  path.parent.mkdir(parents=True, exist_ok=True)
  bar = tqdm.tqdm(total=len(wanted), initial=len(done), desc=f"evaluate {tag}", unit="sample",
                  file=sys.stderr, disable=not progress,
                  mininterval=0.2 if sys.stderr.isatty() else 10.0)
  failures = 0  # infrastructure failures in a row, over all workers

  async def work(file) -> None:
    nonlocal failures
    for id_, task, sample in todo:  # the workers share one iterator
      trajectory = await _sample(task, sample, id_, policy, toolbox, chat, limits, retries)
      _grade(trajectory, grade)
      _append(file, trajectory)
      done[id_] = trajectory
      failures = failures + 1 if trajectory.stop is StopReason.INFRASTRUCTURE else 0
      bar.set_postfix_str(_score(done), refresh=False)
      bar.update()
      if on_progress:
        on_progress(len(done), len(wanted), trajectory)
      if failures >= max(8, concurrency):
        raise EvaluationStopped(
            f"{failures} samples in a row failed for infrastructure reasons "
            f"({trajectory.meta.get('error', 'the server did not answer')}). Finished samples "
            f"are kept in {path}: the same command goes on from there.")

  with bar, path.open("ab") as file:
    file.truncate(_whole_bytes(path))  # drop a torn last line before appending to it
    await _all([work(file) for _ in range(min(concurrency, len(wanted) - len(done)))])
  return [done[id_] for id_ in wanted]


async def _all(coroutines: list) -> None:
  """Awaits all; the first failure (or cancellation) cancels the rest and is raised."""
  workers = [asyncio.ensure_future(c) for c in coroutines]
  try:
    await asyncio.gather(*workers)
  finally:
    for w in workers:
      w.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def _sample(task, sample, id_, policy, toolbox, chat, limits, retries) -> Trajectory:
  for attempt in range(retries + 1):
    if attempt:
      await asyncio.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
    trajectory = await loop.run(task, policy, toolbox, chat, limits, trajectory_id=id_,
                                sample=sample)
    if trajectory.stop is not StopReason.INFRASTRUCTURE:
      break
  return trajectory


def _grade(trajectory: Trajectory, grade: Callable[[Task, str], bool]) -> None:
  if trajectory.stop is StopReason.ANSWERED:
    trajectory.correct = bool(grade(trajectory.task, trajectory.answer or ""))
  elif trajectory.stop in FORMAT_FAULTS:
    trajectory.correct = False
  else:
    trajectory.correct = None


def _finished(t: Trajectory, wanted: dict[str, tuple[Task, int]]) -> bool:
  """Whether a stored trajectory is the result of a wanted sample of the same question."""
  if t.id not in wanted or t.stop in (None, StopReason.PAUSED, StopReason.INFRASTRUCTURE):
    return False
  task = wanted[t.id][0]
  return (t.task.question, t.task.answer, t.task.aliases) == (
      task.question, task.answer, tuple(task.aliases))


def _append(file, trajectory: Trajectory) -> None:
  line = json.dumps(trajectory.to_json(), separators=(",", ":")).encode() + b"\n"
  file.write(line)
  file.flush()  # a killed process loses no finished sample


def _whole_bytes(path: pathlib.Path) -> int:
  """The length of the file up to and including its last newline."""
  return path.read_bytes().rfind(b"\n") + 1


def _score(done: dict[str, Trajectory]) -> str:
  scored = [t for t in done.values() if t.correct is not None]
  right = sum(t.correct for t in scored)
  lost = len(done) - len(scored)
  text = f"right {right}/{len(scored)} = {right / max(1, len(scored)):.3f}"
  return text + (f", infrastructure {lost}" if lost else "")
