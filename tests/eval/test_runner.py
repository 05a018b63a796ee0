"""The evaluation runner: what it runs, keeps, resumes and leaves out."""

import asyncio
import json

import pytest

from kr.agent.chat import Chat
from kr.agent.loop import Limits
from kr.agent.policy import PolicyError, Sampled
from kr.agent.tokenizer import train_tokenizer
from kr.eval import runner
from kr.tools.base import Toolbox, ToolSpec
from kr.types import StopReason, Task, ToolCall, ToolResult, trajectory_id

LIMITS = Limits(max_turns=4, max_context_tokens=2000, max_turn_tokens=400)


class Lookup:
  """A tool that answers with the length of a word."""
  spec = ToolSpec("lookup", "A word's length.", {
      "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]})

  def __init__(self):
    self.closed = []

  async def call(self, session_id, arguments):
    return ToolResult(str(len(arguments["word"])), meta={"url": arguments["word"]})

  async def close(self, session_id):
    self.closed.append(session_id)

  async def aclose(self):
    pass

  def snapshot(self, session_id):
    return None

  def restore(self, session_id, state):
    pass


class Scripted:
  """A policy that looks a word up, then answers "3"; it counts what was asked of it.

  `fails` raises PolicyError that many times before it works; "bad" questions get a turn that
  is no valid action.
  """

  def __init__(self, chat, fails=0, delay_s=0.0):
    self.chat, self.fails, self.delay_s = chat, fails, delay_s
    self.rollouts, self.running, self.most = [], 0, 0

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    if self.fails:
      self.fails -= 1
      raise PolicyError("the server is away")
    self.running += 1
    self.most = max(self.most, self.running)
    await asyncio.sleep(self.delay_s)
    self.running -= 1
    text = self.chat.decode(ids)
    if "<tool_response>" in text:
      turn = self.chat.turn("done", answer="3")
    else:
      self.rollouts.append(rid[:16])  # the trajectory's id comes first
      turn = (self.chat.turn("hm", answer="")[:-1] + self.chat.stop_ids[:1] if "bad" in text else
              self.chat.turn("look", [ToolCall("lookup", {"word": "cat"})]))
    return Sampled(list(turn), [-0.5] * len(turn), 7, "stop")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  train_tokenizer(["lookup word cat answer question " * 5], 400, path)
  return Chat(path, [Lookup.spec], "Research.", declare="brief")


def task(i, question=None, answer="3"):
  return Task(f"t{i}", question or f"How long is cat {i}?", answer, "length")


def run(tasks, samples, policy, path, *, tool=None, concurrency=4, **kwargs):
  values = dict(seed=0, tag="before", progress=False, toolbox=Toolbox([tool or Lookup()]),
                grade=lambda t, answer: answer == t.answer, limits=LIMITS)
  return asyncio.run(runner.evaluate(
      tasks, samples, policy=policy, chat=policy.chat, concurrency=concurrency, out_path=path,
      **{**values, **kwargs}))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
  monkeypatch.setattr(runner, "RETRY_WAIT_S", 0.0)


def test_every_sample_of_every_task_is_run_graded_stored_and_returned_in_order(chat, tmp_path):
  tasks = [task(0), task(1, answer="4"), task(2, "a bad one")]
  tool, seen = Lookup(), []
  result = run(tasks, 2, Scripted(chat), tmp_path / "deep" / "e.jsonl", tool=tool,
               on_progress=lambda done, total, t: seen.append((done, total)))
  assert [(t.task.id, t.sample) for t in result] == [
      (f"t{i}", s) for i in range(3) for s in range(2)]
  assert [t.id for t in result] == [
      trajectory_id(0, "before", f"t{i}", s) for i in range(3) for s in range(2)]
  assert [t.correct for t in result] == [True, True, False, False, False, False]
  assert [t.stop for t in result][4:] == [StopReason.INVALID_ACTION] * 2
  assert result[0].pages == {"cat"} and len(result[0].turns) == 2
  assert seen == [(i, 6) for i in range(1, 7)]
  assert sorted(tool.closed) == sorted(t.id for t in result)
  stored = {t.id: t.to_json() for t in runner.read(tmp_path / "deep" / "e.jsonl")}
  assert stored == {t.id: t.to_json() for t in result}


def test_at_most_concurrency_rollouts_run_at_once_and_that_many_do(chat, tmp_path):
  policy = Scripted(chat, delay_s=0.005)
  run([task(i) for i in range(6)], 2, policy, tmp_path / "e.jsonl", concurrency=3)
  assert policy.most == 3


def test_finished_samples_are_never_run_again(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  first = run([task(0), task(1)], 2, Scripted(chat), path)
  policy = Scripted(chat)
  again = run([task(0), task(1)], 2, policy, path)
  assert policy.rollouts == []
  assert [t.to_json() for t in again] == [t.to_json() for t in first]
  more = run([task(0), task(1), task(2)], 3, policy, path)
  assert sorted(policy.rollouts) == sorted(
      trajectory_id(0, "before", f"t{i}", s) for i, s in ((0, 2), (1, 2), (2, 0), (2, 1), (2, 2)))
  assert len(more) == 9


def test_a_torn_last_line_costs_that_sample_alone(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  run([task(0), task(1)], 1, Scripted(chat), path)
  whole = path.read_bytes()
  path.write_bytes(whole[:-40])
  assert len(runner.read(path)) == 1
  policy = Scripted(chat)
  assert len(run([task(0), task(1)], 1, policy, path)) == 2
  assert len(policy.rollouts) == 1
  assert [json.loads(line)["task"]["id"] for line in path.read_text().splitlines()]
  assert len(runner.read(path)) == 2


def test_a_damaged_line_inside_is_named_and_not_thrown_away(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  path.write_text('{"id": "x"}\n')
  with pytest.raises(ValueError, match="e.jsonl, line 1: not a trajectory"):
    run([task(0)], 1, Scripted(chat), path)
  assert path.read_text() == '{"id": "x"}\n'


def test_another_tag_seed_or_question_is_another_sample(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  run([task(0)], 1, Scripted(chat), path)
  for changes in (dict(tag="after"), dict(seed=1)):
    policy = Scripted(chat)
    run([task(0)], 1, policy, path, **changes)
    assert len(policy.rollouts) == 1
  policy = Scripted(chat)
  assert run([task(0, "Another cat?")], 1, policy, path)[0].task.question == "Another cat?"
  assert len(policy.rollouts) == 1


def test_an_infrastructure_failure_is_retried_and_then_scores_as_usual(chat, tmp_path):
  result = run([task(0)], 1, Scripted(chat, fails=2), tmp_path / "e.jsonl", retries=2)
  assert result[0].stop is StopReason.ANSWERED and result[0].correct


def test_a_lasting_infrastructure_failure_is_no_wrong_answer_and_is_run_again_next_time(
    chat, tmp_path):
  path = tmp_path / "e.jsonl"
  result = run([task(0), task(1)], 1, Scripted(chat, fails=2), path, retries=1, concurrency=1)
  assert [t.stop for t in result] == [StopReason.INFRASTRUCTURE, StopReason.ANSWERED]
  assert result[0].correct is None
  policy = Scripted(chat)
  again = run([task(0), task(1)], 1, policy, path)
  assert policy.rollouts == [result[0].id]
  assert [t.correct for t in again] == [True, True]
  assert len(runner.read(path)) == 2


def test_a_server_that_is_gone_stops_the_evaluation_with_what_to_do(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  run([task(0)], 1, Scripted(chat), path)
  with pytest.raises(runner.EvaluationStopped, match="server is away.*same command goes on"):
    run([task(i) for i in range(40)], 1, Scripted(chat, fails=10**6), path, retries=0)
  assert [t.correct for t in runner.read(path) if t.stop is StopReason.ANSWERED] == [True]


def test_cancelling_keeps_what_is_finished_and_leaves_no_rollout_behind(chat, tmp_path):
  path = tmp_path / "e.jsonl"
  policy = Scripted(chat, delay_s=0.01)

  async def interrupted():
    enough = asyncio.Event()
    evaluation = asyncio.ensure_future(runner.evaluate(
        [task(i) for i in range(50)], 1, policy=policy, chat=chat, toolbox=Toolbox([Lookup()]),
        limits=LIMITS, grade=lambda t, a: True, concurrency=2, out_path=path, seed=0,
        tag="before", progress=False,
        on_progress=lambda done, total, t: enough.set() if done == 3 else None))
    await enough.wait()
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
      await evaluation
    assert len(asyncio.all_tasks()) == 1
  asyncio.run(interrupted())
  kept = len(runner.read(path))
  assert 3 <= kept < 50
  policy = Scripted(chat)
  run([task(i) for i in range(50)], 1, policy, path)
  assert len(policy.rollouts) == 50 - kept


@pytest.mark.parametrize("samples, concurrency", [(0, 1), (1, 0)])
def test_numbers_out_of_range_are_refused(chat, tmp_path, samples, concurrency):
  with pytest.raises(ValueError, match="at least 1"):
    run([task(0)], samples, Scripted(chat), tmp_path / "e.jsonl", concurrency=concurrency)


def test_two_tasks_with_one_id_are_refused(chat, tmp_path):
  with pytest.raises(ValueError, match="share an id"):
    run([task(0), task(0)], 1, Scripted(chat), tmp_path / "e.jsonl")
