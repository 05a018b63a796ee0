"""An environment of one's own: one class, played by the real loop, paused, graded and stored."""

import asyncio
import json

import pytest

from agent_fixtures import object_schema
from kr.agent.chat import Chat
from kr.agent.env import Tools
from kr.agent.loop import Limits, run
from kr.agent.parse import Action
from kr.agent.policy import Sampled
from kr.rl import buffer as buffers
from kr.rl import pool as pools
from kr.tools.base import Toolbox, ToolSpec
from kr.types import StopReason, Task, ToolCall, ToolResult, Trajectory

LIMITS = Limits(max_turns=12, max_context_tokens=5000, max_turn_tokens=400)
TASK = Task("t", "?", "37", "game")


class GuessTheNumber:
  """Answers each guess with higher or lower; right is 1, and a fourth wrong answer is 0."""
  spec = ToolSpec("guess", "Guesses the number.", object_schema(["n"], n={"type": "integer"}))
  made: list["GuessTheNumber"] = []

  def __init__(self, trajectory_id):
    self.id, self.guesses, self.secret, self.closed = trajectory_id, 0, None, False
    GuessTheNumber.made.append(self)

  async def reset(self, task):
    self.secret = int(task.answer)
    return "A number from 0 to 99."

  async def step(self, action):
    if action.answer is not None:
      return [], float(int(action.answer) == self.secret), True, {}
    self.guesses += len(action.calls)
    await asyncio.sleep(0)
    hints = [self.hint(call.arguments["n"]) for call in action.calls]
    if self.guesses > 9:
      return hints, 0.0, True, {"guesses": len(hints)}
    return hints, None, False, {"guesses": len(hints)}

  def hint(self, n):
    return ToolResult("it is " + ("higher" if n < self.secret else
                                  "lower" if n > self.secret else "right"))

  async def close(self):
    self.closed = True

  def snapshot(self):
    return {"secret": self.secret, "guesses": self.guesses}

  def restore(self, state):
    self.secret, self.guesses = state["secret"], state["guesses"]


class Bisecting:
  """A policy that reads nothing but the tokens of its prompt."""

  def __init__(self, chat, stubborn=False):
    self.chat, self.stubborn = chat, stubborn

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    text, low, high = self.chat.decode(ids), 0, 99
    n = (low + high) // 2
    for hint in [part.split("<")[0].split()[0] for part in text.split("it is ")[1:]]:
      low, high = (n + 1, high) if hint == "higher" else (low, n - 1)
      if hint == "right":
        turn = self.chat.turn("so", answer=str(n))
        return Sampled(turn, [-0.5] * len(turn), 0, "stop")
      n = (low + high) // 2 if not self.stubborn else 99
    turn = self.chat.turn("halve", [ToolCall("guess", {"n": n})])
    return Sampled(turn, [-0.5] * len(turn), 0, "stop")


@pytest.fixture
def chat(compact_dir):
  GuessTheNumber.made = []
  return Chat(compact_dir, [GuessTheNumber.spec], "Play.", "brief")


def play(chat, policy, **options):
  return asyncio.run(run(TASK, policy, None, chat, LIMITS, trajectory_id="f00",
                         environment=GuessTheNumber, **options))


def test_the_loop_plays_an_environment_of_ones_own_to_its_reward(chat):
  t = play(chat, Bisecting(chat))
  assert (t.stop, t.answer, t.correct) == (StopReason.ANSWERED, "37", True)
  assert t.meta["guesses"] == len(t.turns) - 1 > 2
  assert "A number from 0 to 99." in chat.decode(t.segments[0].tokens)
  assert [made.closed for made in GuessTheNumber.made] == [True]


def test_an_environment_may_end_without_an_answer_and_say_that_it_was_wrong(chat):
  t = play(chat, Bisecting(chat, stubborn=True))
  assert (t.stop, t.answer, t.correct, len(t.turns)) == (StopReason.ANSWERED, None, False, 10)


def test_a_pause_carries_the_environment_into_another_process(chat):
  asked = iter([False, False, True])
  paused = play(chat, Bisecting(chat), should_pause=lambda: next(asked))
  assert paused.stop is StopReason.PAUSED and not GuessTheNumber.made[0].closed
  assert paused.tool_state == {"secret": 37, "guesses": 2}
  resume = Trajectory.from_json(json.loads(json.dumps(paused.to_json())))
  t = play(chat, Bisecting(chat), resume=resume)
  assert t.correct and t.meta["guesses"] == GuessTheNumber.made[1].guesses
  assert t.segments == play(chat, Bisecting(chat)).segments


def test_the_pool_trains_on_an_environment_of_ones_own_and_grades_nothing_itself(chat, tmp_path):
  def act(*args, **kwargs):
    return run(*args, **kwargs, environment=GuessTheNumber)

  async def collect():
    with buffers.ReplayBuffer(tmp_path / "buffer.db") as store:
      tasks = [Task(str(n), "?", str(n), "game") for n in (3, 37, 98)]
      async with pools.Pool(lambda step: tasks, 2, pools.Pace(4), seed=0, policy=Bisecting(chat),
                            toolbox=None, chat=chat, limits=LIMITS, buffer=store, run=act,
                            grade=lambda task, answer: pytest.fail("the game knows")) as pool:
        return await pool.collect(1)

  got = asyncio.run(collect())
  assert [t.correct for t in got] == [True] * 6
  assert [t.answer for t in got] == ["3", "3", "37", "37", "98", "98"]
  assert len(GuessTheNumber.made) == 6  # one for each trajectory


def test_tools_are_an_environment_that_an_answer_ends_ungraded():
  environment = Tools("x", Toolbox([]))
  assert asyncio.run(environment.reset(TASK)) == "?"
  assert asyncio.run(environment.step(Action(answer="5"))) == ([], None, True, {})
  (result,), reward, done, info = asyncio.run(environment.step(
      Action(calls=[ToolCall("no_such", {})])))
  assert not result.ok and reward is None and not done and info == {}
