"""The environment of one trajectory, as reinforcement learning knows it: reset, then step.

    observation = await environment.reset(task)
    observation, reward, done, info = await environment.step(action)

Whatever a trajectory acts in has this form: `Tools` (the toolbox, the default), or your own class,
handed to `kr.agent.loop.run` as `environment=`. One object is one trajectory's; it is made with the
trajectory's id.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from kr.agent.chat import Action
from kr.tools.base import Toolbox
from kr.types import Task, ToolCall, ToolResult

# Observation, reward (None: not known, or graded elsewhere), done, info.
Step = tuple[list[ToolResult], float | None, bool, dict[str, int]]


class Environment(Protocol):
  """What the loop needs; `snapshot` and `restore` carry a paused trajectory into another process.

  reset: the first observation, the text of the user's message; not called for what is resumed.
  step: gets a well-formed action, which is calls, or an answer. The observation is one result for
  each call, as the policy will read it. When `done`, the reward is the outcome: above 0 is correct;
  None leaves it to the grader. Rewards before that are not used, for the method rewards outcomes
  alone. info: counts, added up in the trajectory's meta.
  What it raises is a bug and ends the run: its own failures are observations, with ok=False.
  """

  async def reset(self, task: Task) -> str: ...
  async def step(self, action: Action) -> Step: ...
  async def close(self) -> None: ...
  def snapshot(self) -> dict[str, Any]: ...
  def restore(self, state: dict[str, Any]) -> None: ...


class Tools:
  """The toolbox as an environment: calls run side by side, an answer ends it, not yet graded.

  tool_s: seconds that a call may take (0: as the toolbox has it); one that takes longer becomes
  an observation that says so.
  """

  def __init__(self, trajectory_id: str, toolbox: Toolbox, tool_s: float = 0.0):
    self._id, self._toolbox, self._tool_s = trajectory_id, toolbox, tool_s
    self._timeouts = 0

  async def reset(self, task: Task) -> str:
    return task.question

  async def step(self, action: Action) -> Step:
    if action.answer is not None:
      return [], None, True, {}
    self._timeouts = 0
    results = await asyncio.gather(*(self._call(call) for call in action.calls))
    return results, None, False, {"tool_timeouts": self._timeouts} if self._timeouts else {}

  async def _call(self, call: ToolCall) -> ToolResult:
    if not self._tool_s:
      return await self._toolbox.call(self._id, call)
    try:
      return await asyncio.wait_for(self._toolbox.call(self._id, call), self._tool_s)
    except TimeoutError:
      self._timeouts += 1
      return ToolResult(f"{call.name} took longer than {self._tool_s:g} s", ok=False,
                        seconds=self._tool_s)

  async def close(self) -> None:
    await self._toolbox.close(self._id)

  def snapshot(self) -> dict[str, Any]:
    return self._toolbox.snapshot(self._id)

  def restore(self, state: dict[str, Any]) -> None:
    self._toolbox.restore(self._id, state)
