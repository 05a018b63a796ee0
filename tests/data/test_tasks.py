import collections
import re
import sqlite3

import pytest
from selectolax.lexbor import LexborHTMLParser

from kr import types
from kr.data import grade
from kr.data import tasks as tasks_lib


@pytest.fixture(scope="module")
def made(full_world):
  return tasks_lib.make(full_world, 0)


class _Reader:
  """Reads facts and links from the HTML in pages.db, knowing nothing else of the world."""

  def __init__(self, world):
    con = sqlite3.connect(world.path / "pages.db")
    rows = con.execute("SELECT url, title, html FROM pages").fetchall()
    con.close()
    self.url = {title: url for url, title, _ in rows}
    self.html = {url: text for url, _, text in rows}
    assert len(self.url) == len(rows), "a title names two pages"
    self._rows = {}

  def row(self, url, key):
    """The text and the link target (or None) of the fact `key` on the page at `url`."""
    if url not in self._rows:
      found = {}
      for tr in LexborHTMLParser(self.html[url]).css("tr"):
        th, td = tr.css("th"), tr.css("td")
        if len(th) == len(td) == 1:
          a = td[0].css_first("a")
          assert th[0].text() not in found, "a key occurs twice on a page"
          found[th[0].text()] = (td[0].text(), a.attributes["href"] if a else None)
      self._rows[url] = found
    return self._rows[url][key]

  def read(self, chain):
    """Starts at the first title, follows links only, and returns what the last key says."""
    url = self.url[chain[0]["title"]]
    for step in chain[:-1]:
      url = self.row(url, step["key"])[1]
    return self.row(url, chain[-1]["key"])[0]


def test_every_answer_is_what_the_pages_say(full_world, made):
  reader = _Reader(full_world)
  for task in made[0] + made[1]:
    values = [reader.read(chain) for chain in task.meta["chains"]]
    if task.meta["expression"] is None:
      assert values == [task.answer], task
    else:
      # The expression holds the values as read, and gives the answer.
      assert all(v in task.meta["expression"] for v in values), task
      result = eval(task.meta["expression"], {"__builtins__": {}}, {
          "abs": abs, "min": min, "max": max, "round": round})
      assert grade.grade(task, repr(result)), task
      a, b = map(float, values)
      words = task.question.lower()
      expected = (max(a, b) if "larger" in words else min(a, b) if "smaller" in words
                  else abs(a - b) if "differ" in words else a + b)
      assert float(task.answer) == pytest.approx(expected, rel=1e-9), task


def test_the_question_names_where_every_chain_starts_and_what_is_asked(made):
  for task in made[0] + made[1]:
    assert task.meta["attribute"] in task.question
    for chain in task.meta["chains"]:
      assert chain[0]["title"] in task.question


def test_steps_of_a_chain_are_joined_by_their_values(made):
  for task in made[0] + made[1]:
    for chain in task.meta["chains"]:
      for step, following in zip(chain, chain[1:]):
        assert step["value"] == following["title"]
    hops = {"onehop": 1, "threehop": 3}.get(task.kind, 2)
    assert task.hops == len(task.meta["entities"]) == hops


def test_splits_share_no_question_no_target_and_no_entity_on_the_way(full_world, made):
  train, heldout = made
  def used(tasks):
    titles = {t for task in tasks for t in task.meta["entities"]} | {task.target for task in tasks}
    titles |= {s["value"] for t in tasks for c in t.meta["chains"] for s in c
               if s["value"] in full_world.entities}
    return titles
  def countries(titles):
    entities = full_world.entities
    return {t for t in titles if entities[t]["kind"] == "country"} | {
        entities[t]["facts"]["country"] for t in titles if entities[t]["kind"] == "city"}
  assert not {t.question for t in train} & {t.question for t in heldout}
  assert not used(train) & used(heldout)
  assert not countries(used(train)) & countries(used(heldout))
  assert all(t.target in t.meta["entities"] for t in train + heldout)


