"""Context managers rewrite what is seen, never what was sampled."""

import asyncio

import pytest

from agent_fixtures import SPECS
from kr.agent.chat import Chat
from kr.agent.context import PLACEHOLDER, keep, window
from kr.types import Segment, Task, ToolCall, ToolResult, Trajectory, Turn


@pytest.fixture(scope="module")
def chat(compact_dir):
  return Chat(compact_dir, SPECS, "s", "brief")


def history(chat, n):
  """n turns in one segment; the last one's observation is not appended yet."""
  segment = Segment()
  segment.append_context(chat.prompt("q"))
  trajectory = Trajectory("x", Task("t", "q", "a", "k"), segments=[segment])
  for i in range(n):
    ids = chat.turn(f"t{i}", [ToolCall("open", {"id": i})])
    start = len(segment)
    segment.append_sampled(ids, [0.0] * len(ids), 0)
    results = [ToolResult(f"a page of words number {i} " * 4)]
    trajectory.turns.append(Turn(0, start, len(segment), 0, results=results))
    if i < n - 1:
      segment.append_context(chat.observation(results))
  return trajectory


def test_keep_never_rewrites(chat):
  assert keep(history(chat, 3), chat) is None


def test_window_keeps_the_newest_observations_and_every_sampled_token(chat):
  trajectory = history(chat, 4)
  results = [t.results for t in trajectory.turns]
  dropped = [ToolResult(PLACEHOLDER)]
  expected = chat.prompt("q")
  for i in range(4):
    expected += chat.turn(f"t{i}", [ToolCall("open", {"id": i})])
    expected += chat.observation(results[i] if i >= 2 else dropped)
  assert window(2)(trajectory, chat) == expected


def test_window_leaves_a_short_history_alone(chat):
  assert window(2)(history(chat, 2), chat) is None
  assert window(3)(history(chat, 3), chat) is None


def test_window_waits_until_the_context_is_large(chat):
  trajectory = history(chat, 4)
  length = len(trajectory.segments[0]) + len(chat.observation(trajectory.turns[-1].results))
  assert window(1, over_tokens=length)(trajectory, chat) is None
  assert window(1, over_tokens=length - 1)(trajectory, chat) is not None


def test_window_does_not_rewrite_when_that_would_not_shorten(chat):
  assert window(1, placeholder="a long placeholder " * 50)(history(chat, 3), chat) is None


def test_a_window_of_nothing_is_refused():
  with pytest.raises(ValueError, match="at least the newest"):
    window(0)


def test_a_windowed_rollout_runs_fifty_turns_in_a_context_that_overflows_without(chat):
  from kr.agent.loop import Limits, run
  from kr.agent.policy import Sampled
  from kr.tools.base import Toolbox
  from kr.types import StopReason

  class Page:
    spec = SPECS[1]

    async def call(self, session_id, arguments):
      return ToolResult("a long page " * 20)

    async def close(self, session_id):
      pass

    aclose = close
    snapshot = restore = lambda *a: None

  class Clicks:
    def __init__(self):
      self.turn = 0

    async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
      self.turn += 1
      ids = chat.turn("", [ToolCall("open", {"id": 1})]) if self.turn < 52 else chat.turn(
          "", answer="5")
      return Sampled(ids, [-1.0] * len(ids), 0, "stop")

  def stop(context):
    return asyncio.run(run(Task("t", "q", "a", "k"), Clicks(), Toolbox([Page()]), chat,
                           Limits(60, 8000, 100), trajectory_id="x", context=context))
  assert stop(None).stop is StopReason.CONTEXT_OVERFLOW
  long = stop(window(2))
  assert long.stop is StopReason.ANSWERED and len(long.turns) == 52
  assert max(map(len, long.segments)) <= 8000
  # At the cost of a cut only when needed:
  assert len(stop(window(2, over_tokens=7000)).segments) < len(long.segments) / 3
