"""Scripted researchers: demonstrations of mixed quality for a policy trained from scratch.

A researcher is a generator: it yields the ids of a turn and is sent the text of the
observation. `Scripted` puts one behind the interface of a policy, so that demonstrations
are trajectories of the real agent loop with the real tools. Some researchers are good;
most are not, so that reinforcement learning has something to choose from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
import json
import random
import re

from kr import types
from kr.agent import loop
from kr.agent.chat import Chat
from kr.agent.policy import Sampled
from kr.data import grade
from kr.tools.base import Toolbox
from kr.types import ToolCall

Researcher = Generator[list[int], str, None]

# Share of each habit. `direct` and `thorough` answer rightly, the second at the cost of turns that
# add nothing; the others fail in ways of which language models are fond.
HABITS = {
  "direct": 0.12,
  "thorough": 0.25,
  "guess": 0.16,
  "astray": 0.21,
  "endless": 0.1,
  "malformed": 0.16,
}

# What demonstrations say over and over: the tokenizer makes a token of each.
SCAFFOLD = [
  '{"name": "search", "arguments": {"queries": ["',
  '", "',
  '"]}}',
  '{"name": "open", "arguments": {"id": "r',
  '"}}',
  '{"name": "open", "arguments": {"id": ',
  "}}",
  '{"name": "find", "arguments": {"pattern": "',
  '{"name": "python", "arguments": {"code": "',
]


class Scripted:
  """One researcher at work on one task, with the interface of a policy."""

  def __init__(self, chat: Chat, researcher: Researcher):
    self._chat, self._researcher, self._seen = chat, researcher, None

  async def generate(
    self,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    rid: str,
    temperature: float | None = None,
  ) -> Sampled:
    if self._seen is None:
      turn = next(self._researcher)
    else:
      turn = self._researcher.send(self._chat.decode(ids[self._seen :]))
    finish = "stop" if len(turn) <= max_new_tokens else "length"
    turn = turn[:max_new_tokens]
    self._seen = len(ids) + len(turn)
    return Sampled(ids=turn, logprobs=[0.0] * len(turn), version=0, finish=finish)


class Author:
  """Writes turns for one task: knows the way, and how to leave it."""

  def __init__(self, chat: Chat, task: types.Task, rng: random.Random, decoys: Sequence[str]):
    """decoys: answers of other tasks for the same attribute, for those who guess."""
    self.chat, self.task, self.rng = chat, task, rng
    self.decoys = [d for d in decoys if d != task.answer] or ["unknown"]
    self.chains = task.meta["chains"]

  def search(self, titles: Sequence[str], think: str = "search") -> list[int]:
    return self.chat.turn(think, [ToolCall("search", {"queries": list(titles)})])

  def open(self, page: str | int, think: str = "open") -> list[int]:
    return self.chat.turn(think, [ToolCall("open", {"id": page})])

  def guess(self) -> list[int]:
    return self.chat.turn("guess", answer=self.rng.choice(self.decoys))

  def check(self, page: str | int, key: str) -> list[int]:
    """A turn that adds nothing: looks again at what was just read."""
    if self.rng.random() < 0.5:
      return self.open(page, "check") if isinstance(page, str) else self.find(key, "check")
    return self.find(key, "check")

  def find(self, key: str, think: str) -> list[int]:
    return self.chat.turn(think, [ToolCall("find", {"pattern": key + ":"})])

  def compute(self, think: str, values: Sequence[str]) -> list[int]:
    """The task's expression over the values that were read, in python."""
    names = iter("ab")
    expression = re.sub(r"\d[\d.]*", lambda m: next(names, m[0]), self.task.meta["expression"])
    code = "".join(f"{n}={v};" for n, v in zip("ab", values)) + expression.replace(" ", "")
    return self.chat.turn(think, [ToolCall("python", {"code": code})])

  def malformed(self) -> list[int]:
    """A turn with one of the faults that the strict parser names."""
    title, chat = self.chains[0][0]["title"], self.chat
    good = json.dumps({"name": "search", "arguments": {"queries": [title]}}, ensure_ascii=False)
    faults = [
      lambda: "<think>search</think>" + chat.call_markup(good[:-1]),  # not JSON
      lambda: "<think>search</think>" + chat.call_markup(good.replace("search", "lookup")),
      lambda: "<think>search</think>" + chat.call_markup(good.replace("queries", "query")),
      lambda: "<think>search</think>" + chat.call_markup(good.replace("[", "").replace("]", "")),
      lambda: "<think>search</think>" + chat.call_markup(good) + title,
      lambda: "<think>search" + chat.call_markup(good) + "</think>",
    ]
    return chat.markup(self.rng.choice(faults)() + "<|im_end|>")


