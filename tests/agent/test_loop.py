"""The loop: tokens trained are the tokens sampled, whatever is cut, paused or aborted."""

import asyncio
import json

import pytest
from hypothesis import given, settings, strategies as st

from agent_fixtures import SPECS
from kr.agent import context as contexts
from kr.agent.chat import Chat
from kr.agent.loop import Limits, run
from kr.agent.policy import ContextOverflow, PolicyError, Sampled
from kr.tools.base import Toolbox
from kr.types import StopReason, Task, ToolCall, ToolResult, Trajectory

TASK = Task("t", "What is the population of Ayacucho?", "140033", "lookup")
LIMITS = Limits(max_turns=20, max_context_tokens=5000, max_turn_tokens=400)


class ScriptedTool:
  """Answers with the page that it was asked for; counts its calls, which is its state."""

  def __init__(self, spec, delay=None):
    self.spec = spec
    self.delay = delay
    self.calls: dict[str, int] = {}
    self.closed: list[str] = []

  async def call(self, session_id, arguments):
    if self.delay:
      await self.delay()
    self.calls[session_id] = self.calls.get(session_id, 0) + 1
    return ToolResult(f"{self.spec.name} {json.dumps(arguments)} no {self.calls[session_id]} "
                      + "words " * 8, meta={"url": f"kr://{self.calls[session_id]}"})

  async def close(self, session_id):
    self.closed.append(session_id)
    self.calls.pop(session_id, None)

  async def aclose(self):
    pass

  def snapshot(self, session_id):
    return {"calls": self.calls[session_id]} if session_id in self.calls else None

  def restore(self, session_id, state):
    self.calls[session_id] = state["calls"]


class Scripted:
  """Plays turns by the number of stop tokens in the prompt; remembers every request."""

  def __init__(self, turns, version=lambda turn: 0):
    self.turns = turns
    self.version = version
    self.played = 0
    self.requests = []
    self.returned = []

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    self.requests.append((list(ids), max_new_tokens, rid))
    item = self.turns[self.played]
    if isinstance(item, Exception):
      raise item
    if item == "abort":
      self.turns = self.turns[:self.played] + self.turns[self.played + 1:]
      return Sampled([5, 6], [], 0, "abort")
    self.played += 1
    item = item[:max_new_tokens]
    finish = "stop" if item[-1] in stop_ids else "length"
    logprobs = [-0.01 * (i + 1) - self.played for i in range(len(item))]
    self.returned.append((item, logprobs, self.version(self.played)))
    return Sampled(list(item), logprobs, self.version(self.played), finish, len(ids), len(ids) - 1)


@pytest.fixture(scope="module", params=["compact", "qwen"])
def chat(request, compact_dir, qwen_dir):
  return Chat({"compact": compact_dir, "qwen": qwen_dir}[request.param], SPECS, "s", "brief")


def play(chat, policy, *, limits=LIMITS, tools=None, **options):
  toolbox = Toolbox(tools or [ScriptedTool(s) for s in SPECS])
  options = {"trajectory_id": "tr", **options}
  return asyncio.run(run(TASK, policy, toolbox, chat, limits, **options))


def search(chat, think="look", *queries):
  return chat.turn(think, [ToolCall("search", {"queries": list(queries or ["Peru"])})])


def trained(trajectory):
  """(token, logprob, version) of all that is trained, in order."""
  return [(t, p, v) for s in trajectory.segments
          for t, m, p, v in zip(s.tokens, s.mask, s.logprobs, s.versions, strict=True) if m]


def returned(policy):
  return [(i, p, v) for ids, probs, v in policy.returned for i, p in zip(ids, probs, strict=True)]


def find(tokens, part, start):
  """Where `part` begins in `tokens`, from `start` on; ValueError if it does not."""
  for i in range(start, len(tokens) - len(part) + 1):
    if tokens[i:i + len(part)] == part:
      return i
  raise ValueError("not there")


# A turn as a policy might sample it: well-formed or junk, and often not canonical tokens.
def turns(chat):
  text = st.text("abc <>\n|1é", max_size=12)
  calls = st.lists(st.sampled_from([ToolCall("search", {"queries": ["Peru"]}),
                                    ToolCall("open", {"id": "r1"}),
                                    ToolCall("open", {"id": 9})]), min_size=1, max_size=3)
  spelled = st.builds(lambda t, c: chat.markup("<think>") + [
      i for ch in t for i in chat.encode(ch)] + chat.turn("", c)[len(chat.markup("<think>")):],
                      text, calls)
  return st.lists(spelled | st.builds(chat.turn, text, calls), min_size=1, max_size=7)


