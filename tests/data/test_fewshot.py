"""Examples for the first prompt: right, short, of training tasks, recorded with the real tools."""

import asyncio

import pytest

from kr.agent import loop
from kr.agent.chat import Chat
from kr.agent.tokenizer import train_tokenizer
from kr.data import fewshot
from kr.data import tasks as tasks_lib
from kr.tools.base import Toolbox
from kr.tools.browser import Browser
from kr.tools.search import Search

LIMITS = loop.Limits(max_turns=5, max_context_tokens=2000, max_turn_tokens=200, max_calls=2)


@pytest.fixture(scope="module")
def splits(tiny_world):
  return tasks_lib.make(tiny_world, 0, n_train=60, n_heldout=20, mix={"onehop": 1.0})


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  train_tokenizer(["Look up the population of Ayacucho."], 512, path)
  return path


def record(world, tasks, count, chat_dir, openings=0):
  async def run():
    search = Search(world.index_path, top_k=2, snippet_words=8)
    toolbox = Toolbox([search, *Browser(world.store, search, lines=7, max_chars=600).tools()])
    chat = Chat(chat_dir, toolbox.specs, "Research.", declare="brief", max_calls=2)
    try:
      return await fewshot.record(
          tasks, count, openings, chat=chat, toolbox=toolbox, limits=LIMITS)
    finally:
      await toolbox.aclose()

  return asyncio.run(run())


@pytest.fixture(scope="module")
def examples(tiny_world, splits, chat_dir):
  return record(tiny_world, splits[0], 3, chat_dir)


def test_examples_are_solved_training_tasks_of_different_attributes(examples, splits):
  assert [t.answer for t in examples] == [t.task.answer for t in examples]
  assert all(t.pages for t in examples)
  ids = [t.id for t in splits[0]]
  assert sorted(ids.index(t.task.id) for t in examples) == [
      ids.index(t.task.id) for t in examples]
  assert len({t.task.meta["attribute"] for t in examples}) == 3


def test_openings_come_first_and_hold_a_question_and_a_call(tiny_world, splits, chat_dir, examples):
  found = record(tiny_world, splits[0], 1, chat_dir, openings=2)
  assert [t.task.id for t in found] == [examples[i].task.id for i in (1, 2, 0)]
  for t in found[:2]:
    assert len(t.turns) == 1 and t.turns[0].calls and not t.turns[0].results
  chat = Chat(chat_dir, [], "Research.", examples=found)
  asked = [t.task.question for t in found] + ["And now?"]
  shown = chat.decode(chat.prompt("And now?"))
  assert sorted(asked, key=shown.index) == asked


def test_no_held_out_entity_is_on_the_way(examples, splits):
  heldout = {title for task in splits[1] for title in task.meta["entities"]}
  shown = {title for t in examples for title in t.task.meta["entities"]}
  assert shown and not shown & heldout


def test_recording_again_gives_the_same_and_files_keep_it(examples, tiny_world, splits, chat_dir,
                                                          tmp_path):
  again = record(tiny_world, splits[0], 3, chat_dir)
  said = lambda ts: [(u.think, u.calls, u.answer, [r.text for r in u.results])
                     for t in ts for u in t.turns]
  assert said(again) == said(examples)
  fewshot.save(examples, tmp_path / "e.jsonl")
  assert fewshot.load(tmp_path / "e.jsonl") == examples


def test_too_few_tasks_and_a_damaged_file_are_named(tiny_world, splits, chat_dir, tmp_path):
  with pytest.raises(ValueError, match="only 1 examples for 2"):
    record(tiny_world, splits[0][:1], 2, chat_dir)
  (tmp_path / "e.jsonl").write_text("{")
  with pytest.raises(ValueError, match="remove it and train again"):
    fewshot.load(tmp_path / "e.jsonl")


def test_text_with_unusual_line_ends_is_read_back(tiny_world, splits, chat_dir, tmp_path):
  examples = record(tiny_world, splits[0], 1, chat_dir)
  examples[0].answer = "a\u2028b\x85c\x1cd\n<tool_call>"
  fewshot.save(examples, tmp_path / "e.jsonl")
  assert fewshot.load(tmp_path / "e.jsonl") == examples


@pytest.mark.parametrize("text", ["3", "[]", "{}", '{"task": 3}'])
def test_a_line_that_is_no_example_is_said(text, tmp_path):
  (tmp_path / "e.jsonl").write_text(text)
  with pytest.raises(ValueError, match="holds no examples"):
    fewshot.load(tmp_path / "e.jsonl")
