"""Examples for the first prompt of a language model that has never seen kr's tools.

A scripted researcher works on training tasks with the real tools; what it did is shown as earlier
turns of the conversation (`kr.agent.chat.Chat`, `examples`). No held-out entity is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import random

from kr import types
from kr.agent import loop
from kr.agent.chat import Chat
from kr.data import demos
from kr.data import grade
from kr.tools.base import Toolbox

_TRIED = 200  # tasks that are looked at for one that a straight researcher solves


async def record(tasks: Sequence[types.Task], count: int, openings: int = 0, *, chat: Chat,
                 toolbox: Toolbox, limits: loop.Limits) -> list[types.Trajectory]:
  """`count` correct trajectories of different attributes, in the order of `tasks`.

  `openings` more come before them, cut to the question and the first call: for a quarter of the
  tokens they show the step that small models get wrong most.
  Without thinking: notes that say little would be imitated. chat: without examples of its own.
  Deterministic. Raises ValueError when the first tasks do not give so many.
  """
  found: list[types.Trajectory] = []
  for n, task in enumerate(tasks[:_TRIED]):
    if len(found) == count + openings:
      break
    if task.meta["attribute"] in [t.task.meta["attribute"] for t in found]:
      continue
    author = demos.Author(chat, task, random.Random(n), ())
    trajectory = await loop.run(
        task, demos.Scripted(chat, demos.research(author, "direct")), toolbox, chat, limits,
        trajectory_id=types.trajectory_id("example", task.id))
    if trajectory.answer is not None and grade.grade(task, trajectory.answer):
      for turn in trajectory.turns:
        turn.think = ""
      found.append(trajectory)
  if len(found) < count + openings:
    raise ValueError(f"only {len(found)} examples for {count + openings} were found among the "
                     f"first {min(_TRIED, len(tasks))} training tasks: ask for fewer")
  for trajectory in found[count:]:
    trajectory.turns = [dataclasses.replace(trajectory.turns[0], results=[])]
  return found[count:] + found[:count]


def save(examples: Sequence[types.Trajectory], path: str | os.PathLike) -> None:
  """Writes examples as JSON lines; the file appears whole or not at all."""
  tmp = pathlib.Path(path).with_suffix(".tmp")
  tmp.write_text("".join(json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in examples),
                 "utf-8")
  os.replace(tmp, path)


def load(path: str | os.PathLike) -> list[types.Trajectory]:
  """Reads what `save` wrote. Raises ValueError when the file is missing or damaged."""
  try:
    # Not splitlines: JSON leaves U+2028 and others in the text as they are.
    lines = pathlib.Path(path).read_text("utf-8").split("\n")
    return [types.Trajectory.from_json(json.loads(line)) for line in lines if line.strip()]
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(f"{path} holds no examples ({e}): remove it and train again") from e