ENDS = st.sampled_from(["answer", "junk", "length"])
CONTEXTS = st.sampled_from([None, contexts.window(1), contexts.window(2), contexts.window(1, 160)])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_tokens_trained_are_the_tokens_sampled_across_cuts_and_pauses(chat, data):
  script = data.draw(turns(chat))
  end = data.draw(ENDS)
  script.append({"answer": chat.turn("so", answer="140033"), "length": chat.encode("a" * 9),
                 "junk": chat.markup("x</think><|im_end|>")}[end])
  pauses = data.draw(st.sets(st.integers(0, len(script)), max_size=3))
  aborted = data.draw(st.sets(st.integers(0, len(script) - 1), max_size=2))
  context = data.draw(CONTEXTS)
  version = lambda turn: sum(p < turn for p in pauses)

  policy = Scripted(script, version)
  whole = play(chat, policy, context=context)

  aborting = [x for i, t in enumerate(script) for x in ((["abort"] if i in aborted else []) + [t])]
  policy2 = Scripted(aborting, version)
  part, done = None, set()
  while part is None or part.stop is StopReason.PAUSED:
    tools = [ScriptedTool(s) for s in SPECS]  # Another process: state comes from the snapshot.

    def should_pause():
      due = policy2.played in pauses and policy2.played not in done
      if due:
        done.add(policy2.played)
      return due

    resume = part and Trajectory.from_json(json.loads(json.dumps(part.to_json())))
    part = play(chat, policy2, tools=tools, context=context, resume=resume,
                should_pause=should_pause)

  assert trained(whole) == returned(policy) == returned(policy2) == trained(part)
  assert whole.segments == part.segments
  assert (whole.stop, whole.answer, whole.fault) == (part.stop, part.answer, part.fault)
  for t in (whole, part):  # Every request was the exact ids so far; turns index what was sampled.
    for turn, (ids, _, v) in zip(t.turns, policy.returned, strict=True):
      assert t.segments[turn.segment].tokens[turn.start:turn.stop] == list(ids)
      assert turn.version == v
  for n, segment in enumerate(whole.segments):  # A cut keeps earlier turns token by token.
    position = 0
    for turn, (ids, _, _) in zip(whole.turns, policy.returned, strict=True):
      if turn.segment < n:
        position = find(segment.tokens, ids, position) + len(ids)
  prompts = [ids for ids, _, _ in policy.requests]
  assert prompts == [whole.segments[t.segment].tokens[:t.start] for t in whole.turns]


def test_an_answer_ends_the_rollout_and_closes_the_session(chat):
  tools = [ScriptedTool(s) for s in SPECS]
  policy = Scripted([search(chat), chat.turn("so", answer="140033")], lambda turn: 4)
  t = play(chat, policy, tools=tools, sample=3)
  assert (t.stop, t.answer, t.sample, t.id) == (StopReason.ANSWERED, "140033", 3, "tr")
  assert tools[0].closed == ["tr"] and t.tool_state is None
  assert t.segments[0].tokens == (
      chat.prompt(TASK.question) + search(chat) + chat.observation(t.turns[0].results)
      + chat.turn("so", answer="140033"))
  assert set(t.segments[0].versions) == {-1, 4} and len(t.segments) == 1
  assert t.turns[0].results[0].text.startswith('search {"queries": ["Peru"]} no 1')


def test_the_calls_of_a_turn_run_in_parallel_and_results_keep_their_order(chat):
  async def both():
    barrier = asyncio.Barrier(2)
    tools = [ScriptedTool(SPECS[0], delay=barrier.wait), ScriptedTool(SPECS[1], delay=barrier.wait)]
    script = [chat.turn("", [ToolCall("open", {"id": 1}), ToolCall("search", {"queries": []})]),
              chat.turn("", answer="5")]
    return await run(TASK, Scripted(script), Toolbox(tools, timeout_s=5), chat, LIMITS,
                     trajectory_id="tr")
  t = asyncio.run(both())
  assert [r.text.split()[0] for r in t.turns[0].results] == ["open", "search"]
  assert all(r.ok for r in t.turns[0].results)


def test_a_fault_ends_the_rollout_and_is_named(chat):
  t = play(chat, Scripted([search(chat), chat.markup("<think>a</think><|im_end|>")]))
  assert (t.stop, t.fault, t.turns[-1].fault) == (
      StopReason.INVALID_ACTION, "empty_answer", "empty_answer")
  assert t.answer is None and t.turns[-1].calls == []


def test_more_calls_than_the_limit_are_a_fault(chat):
  calls = [ToolCall("open", {"id": 1})] * 2
  limits = Limits(20, 5000, 400, max_calls=1)
  assert play(chat, Scripted([chat.turn("", calls)]), limits=limits).fault == "too_many_calls"


def test_a_turn_without_a_stop_token_is_truncated(chat):
  limits = Limits(20, 5000, max_turn_tokens=4)
  t = play(chat, Scripted([chat.turn("long thoughts", answer="5")]), limits=limits)
  assert (t.stop, t.fault) == (StopReason.INVALID_ACTION, "truncated")
  assert sum(t.segments[0].mask) == 4


