"""The agent loop: one question, many turns of thinking and acting, one trajectory.

`run` is a pure coroutine. A pause is a value (`StopReason.PAUSED`): call `run` again with the
trajectory, also in another process, and it continues from the exact token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import contextlib
import copy
import dataclasses
import time

from kr.agent import context as contexts
from kr.agent.chat import Action, Chat
from kr.agent.env import Environment, Tools
from kr.agent.policy import ContextOverflow, Policy, PolicyError, Sampled
from kr.tools.base import Toolbox
from kr.types import Segment, StopReason, Task, Trajectory, Turn

# In a row; each one means that somebody aborted the request, so trying for ever helps nobody.
_MAX_ABORTS = 32


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of one rollout, in turns and tokens (of a whole context, of one sampled turn).

  And in seconds, 0 for none: turn_s, sampling one turn; beyond it the server is at fault, for
  max_turn_tokens bounds the policy (StopReason.INFRASTRUCTURE). tool_s, one call, whose
  observation then says so. trajectory_s, all turns with their tools, not what lies between
  (StopReason.TIME_LIMIT); it is penalised as the other limits are.
  """
  max_turns: int
  max_context_tokens: int
  max_turn_tokens: int
  max_calls: int = 4
  turn_s: float = 0.0
  tool_s: float = 0.0
  trajectory_s: float = 0.0

  def __post_init__(self):
    for name, value in vars(self).items():
      if name.endswith("_s"):
        if not 0 <= value < float("inf"):
          raise ValueError(f"{name} must be a number of seconds, or 0 for no limit, not {value}")
      elif value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


async def run(task: Task, policy: Policy, toolbox: Toolbox | None, chat: Chat, limits: Limits, *,
              trajectory_id: str, sample: int = 0, resume: Trajectory | None = None,
              should_pause: Callable[[], bool] = lambda: False,
              gate: Callable[[], contextlib.AbstractAsyncContextManager] = contextlib.nullcontext,
              environment: Callable[[str], Environment] | None = None,
              context: contexts.Context | None = None,
              on_turn: Callable[[Trajectory, Turn], None] | None = None) -> Trajectory:
  """Rolls out one task until it stops, and returns the trajectory, not yet graded.

  `resume`: a paused trajectory to continue (left unchanged). `should_pause` is asked before each
  turn, and `gate` encloses its sampling: while it is held the policy must not change.
  `environment` makes what the trajectory acts in (None: `Tools` over the toolbox). `on_turn` is
  called when a turn has been read and again when its results are there. A segment never exceeds
  `limits.max_context_tokens`. The environment is closed at every end but a pause. Errors of policy
  and server become `StopReason.INFRASTRUCTURE` with `meta["error"]`; cancellation propagates.
  """
  made = environment(trajectory_id) if environment else Tools(trajectory_id, toolbox, limits.tool_s)
  trajectory = _start(task, trajectory_id, sample, resume, made)
  rollout = _Rollout(trajectory, policy, made, chat, limits, context or contexts.keep, on_turn)
  try:
    trajectory.stop = await rollout.run(should_pause, gate)
    if trajectory.stop is StopReason.PAUSED:
      trajectory.tool_state = made.snapshot()
    return trajectory
  finally:
    if trajectory.stop is not StopReason.PAUSED:
      await made.close()


def _start(task: Task, trajectory_id: str, sample: int, resume: Trajectory | None,
           environment: Environment) -> Trajectory:
  if resume is None:
    return Trajectory(id=trajectory_id, task=task, sample=sample)
  if resume.id != trajectory_id or resume.stop is not StopReason.PAUSED:
    raise ValueError(f"cannot resume trajectory {resume.id} ({resume.stop}) as {trajectory_id}: "
                     "only a paused trajectory continues, under its own id")
  trajectory = copy.deepcopy(resume)
  if trajectory.tool_state:
    environment.restore(trajectory.tool_state)
  trajectory.stop, trajectory.tool_state = None, None
  return trajectory


