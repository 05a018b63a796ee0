"""Asking one question: what is shown, and what is said when it cannot be."""

import asyncio
import io
import json
import pathlib
import subprocess
import sys

import pytest

from kr import ask
from kr import wiring
from kr.agent.chat import Chat
from kr.agent.loop import Limits
from kr.agent.policy import PolicyError, Sampled
from kr.agent.tokenizer import train_tokenizer
from kr.tools.base import Toolbox, ToolSpec
from kr.types import Task, ToolCall, ToolResult

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = Limits(max_turns=3, max_context_tokens=2000, max_turn_tokens=400)


class Lookup:
  """A tool whose result tries to steer the terminal."""
  spec = ToolSpec("lookup", "", {"type": "object", "properties": {"word": {"type": "string"}},
                                 "required": ["word"]})

  async def call(self, session_id, arguments):
    return ToolResult("three \x1b]0;owned\x07 letters\nsecond line")

  async def close(self, session_id):
    pass


class Scripted:
  """Answers with the given turns, one after the other; an exception is raised."""

  def __init__(self, *turns):
    self.turns = list(turns)

  async def generate(self, ids, **_):
    turn = self.turns.pop(0)
    if isinstance(turn, Exception):
      raise turn
    return Sampled(list(turn), [-0.1] * len(turn), 0, "stop")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  train_tokenizer(["lookup word cat answer question " * 5], 400, path)
  return Chat(path, [Lookup.spec], "Research.", declare="brief")


def shown(chat, *turns, question="How long is cat?"):
  out = io.StringIO()
  asyncio.run(ask.ask(question, Scripted(*turns), Toolbox([Lookup()]), chat, LIMITS,
                      ask.Show(out)))
  return out.getvalue()


def test_thinking_calls_observations_and_answer_are_shown_in_order_and_once(chat):
  text = shown(chat, chat.turn("look it up", [ToolCall("lookup", {"word": "cat"})]),
               chat.turn("now I know", answer="3 letters"))
  parts = ["[1] look it up", '→ lookup(word="cat")', "    three ", "    second line",
           "[2] now I know", "3 letters"]
  places = [text.index(p) for p in parts]
  assert places == sorted(places)
  assert all(text.count(p) == 1 for p in parts)


def test_a_page_cannot_steer_the_terminal(chat):
  text = shown(chat, chat.turn("\x1b[2J", [ToolCall("lookup", {"word": "cat"})]),
               chat.turn("x", answer="\x1b]0;t\x07"))
  assert "\x1b" not in text and "\x07" not in text


def test_a_format_fault_is_named_instead_of_an_answer(chat):
  bad = chat.turn("hm", answer="x")[:-1]  # the stop token is missing
  text = shown(chat, bad)
  assert "no answer: its action was not valid (truncated" in text


def test_a_policy_that_never_answers_ends_with_the_reason(chat):
  turn = chat.turn("again", [ToolCall("lookup", {"word": "cat"})])
  assert "no answer: it used up its turns" in shown(chat, turn, turn, turn)


def test_a_question_that_does_not_fit_ends_with_the_reason(chat):
  assert "no answer: its context is full" in shown(chat, question="cat " * 3000)


def test_a_server_that_fails_is_the_users_to_know(chat):
  with pytest.raises(wiring.UserError, match="connection refused"):
    shown(chat, PolicyError("connection refused"))


def command(*arguments):
  done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True,
                        cwd=ROOT, timeout=60)
  assert "Traceback" not in done.stderr
  return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("module", ["kr.ask", "kr.evaluate"])
def test_a_missing_workdir_or_checkpoint_gives_one_clear_line(tmp_path, module):
  question = ["Where is Lima?"] if module == "kr.ask" else []
  code, err = command(module, f"--workdir={tmp_path}/none", *question)
  assert code == 2 and "there is no workdir" in err and len(err.splitlines()) == 1
  (tmp_path / "config.json").write_text(json.dumps(
      {"seed": 0, "eval": {"tasks": 1},
       **{name: {} for name in ("world", "agent", "tools", "server", "rollout", "rl")}}))
  (tmp_path / "tasks").mkdir()
  (tmp_path / "tasks" / "heldout.jsonl").write_text(json.dumps(Task("t", "q", "a", "k").to_json()))
  code, err = command(module, f"--workdir={tmp_path}", *question)
  assert code == 2 and "no checkpoint yet: train it first" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("question", [[], [""], ["  "]])
def test_an_empty_question_is_refused_with_an_example(tmp_path, question):
  code, err = command("kr.ask", f"--workdir={tmp_path}", *question)
  assert code == 2 and "there is no question; ask one: python -m kr.ask" in err
