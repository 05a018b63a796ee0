"""Tokens to thinking and action, and back: the policy's view of a conversation.

Token in, token out: a prompt is encoded once, sampled ids are kept as they are, an observation
is encoded once and appended. Text from outside (question, tool results, declarations) is
encoded so that it can never become a special token.

A chat has one of two forms. Where the tokenizer has <think>, <tool_call> and their ends as tokens,
its template writes turns with them. Where it has none of them the form is plain: calls and the
answer stand between tags that are ordinary text, and results are the user's next message.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, Sequence

from tokenizers import Tokenizer

from kr.agent import parse as parsing
from kr.agent.parse import Action, Piece
from kr.agent.template import COMPACT_TEMPLATE, Template
from kr.tools.base import ToolSpec
from kr.types import ToolCall, ToolResult, Trajectory

__all__ = ["COMPACT_TEMPLATE", "Action", "Chat", "signatures"]


def signatures(specs: Sequence[ToolSpec]) -> str:
  """The tools as one line, with required arguments only: `search(queries) open(id)`."""
  return " ".join(f"{s.name}({', '.join(s.parameters.get('required', ()))})" for s in specs)


class Chat:
  """One tokenizer with its chat template, one set of tools, one system prompt.

  `declare`: "json" hands the tools' schemas to the template (in the plain form they end the system
  prompt); "brief" appends one line of signatures to the system prompt. `examples`: answered
  trajectories that every first prompt shows before the question. `stop_ids` end a turn;
  `vocab_size` bounds the ids.
  """

  def __init__(self, tokenizer_dir: str | pathlib.Path, specs: Sequence[ToolSpec], system: str,
               declare: str = "json", max_calls: int = 4, examples: Sequence[Trajectory] = ()):
    """Raises ValueError when the tokenizer has half of kr's tags or no fitting template."""
    if declare not in ("brief", "json"):
      raise ValueError(f'declare must be "brief" or "json", not {declare!r}')
    path = pathlib.Path(tokenizer_dir) / "tokenizer.json"
    if not path.exists():
      raise ValueError(f"{path} does not exist; a tokenizer directory holds tokenizer.json")
    source = path.read_text("utf-8")
    self._tokenizer = Tokenizer.from_str(source)
    self._special = _special_tokens(self._tokenizer)
    self._text = _text_tokenizer(source, self._special)
    self._specs = {spec.name: spec for spec in specs}
    self._max_calls = max_calls
    self._names = {i: s for s, i in self._special.items()}
    have = [s for s in parsing.STRUCTURE if s in self._special]
    self._plain = not have
    if missing := [s for s in parsing.STRUCTURE if s not in have and have]:
      raise ValueError(f"{missing[0]} is not a token of the tokenizer in {tokenizer_dir}; kr needs "
                       f"{' '.join(parsing.STRUCTURE)} as single tokens, or none of them")
    # Stand-ins keep spellings in foreign text apart from the template's own special tokens.
    self._stand_ins = {s: f"\ue000kr{i}\ue001" for s, i in self._special.items()}
    self._spellings = _alternatives(self._special)
    self._cuts = _alternatives([*self._special, *self._stand_ins.values()])
    self._template = Template.load(tokenizer_dir)
    self._marks = self._template.delimiters(list(self._special), tools=not self._plain)
    self._opened = "<think>" in self._marks.prefix
    eos = self._special.get(self._template.eos) if self._template.eos else None
    end = self._special[self._marks.turn_end]
    self.stop_ids: list[int] = [end] if eos in (None, end) else [end, eos]
    self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    self._tools = None if declare == "brief" or not specs else [
        {"type": "function", "function": {
            "name": s.name, "description": s.description, "parameters": s.parameters}}
        for s in specs]
    if declare == "brief":
      system = f"{system} {signatures(specs)}" if specs else system
    elif self._plain and specs:  # whose template would pass over the tools
      system = "\n".join([system, *(json.dumps(t, ensure_ascii=False) for t in self._tools)])
      self._tools = None
    self._system = system
    self._examples = [m for example in examples for m in self._messages(example)]
    self._check()

  def prompt(self, question: str) -> list[int]:
    """System prompt, declared tools, examples, question and the start of the assistant's turn."""
    return self.markup(self._template.render(
        self._guard(self._opening(question)), self._guard(self._tools)))

  def observation(self, results: Sequence[ToolResult]) -> list[int]:
    """All that stands between a sampled stop token and the next sampled token."""
    opening, between, close = self._marks.observe
    return self.markup(
        opening + between.join(self._guard(r.text) for r in results) + close)

  def turn(self, think: str, calls: Sequence[ToolCall] = (), answer: str = "") -> list[int]:
    """A well-formed assistant's turn with its stop token, as the template writes it."""
    return self.markup(self._said(think, calls, answer) + self._marks.turn_end)

  def call_markup(self, body: str) -> str:
    """The markup of a call with any body, for demonstrations (also malformed ones)."""
    before, after = self._marks.call_pad
    if self._plain:  # A tag inside the call would end it; JSON can spell it otherwise.
      for tag in parsing.PLAIN:
        body = body.replace(tag, "\\u003c" + tag[1:])
    return f"<tool_call>{before}{self._guard(body)}{after}</tool_call>"

  def markup(self, text: str) -> list[int]:
    """Encodes text whose spellings of special tokens mean these tokens.

    For templates and scripted policies; text from outside goes through `encode`.
    """
    ids: list[int] = []
    plain = ""
    originals = {v: k for k, v in self._stand_ins.items()}
    for part in self._cuts.split(text):
      if part in self._special:
        ids += self.encode(plain)
        ids.append(self._special[part])
        plain = ""
      else:
        plain += originals.get(part, part)
    return ids + self.encode(plain)

  def encode(self, text: str) -> list[int]:
    """Ids of plain text; never a special token, whatever the text spells."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return self._text.encode(text, add_special_tokens=False).ids if text else []

  def decode(self, ids: Sequence[int]) -> str:
    """The ids as text, special tokens spelled out."""
    return self._tokenizer.decode(list(ids), skip_special_tokens=False)

  def parse(self, ids: Sequence[int]) -> Action:
    """Reads a sampled turn, stop token included; strict (see parse.py)."""
    complete = bool(ids) and ids[-1] in self.stop_ids
    pieces, special = self._pieces(ids[:-1] if complete else ids), list(self._special)
    if self._plain:
      action = parsing.read_plain_turn(pieces, self._specs, self._max_calls, special)
    else:
      action = parsing.read_turn(pieces, self._specs, self._max_calls, self._opened, special)
    if not complete:
      action = Action(action.think, fault="truncated", detail="the turn has no stop token")
    return action

  def _pieces(self, ids: Sequence[int]) -> list[Piece]:
    pieces: list[Piece] = []
    run: list[int] = []
    for i in [*ids, None]:
      if i is not None and i not in self._names and i < self.vocab_size:
        run.append(i)
        continue
      if run:
        pieces += self._split(self.decode(run))
        run = []
      if i is not None:  # Ids past the tokenizer's vocabulary (padded embeddings) spell nothing.
        pieces.append(Piece(self._names.get(i, f"token {i}"), special=True))
    return pieces

  def _split(self, text: str) -> list[Piece]:
    """Ordinary text; in the plain form the tags in it count as such."""
    if not self._plain:
      return [Piece(text)]
    return [Piece(part, special=part in parsing.PLAIN)
            for part in _TAGS.split(text) if part]

  def _opening(self, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": self._system}, *self._examples,
            {"role": "user", "content": question}]

  def _messages(self, example: Trajectory) -> list[dict[str, Any]]:
    """A trajectory as the template's messages."""
    out: list[dict[str, Any]] = [{"role": "user", "content": example.task.question}]
    for turn in example.turns:
      if self._plain:
        said = self._said(turn.think, turn.calls, turn.answer or "")
        for spelling, stand_in in self._stand_ins.items():  # `prompt` guards it as all else
          said = said.replace(stand_in, spelling)
        out.append({"role": "assistant", "content": said})
        if turn.results:
          out.append({"role": "user", "content": "\n".join(r.text for r in turn.results)})
        continue
      out.append({"role": "assistant", "content": turn.answer or "",
                  "reasoning_content": turn.think, "tool_calls": [
                      {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                      for c in turn.calls]})
      out += [{"role": "tool", "name": c.name, "content": r.text}
              for c, r in zip(turn.calls, turn.results)]
    return out

  def _said(self, think: str, calls: Sequence[ToolCall], answer: str) -> str:
    """The markup of a turn without its stop token."""
    marks = self._marks
    if calls:
      body = marks.think_close + marks.call_between.join(
          self.call_markup(json.dumps({"name": c.name, "arguments": c.arguments},
                                      ensure_ascii=False)) for c in calls)
    else:
      body = marks.answer_open + self._guard(answer) + marks.answer_close
    return marks.think_open + self._guard(think) + body

  def _guard(self, value: Any) -> Any:
    """`value` (text, or JSON of it) with stand-ins for spellings of special tokens."""
    if isinstance(value, str):
      return self._spellings.sub(lambda m: self._stand_ins[m[0]], value)
    if isinstance(value, list):
      return [self._guard(v) for v in value]
    if isinstance(value, dict):
      return {self._guard(k): self._guard(v) for k, v in value.items()}
    return value

  def _check(self) -> None:
    for spelling in self._special:
      for text in (spelling, f"a{spelling} b", f"\n{spelling}{spelling}"):
        if any(i in self._names for i in self.encode(text)):
          raise ValueError(f"this tokenizer makes a special token of the plain text {spelling!r}: "
                           "a page could forge the conversation's structure")
    question = "What is 2 + 3?"
    opening = self._opening(question)
    if self._guard([opening, self._tools]) != [opening, self._tools]:
      return  # Spells special tokens: here the tokenizer's own encoding is the unsafe one.
    text = self._template.render(opening, self._tools)
    own = self._tokenizer.encode(text, add_special_tokens=False).ids
    if own != self.prompt(question):
      raise ValueError("the first prompt differs from the tokenizer's own encoding of its chat "
                       "template; kr supports tokenizers that split at special tokens exactly")


def _alternatives(spellings: Any) -> re.Pattern:
  return re.compile("(" + "|".join(
      map(re.escape, sorted(spellings, key=lambda s: (-len(s), s)))) + ")")


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
  """Spelling to id of the tokens that plain text must never produce.

  Qwen3 marks <think> and <tool_call> as added but not special, so tags count too.
  """
  return {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()
          if token.special or re.fullmatch(r"<\S+>", token.content)}


def _text_tokenizer(source: str, special: dict[str, int]) -> Tokenizer:
  """A twin of the tokenizer that reads every spelling of a special token as plain text."""
  data = json.loads(source)
  for token in data.get("added_tokens", ()):
    token["special"] = token["special"] or token["content"] in special
  tokenizer = Tokenizer.from_str(json.dumps(data))
  tokenizer.encode_special_tokens = True
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


_TAGS = _alternatives(parsing.PLAIN)