def test_running_out_of_turns_calls_no_further_tool(chat):
  tools = [ScriptedTool(s) for s in SPECS]
  limits = Limits(max_turns=2, max_context_tokens=5000, max_turn_tokens=400)
  calls = []
  t = play(chat, Scripted([search(chat)] * 3), limits=limits, tools=tools,
           on_turn=lambda tr, turn: calls.append((tr.turns.index(turn), len(turn.results))))
  assert t.stop is StopReason.MAX_TURNS and len(t.turns) == 2
  assert t.turns[1].results == [] and t.turns[0].results
  assert calls[:2] == [(0, 0), (0, 1)] and len(calls) == 3


def test_the_context_limit_holds_before_anything_is_paid(chat):
  prompt = len(chat.prompt(TASK.question))
  policy = Scripted([search(chat)] * 9)
  t = play(chat, policy, limits=Limits(20, prompt, 400))
  assert t.stop is StopReason.CONTEXT_OVERFLOW and policy.requests == [] and t.turns == []

  turn = len(search(chat))
  policy = Scripted([search(chat)] * 9)
  t = play(chat, policy, limits=Limits(20, prompt + turn + 5, 400))  # No room for the observation.
  assert t.stop is StopReason.CONTEXT_OVERFLOW and len(t.segments[0]) == prompt + turn
  assert [n for _, n, _ in policy.requests] == [turn + 5]

  policy = Scripted([search(chat)] * 9)  # The turn itself is cut by the context, not by its limit.
  t = play(chat, policy, limits=Limits(20, prompt + 5, 400))
  assert (t.stop, t.fault) == (StopReason.CONTEXT_OVERFLOW, "truncated")
  assert len(t.segments[0]) == prompt + 5


@pytest.mark.parametrize("error, stop", [
    (PolicyError("server is gone"), StopReason.INFRASTRUCTURE),
    (ContextOverflow("4097 tokens is longer than 4096"), StopReason.CONTEXT_OVERFLOW)])
def test_errors_of_the_server_are_values(chat, error, stop):
  tools = [ScriptedTool(s) for s in SPECS]
  t = play(chat, Scripted([search(chat), error]), tools=tools)
  assert t.stop is stop and str(error) in t.meta["error"] and len(t.turns) == 1
  assert tools[0].closed == ["tr"]


def test_an_aborted_turn_is_sampled_again_and_its_tokens_are_dropped(chat):
  policy = Scripted(["abort", search(chat), "abort", "abort", chat.turn("", answer="5")])
  t = play(chat, policy)
  assert t.stop is StopReason.ANSWERED and t.meta["aborts"] == 3
  assert trained(t) == returned(policy)
  rids = [rid for _, _, rid in policy.requests]
  assert len(set(rids)) == 5 and not any(a != b and a.startswith(b) for a in rids for b in rids)


def test_endless_aborts_are_infrastructure(chat, monkeypatch):
  monkeypatch.setattr("kr.agent.loop._MAX_ABORTS", 2)
  t = play(chat, Scripted(["abort"] * 9))
  assert t.stop is StopReason.INFRASTRUCTURE and "aborted" in t.meta["error"]


def test_cancelling_propagates_and_closes_the_session(chat):
  async def cancelled():
    tools = [ScriptedTool(SPECS[0], delay=lambda: asyncio.sleep(60)), ScriptedTool(SPECS[1])]
    job = asyncio.create_task(run(TASK, Scripted([search(chat)]), Toolbox(tools), chat, LIMITS,
                                  trajectory_id="tr"))
    await asyncio.sleep(0.05)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    return tools[0].closed
  assert asyncio.run(cancelled()) == ["tr"]


def test_a_pause_keeps_the_session_and_leaves_its_trajectory_unchanged(chat):
  tools = [ScriptedTool(s) for s in SPECS]
  policy = Scripted([search(chat), chat.turn("", answer="5")])
  paused = play(chat, policy, tools=tools, should_pause=lambda: policy.played == 1)
  assert paused.stop is StopReason.PAUSED and tools[0].closed == []
  assert paused.tool_state == {"search": {"calls": 1}}
  before = json.dumps(paused.to_json())
  assert play(chat, policy, tools=tools, resume=paused).stop is StopReason.ANSWERED
  assert json.dumps(paused.to_json()) == before


def test_limits_below_one_are_refused():
  with pytest.raises(ValueError, match="max_turns must be at least 1, not 0"):
    Limits(0, 100, 10)


def test_only_a_paused_trajectory_continues_under_its_own_id(chat):
  done = play(chat, Scripted([chat.turn("", answer="5")]))
  with pytest.raises(ValueError, match="only a paused trajectory"):
    play(chat, Scripted([]), resume=done)
  done.stop = StopReason.PAUSED
  with pytest.raises(ValueError, match="under its own id"):
    play(chat, Scripted([]), resume=done, trajectory_id="other")
