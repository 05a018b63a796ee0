"""The agent loop: one question, many turns of thinking and acting, one trajectory.

`run` is a pure coroutine. A pause is a value (`StopReason.PAUSED`): call `run` again with the
trajectory, also in another process, and it continues from the exact token ids.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from typing import Callable

from kr.agent import context as contexts
from kr.agent.chat import Action, Chat
from kr.agent.policy import ContextOverflow, Policy, PolicyError, Sampled
from kr.tools.base import Toolbox
from kr.types import Segment, StopReason, Task, Trajectory, Turn

# In a row; each one means that somebody aborted the request, so trying for ever helps nobody.
_MAX_ABORTS = 32


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of one rollout, in turns and tokens (of a whole context, of one sampled turn)."""
  max_turns: int
  max_context_tokens: int
  max_turn_tokens: int
  max_calls: int = 4

  def __post_init__(self):
    for name, value in vars(self).items():
      if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


async def run(task: Task, policy: Policy, toolbox: Toolbox, chat: Chat, limits: Limits, *,
              trajectory_id: str, sample: int = 0, resume: Trajectory | None = None,
              should_pause: Callable[[], bool] = lambda: False,
              context: contexts.Context | None = None,
              on_turn: Callable[[Trajectory, Turn], None] | None = None) -> Trajectory:
  """Rolls out one task until it stops, and returns the trajectory, not yet graded.

  `resume`: a paused trajectory to continue (left unchanged). `should_pause` is asked before each
  turn. `on_turn` is called when a turn has been read and again when its results are there.
  A segment never exceeds `limits.max_context_tokens`. The tool session is closed at every end
  but a pause. Errors of policy and server become `StopReason.INFRASTRUCTURE` with
  `meta["error"]`; cancellation propagates.
  """
  trajectory = _start(task, trajectory_id, sample, resume, toolbox)
  rollout = _Rollout(trajectory, policy, toolbox, chat, limits, context or contexts.keep, on_turn)
  try:
    trajectory.stop = await rollout.run(should_pause)
    if trajectory.stop is StopReason.PAUSED:
      trajectory.tool_state = toolbox.snapshot(trajectory.id)
    return trajectory
  finally:
    if trajectory.stop is not StopReason.PAUSED:
      await toolbox.close(trajectory.id)


def _start(task: Task, trajectory_id: str, sample: int, resume: Trajectory | None,
           toolbox: Toolbox) -> Trajectory:
  if resume is None:
    return Trajectory(id=trajectory_id, task=task, sample=sample)
  if resume.id != trajectory_id or resume.stop is not StopReason.PAUSED:
    raise ValueError(f"cannot resume trajectory {resume.id} ({resume.stop}) as {trajectory_id}: "
                     "only a paused trajectory continues, under its own id")
  trajectory = copy.deepcopy(resume)
  if trajectory.tool_state:
    toolbox.restore(trajectory.id, trajectory.tool_state)
  trajectory.stop, trajectory.tool_state = None, None
  return trajectory