def research(author: Author, habit: str) -> Researcher:
  """The turns of one researcher with the given habit (a key of HABITS)."""
  if habit == "guess":
    yield author.guess()
    return
  rng, chains = author.rng, author.chains
  titles = [chain[0]["title"] for chain in chains]
  moves = 1 + sum(map(len, chains))  # the search, then a page for each fact
  bad = rng.randrange(moves) if habit in ("astray", "malformed") else -1  # the move that goes wrong
  idle = rng.sample(range(moves), 2) if habit == "thorough" else []  # moves that are made twice
  if habit == "malformed" and bad == 0:
    yield author.malformed()
    return
  results = yield author.search(titles)
  if habit == "endless":
    for _ in range(rng.choice((1, 2, 3, 99))):  # 99: until the loop's limit stops it
      results = yield author.search(titles)
    yield author.guess()
    return
  if 0 in idle:
    results = yield author.search(titles, "check")
  move, notes, values = 0, "open", []
  for chain, title in zip(chains, titles):
    seen, page = results, result_id(results, title)
    for fact in chain:
      move += 1
      if habit == "malformed" and bad == move:
        yield author.malformed()
        return
      if habit == "astray" and move == max(bad, 1):
        there, page = page, another(rng, seen, page)
        if page == there:  # nothing else to open here, so it reads on where it should have stopped
          seen = yield author.open(page, notes)
          notes, page = "open", another(rng, seen, 0)
      seen = yield author.open(page, notes)
      if habit != "astray" and read(seen, fact["key"]) is None:
        seen = yield author.find(fact["key"], notes)  # further down than the window shows
      if move in idle:
        seen = yield author.check(page, fact["key"])
      value = read(seen, fact["key"]) or rng.choice(author.decoys)
      notes = f"{fact['key']}: {value}"
      if link := re.match(r"\[(\d+)\] (.*)", value):
        page, value = int(link[1]), link[2]
    values.append(value)
    if len(chains) > 1:
      notes += f", {'ab'[len(values) - 1]}={value}"
  if len(chains) > 1:
    seen = yield author.compute(notes, values)
    notes, value = "result", observed(seen)
  yield author.chat.turn(notes, answer=value)


def observed(text: str) -> str:
  """The first tool result in a decoded observation."""
  found = re.search(r"<tool_response>(.*?)</tool_response>", text, re.DOTALL)
  return found[1].strip() if found else ""


def result_id(text: str, title: str) -> str:
  """The id of the search result with that title; the first one's if there is none."""
  found = re.search(rf"^(r\d+) {re.escape(title)}:", text, re.MULTILINE)
  return found[1] if found else "r1"


def another(rng: random.Random, text: str, page: str | int) -> str | int:
  """Another result or link than `page` among those in the observation."""
  options = (
    re.findall(r"^(r\d+) ", text, re.MULTILINE)
    if isinstance(page, str)
    else [int(n) for n in re.findall(r"\[(\d+)\]", text)]
  )
  return rng.choice([o for o in options if o != page] or [page])


def read(text: str, key: str) -> str | None:
  """The value of a fact in an observation, with its link number if it is a link."""
  found = re.search(
    rf"(?:^|<tool_response>)(?:\d+: )?{re.escape(key)}: (.*?)(?:</tool_response>|$)",
    text,
    re.MULTILINE,
  )
  return found[1] if found else None


async def record(
  tasks: Sequence[types.Task],
  count: int,
  *,
  chat: Chat,
  toolbox: Toolbox,
  limits: loop.Limits,
  seed: int,
  concurrency: int = 32,
  on_progress: Callable[[int], None] = lambda n: None,
) -> list[types.Trajectory]:
  """Demonstrations: `count` trajectories over the tasks in turn, habits drawn from HABITS.

  Deterministic given the arguments. Those whose habit is to be right and that came out wrong
  (a page cut short) are graded like any other: `correct` says what came of it.
  """
  by_attribute: dict[str, list[str]] = {}
  for task in tasks:
    by_attribute.setdefault(task.meta["attribute"], []).append(task.answer)
  slots = asyncio.Semaphore(concurrency)

  async def one(n: int) -> types.Trajectory:
    async with slots:
      task, rng = tasks[n % len(tasks)], random.Random(f"{seed}/{n}")
      habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
      author = Author(chat, task, rng, by_attribute[task.meta["attribute"]])
      trajectory = await loop.run(
        task,
        Scripted(chat, research(author, habit)),
        toolbox,
        chat,
        limits,
        trajectory_id=types.trajectory_id("demonstration", seed, n),
      )
      trajectory.meta["habit"] = habit
      trajectory.correct = trajectory.stop == types.StopReason.ANSWERED and grade.grade(
        task, trajectory.answer
      )
      on_progress(1)
      return trajectory

  return list(await asyncio.gather(*map(one, range(count))))