def test_default_numbers_and_mix(made):
  train, heldout = made
  assert (len(train), len(heldout)) == (4000, 400)
  assert collections.Counter(t.kind for t in heldout) == {
      "onehop": 160, "twohop": 100, "threehop": 40, "comparison": 40, "arithmetic": 60}
  assert len({t.question for t in train}) == 4000
  assert len({t.id for t in train + heldout}) == 4400
  assert len({t.target for t in heldout}) > 150


def test_no_question_contains_its_answer(made):
  for task in made[0] + made[1]:
    words = f" {grade.normalise(task.question)} "
    assert f" {grade.normalise(task.answer)} " not in words, task


def test_numbers_have_three_digits_that_count(made):
  for task in made[0] + made[1]:
    if task.answer_type == "number":
      digits = re.sub(r"[^0-9]", "", task.answer)
      assert len(digits.lstrip("0")) >= 3, task


def test_asking_with_a_mix_gives_those_kinds_only(tiny_world):
  train, heldout = tasks_lib.make(tiny_world, 0, 20, 10, mix={"twohop": 3, "arithmetic": 1})
  assert collections.Counter(t.kind for t in train) == {"twohop": 15, "arithmetic": 5}
  assert collections.Counter(t.kind for t in heldout) == {"twohop": 8, "arithmetic": 2}


def test_same_seed_same_tasks_and_another_seed_others(tiny_world):
  one, again, other = (tasks_lib.make(tiny_world, seed, 40, 10) for seed in (3, 3, 4))
  assert one == again
  assert one != other


def test_wrong_mix_and_too_small_world_are_said_plainly(tiny_world):
  with pytest.raises(ValueError, match="unknown kind of task fourhop"):
    tasks_lib.make(tiny_world, 0, 4, 4, mix={"fourhop": 1})
  with pytest.raises(ValueError, match="weights"):
    tasks_lib.make(tiny_world, 0, 4, 4, mix={"onehop": 0})
  with pytest.raises(ValueError, match="too small for 5000 heldout tasks"):
    tasks_lib.make(tiny_world, 0, 4, 5000, mix={"onehop": 1})


def _task(answer, question="Which?", kind="onehop", key="capital", answer_type="text"):
  return types.Task("t", question, answer, kind, answer_type, meta={"attribute": key})


def test_guesser_gets_modal_answers_and_answers_in_the_question():
  train = [_task("Lima"), _task("Lima"), _task("Quito")]
  heldout = [
      _task("Lima"),                               # the modal answer of its kind and attribute
      _task("Quito"),                              # not the modal one
      _task("New York", "Is it New York or not"),  # in the question
      _task("Lima", key="nearest city"),           # no training answer for that attribute
  ]
  assert tasks_lib.guesser_share(train, heldout) == 0.5
  assert tasks_lib.guesser_share(train, []) == 0.0


def test_guesser_gets_next_to_nothing_of_the_default_tasks(made):
  assert tasks_lib.guesser_share(*made) < 0.02


def test_saved_tasks_load_as_they_were_and_no_temporary_file_stays(tiny_world, tmp_path):
  train, _ = tasks_lib.make(tiny_world, 0, 12, 4)
  path = tmp_path / "deep" / "train.jsonl"
  tasks_lib.save(train, path)
  assert tasks_lib.load(path) == train
  assert [p.name for p in path.parent.iterdir()] == ["train.jsonl"]


def test_failed_save_keeps_the_old_file(tmp_path):
  path = tmp_path / "t.jsonl"
  tasks_lib.save([_task("Lima")], path)
  with pytest.raises(TypeError):
    tasks_lib.save([_task(object())], path)
  assert [t.answer for t in tasks_lib.load(path)] == ["Lima"]
  assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}', "3"])
def test_a_line_that_is_no_task_is_named(tmp_path, line):
  path = tmp_path / "t.jsonl"
  tasks_lib.save([_task("Lima")], path)
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(ValueError, match="line 2: not a task"):
    tasks_lib.load(path)