class _Rollout:
  """One run's collaborators; its methods are the steps of a turn."""

  def __init__(self, trajectory: Trajectory, policy: Policy, environment: Environment, chat: Chat,
               limits: Limits, context: contexts.Context,
               on_turn: Callable[[Trajectory, Turn], None] | None):
    self._trajectory = trajectory
    self._policy = policy
    self._environment = environment
    self._chat = chat
    self._limits = limits
    self._context = context
    self._on_turn = on_turn or (lambda trajectory, turn: None)
    self._aborts = 0

  async def run(self, should_pause: Callable[[], bool],
                gate: Callable[[], contextlib.AbstractAsyncContextManager]) -> StopReason:
    trajectory, limits = self._trajectory, self._limits
    if not trajectory.segments:
      prompt = self._chat.prompt(await self._environment.reset(trajectory.task))
      if len(prompt) >= limits.max_context_tokens:
        return StopReason.CONTEXT_OVERFLOW
      trajectory.segments.append(_opened(prompt))
    while True:
      if should_pause():
        return StopReason.PAUSED
      async with gate():
        turn = await self._sample()
      if isinstance(turn, StopReason):
        return turn
      if turn is None:  # Aborted: its partial tokens are dropped, and the turn is sampled again.
        self._aborts += 1
        if self._aborts > _MAX_ABORTS:
          trajectory.meta["error"] = f"the policy server aborted one turn {self._aborts} times"
          return StopReason.INFRASTRUCTURE
        await asyncio.sleep(min(1.0, 0.01 * 2 ** self._aborts))
        continue
      self._aborts = 0
      stop = await self._act(turn)
      if stop is not None:
        return stop

  async def _sample(self) -> Turn | StopReason | None:
    """Samples one turn into the open segment and reads it; None for an aborted one.

    Or why the rollout ends without it.
    """
    trajectory, limits = self._trajectory, self._limits
    segment, left_s = trajectory.segments[-1], self._left_s()
    if left_s is not None and left_s <= 0:
      return StopReason.TIME_LIMIT
    room = min(limits.max_turn_tokens, limits.max_context_tokens - len(segment))
    start_s = time.monotonic()
    try:
      async with asyncio.timeout(min(filter(None, (limits.turn_s, left_s)), default=None)) as timer:
        # The last dot: servers abort by prefix, and turn 1 must not take turn 10 with it.
        sampled = await self._policy.generate(
            list(segment.tokens), max_new_tokens=room, stop_ids=self._chat.stop_ids,
            rid=f"{trajectory.id}.{len(trajectory.turns)}.{self._aborts}.")
    except ContextOverflow as e:
      trajectory.meta["error"] = str(e)
      return StopReason.CONTEXT_OVERFLOW
    except PolicyError as e:
      trajectory.meta["error"] = str(e)
      return StopReason.INFRASTRUCTURE
    except TimeoutError:
      if not timer.expired():
        raise
      if left_s is not None and (not limits.turn_s or left_s <= limits.turn_s):
        return StopReason.TIME_LIMIT
      _count(trajectory, "turn_timeouts")
      trajectory.meta["error"] = f"sampling a turn took longer than turn_s={limits.turn_s:g}"
      return StopReason.INFRASTRUCTURE
    if sampled.finish == "abort":
      _count(trajectory, "mixed_versions" if sampled.mixed else "aborts")
      return None
    return self._append(sampled, time.monotonic() - start_s)

  def _append(self, sampled: Sampled, policy_s: float) -> Turn:
    """Appends what was sampled to the open segment, and the turn that it is read as."""
    trajectory, segment = self._trajectory, self._trajectory.segments[-1]
    start = len(segment)
    segment.append_sampled(list(sampled.ids), sampled.logprobs, sampled.version)
    action = self._read(sampled)
    turn = Turn(segment=len(trajectory.segments) - 1, start=start, stop=len(segment),
                version=sampled.version, think=action.think, calls=action.calls,
                answer=action.answer, fault=action.fault, policy_s=policy_s)
    trajectory.turns.append(turn)
    if action.fault:
      trajectory.meta["fault_detail"] = action.detail
    _count(trajectory, "prompt_tokens", sampled.prompt_tokens)
    _count(trajectory, "cached_tokens", sampled.cached_tokens)
    self._on_turn(trajectory, turn)
    return turn

  def _left_s(self) -> float | None:
    """Seconds of its own time that the trajectory has left, or None."""
    if not self._limits.trajectory_s:
      return None
    return self._limits.trajectory_s - sum(t.policy_s + t.tools_s for t in self._trajectory.turns)

  def _read(self, sampled: Sampled) -> Action:
    action = self._chat.parse(sampled.ids)
    most = self._limits.max_calls
    if len(action.calls) > most:
      return Action(action.think, fault="too_many_calls",
                    detail=f"{len(action.calls)} calls, at most {most} are allowed")
    return action

  async def _act(self, turn: Turn) -> StopReason | None:
    """Carries out a turn; why the rollout ends with it, or None when it goes on."""
    trajectory, limits = self._trajectory, self._limits
    if turn.fault is not None:
      trajectory.fault = turn.fault
      cut_by_context = turn.fault == "truncated" and turn.stop >= limits.max_context_tokens
      return StopReason.CONTEXT_OVERFLOW if cut_by_context else StopReason.INVALID_ACTION
    trajectory.answer = turn.answer
    if turn.answer is None and len(trajectory.turns) >= limits.max_turns:
      return StopReason.MAX_TURNS  # Nobody would read the results, so the tools are not called.
    start_s, left_s = time.monotonic(), self._left_s()
    try:
      async with asyncio.timeout(left_s if left_s is None else max(left_s, 0.0)) as timer:
        turn.results, reward, done, info = await self._environment.step(
            Action(turn.think, turn.calls, turn.answer))
    except TimeoutError:
      if not timer.expired():
        raise
      turn.tools_s = time.monotonic() - start_s
      return StopReason.TIME_LIMIT
    turn.tools_s = time.monotonic() - start_s if turn.calls else 0.0
    for key, count in info.items():
      _count(trajectory, key, count)
    if done:
      trajectory.correct = None if reward is None else reward > 0
      return StopReason.ANSWERED
    self._on_turn(trajectory, turn)
    if len(trajectory.turns) >= limits.max_turns:
      return StopReason.MAX_TURNS
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
