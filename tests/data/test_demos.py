"""Scripted researchers do what their habit says, through the real loop and the real tools."""

import asyncio

import pytest

from kr import types
from kr.agent import loop
from kr.agent.chat import Chat
from kr.agent.tokenizer import train_tokenizer
from kr.data import demos
from kr.data import grade
from kr.data import tasks as tasks_lib
from kr.tools.base import Toolbox
from kr.tools.browser import Browser
from kr.tools.python import Python
from kr.tools.search import Search

LIMITS = loop.Limits(max_turns=8, max_context_tokens=2000, max_turn_tokens=200, max_calls=2)


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  train_tokenizer(["Look up the population of Ayacucho.", "print(1+2)"], 512, path,
                  scaffold=demos.SCAFFOLD)
  return path


@pytest.fixture(scope="module")
def tasks(tiny_world):
  return tasks_lib.make(tiny_world, 0, n_train=60, n_heldout=4)[0]


def record(world, tasks, chat_dir, habit, count, monkeypatch):
  """`count` demonstrations of one habit over the tasks."""
  monkeypatch.setattr(demos, "HABITS", {habit: 1.0})

  async def run():
    search = Search(world.index_path, top_k=2, snippet_words=8)
    browser = Browser(world.store, search, lines=7, max_chars=600)
    toolbox = Toolbox([search, *browser.tools(), Python(wall_s=10)])
    chat = Chat(chat_dir, toolbox.specs, "Research.", declare="brief", max_calls=2)
    try:
      return await demos.record(tasks, count, chat=chat, toolbox=toolbox, limits=LIMITS, seed=0)
    finally:
      await toolbox.aclose()

  return asyncio.run(run())


def test_direct_researcher_answers_every_kind_of_task(tiny_world, tasks, chat_dir, monkeypatch):
  done = record(tiny_world, tasks, chat_dir, "direct", len(tasks), monkeypatch)
  wrong = [(t.task.question, t.answer, t.stop) for t in done if not t.correct]
  assert not wrong
  assert {t.task.kind for t in done} == set(tasks_lib.DEFAULT_MIX)
  for t in done:  # it looked: each page on the way was opened
    urls = {tiny_world.entities[title]["url"] for title in t.task.meta["entities"]
            if title in {s["title"] for c in t.task.meta["chains"] for s in c}}
    assert urls <= t.pages


def test_thorough_researcher_is_right_too_in_more_turns(tiny_world, tasks, chat_dir, monkeypatch):
  direct = record(tiny_world, tasks, chat_dir, "direct", 30, monkeypatch)
  thorough = record(tiny_world, tasks, chat_dir, "thorough", 30, monkeypatch)
  assert all(t.correct for t in thorough)
  assert all(len(a.turns) == len(b.turns) + 2 for a, b in zip(thorough, direct))


def test_guesser_opens_nothing_and_is_wrong(tiny_world, tasks, chat_dir, monkeypatch):
  done = record(tiny_world, tasks, chat_dir, "guess", 40, monkeypatch)
  assert all(len(t.turns) == 1 and not t.pages for t in done)
  assert not any(t.correct for t in done)


def test_malformed_calls_end_as_invalid_actions_of_several_kinds(
    tiny_world, tasks, chat_dir, monkeypatch):
  done = record(tiny_world, tasks, chat_dir, "malformed", 60, monkeypatch)
  assert {t.stop for t in done} == {types.StopReason.INVALID_ACTION}
  assert {t.fault for t in done} >= {
      "not_json", "unknown_tool", "unknown_argument", "wrong_type", "text_after_call",
      "call_in_think"}


def test_astray_researcher_is_mostly_wrong_but_well_formed(
    tiny_world, tasks, chat_dir, monkeypatch):
  done = record(tiny_world, tasks, chat_dir, "astray", 40, monkeypatch)
  assert sum(bool(t.correct) for t in done) < 10
  assert all(t.fault is None for t in done if t.stop is types.StopReason.ANSWERED)


def test_record_is_deterministic_and_grades_as_the_grader_does(
    tiny_world, tasks, chat_dir, monkeypatch):
  runs = [record(tiny_world, tasks, chat_dir, "thorough", 10, monkeypatch) for _ in range(2)]
  assert [t.segments for t in runs[0]] == [t.segments for t in runs[1]]
  for t in runs[0]:
    assert t.correct == grade.grade(t.task, t.answer)


def test_demonstrations_mix_habits(tiny_world, tasks, chat_dir, monkeypatch):
  share = demos.HABITS["direct"] + demos.HABITS["thorough"]
  assert sum(demos.HABITS.values()) == pytest.approx(1.0)
  assert 0.1 <= share <= 0.5  # a start must leave something to learn