class _Rollout:
  """One run's collaborators; its methods are the steps of a turn."""

  def __init__(self, trajectory: Trajectory, policy: Policy, toolbox: Toolbox, chat: Chat,
               limits: Limits, context: contexts.Context,
               on_turn: Callable[[Trajectory, Turn], None] | None):
    self._trajectory = trajectory
    self._policy = policy
    self._toolbox = toolbox
    self._chat = chat
    self._limits = limits
    self._context = context
    self._on_turn = on_turn or (lambda trajectory, turn: None)
    self._aborts = 0

  async def run(self, should_pause: Callable[[], bool]) -> StopReason:
    trajectory, limits = self._trajectory, self._limits
    if not trajectory.segments:
      prompt = self._chat.prompt(trajectory.task.question)
      if len(prompt) >= limits.max_context_tokens:
        return StopReason.CONTEXT_OVERFLOW
      trajectory.segments.append(_opened(prompt))
    while True:
      if should_pause():
        return StopReason.PAUSED
      try:
        turn, sampled = await self._sample()
      except ContextOverflow as e:
        trajectory.meta["error"] = str(e)
        return StopReason.CONTEXT_OVERFLOW
      except PolicyError as e:
        trajectory.meta["error"] = str(e)
        return StopReason.INFRASTRUCTURE
      if turn is None:  # Aborted: its partial tokens are dropped, and the turn is sampled again.
        self._aborts += 1
        if self._aborts > _MAX_ABORTS:
          trajectory.meta["error"] = f"the policy server aborted one turn {self._aborts} times"
          return StopReason.INFRASTRUCTURE
        await asyncio.sleep(min(1.0, 0.01 * 2 ** self._aborts))
        continue
      self._aborts = 0
      stop = await self._act(turn, sampled)
      if stop is not None:
        return stop

  async def _sample(self) -> tuple[Turn | None, Sampled]:
    """Samples one turn into the open segment and reads it; None for an aborted one."""
    trajectory, limits = self._trajectory, self._limits
    segment = trajectory.segments[-1]
    room = min(limits.max_turn_tokens, limits.max_context_tokens - len(segment))
    start_s = time.monotonic()
    # The last dot: servers abort by prefix, and turn 1 must not take turn 10 with it.
    sampled = await self._policy.generate(
        list(segment.tokens), max_new_tokens=room, stop_ids=self._chat.stop_ids,
        rid=f"{trajectory.id}.{len(trajectory.turns)}.{self._aborts}.")
    if sampled.finish == "abort":
      _count(trajectory, "mixed_versions" if sampled.mixed else "aborts")
      return None, sampled
    start = len(segment)
    segment.append_sampled(list(sampled.ids), sampled.logprobs, sampled.version)
    action = self._read(sampled)
    turn = Turn(segment=len(trajectory.segments) - 1, start=start, stop=len(segment),
                version=sampled.version, think=action.think, calls=action.calls,
                answer=action.answer, fault=action.fault,
                policy_s=time.monotonic() - start_s)
    trajectory.turns.append(turn)
    if action.fault:
      trajectory.meta["fault_detail"] = action.detail
    _count(trajectory, "prompt_tokens", sampled.prompt_tokens)
    _count(trajectory, "cached_tokens", sampled.cached_tokens)
    self._on_turn(trajectory, turn)
    return turn, sampled

  def _read(self, sampled: Sampled) -> Action:
    action = self._chat.parse(sampled.ids)
    most = self._limits.max_calls
    if len(action.calls) > most:
      return Action(action.think, fault="too_many_calls",
                    detail=f"{len(action.calls)} calls, at most {most} are allowed")
    return action

  async def _act(self, turn: Turn, sampled: Sampled) -> StopReason | None:
    """Carries out a turn; why the rollout ends with it, or None when it goes on."""
    trajectory, limits = self._trajectory, self._limits
    if turn.fault is not None:
      trajectory.fault = turn.fault
      cut_by_context = turn.fault == "truncated" and turn.stop >= limits.max_context_tokens
      return StopReason.CONTEXT_OVERFLOW if cut_by_context else StopReason.INVALID_ACTION
    if turn.answer is not None:
      trajectory.answer = turn.answer
      return StopReason.ANSWERED
    if len(trajectory.turns) >= limits.max_turns:
      return StopReason.MAX_TURNS  # Nobody would read the results, so the tools are not called.
    start_s = time.monotonic()
    turn.results = list(await asyncio.gather(
        *(self._toolbox.call(trajectory.id, call) for call in turn.calls)))
    turn.tools_s = time.monotonic() - start_s
    self._on_turn(trajectory, turn)
    return self._observe(turn)

  def _observe(self, turn: Turn) -> StopReason | None:
    """Appends the observation, or opens the segment that the context manager asks for."""
    trajectory = self._trajectory
    rewritten = self._context(trajectory, self._chat)
    segment = trajectory.segments[-1]
    observation = self._chat.observation(turn.results)
    length = len(segment) + len(observation) if rewritten is None else len(rewritten)
    if length >= self._limits.max_context_tokens:
      return StopReason.CONTEXT_OVERFLOW
    if rewritten is None:
      segment.append_context(observation)
    else:
      trajectory.segments.append(_opened(rewritten))
    return None


def _opened(prompt: list[int]) -> Segment:
  segment = Segment()
  segment.append_context(prompt)
  return segment


def _count(trajectory: Trajectory, key: str, amount: int = 1) -> None:
  trajectory.meta[key] = trajectory.meta.get(key, 0) + amount
