"""The strict parser of sampled turns: it names each fault and repairs nothing.

A turn is `<think>…</think>`, then either tool calls or the answer's text, then the stop token.
Structure is read from special token ids alone, so text that merely looks like a tag is text.
Models without such tokens spell tags out, and their turns have a form of their own: thinking as
plain text, if any, then either tool calls or `<answer>…</answer>` (`read_plain_turn`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Mapping, Sequence

from kr.tools.base import ToolSpec, validate
from kr.types import ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
ANSWER, END_ANSWER = "<answer>", "</answer>"
STRUCTURE = (THINK, END_THINK, CALL, END_CALL)
PLAIN = (CALL, END_CALL, ANSWER, END_ANSWER)
MAX_CALL_CHARS = 16_384
MAX_DEPTH = 32

FAULTS = ("not_json", "unknown_tool", "unknown_argument", "missing_argument", "wrong_type",
          "too_many_calls", "unclosed_tag", "text_after_call", "call_in_think", "duplicate_key",
          "arguments_too_large", "empty_answer", "no_think", "truncated",
          "special_token_in_text", "text_after_answer")


@dataclasses.dataclass(frozen=True)
class Piece:
  """A special token (`special`, its spelling in `text`) or a run of ordinary text."""
  text: str
  special: bool = False

  @property
  def blank(self) -> bool:
    return not self.special and not self.text.strip()


@dataclasses.dataclass
class Action:
  """What a turn says: thinking, then calls or an answer; with a fault it has neither.

  `fault` is one of FAULTS, `detail` says more about it to a reader.
  """
  think: str = ""
  calls: list[ToolCall] = dataclasses.field(default_factory=list)
  answer: str | None = None
  fault: str | None = None
  detail: str = ""


class Fault(Exception):
  """A format fault: its fixed name and a sentence about it."""

  def __init__(self, name: str, detail: str):
    super().__init__(f"{name}: {detail}")
    self.name = name
    self.detail = detail


def read_turn(pieces: Sequence[Piece], specs: Mapping[str, ToolSpec], max_calls: int,
              think_opened: bool, look_alikes: Sequence[str]) -> Action:
  """Reads a turn without its stop token.

  `think_opened`: the generation prefix has opened the thinking already. `look_alikes`:
  spellings that an answer may not contain even as ordinary text.
  """
  action = Action()
  try:
    rest = _read_think(pieces, think_opened, action)
    if not _read_action(rest, specs, max_calls, action):
      action.answer = _read_answer(rest, look_alikes)
  except Fault as fault:
    action.fault, action.detail = fault.name, fault.detail
  return action


def read_plain_turn(pieces: Sequence[Piece], specs: Mapping[str, ToolSpec], max_calls: int,
                    look_alikes: Sequence[str]) -> Action:
  """Reads a turn whose tags are spelled out, without its stop token.

  pieces: cut at the tags in PLAIN, which count as special. The rest is as in `read_turn`.
  """
  action = Action()
  try:
    first = next((i for i, piece in enumerate(pieces) if piece.special), len(pieces))
    action.think = "".join(piece.text for piece in pieces[:first]).strip()
    rest = [piece for piece in pieces[first:] if not piece.blank]
    if not rest:
      raise Fault("empty_answer", f"neither a call nor {ANSWER}…{END_ANSWER}")
    if not _read_action(rest, specs, max_calls, action):
      action.answer = _read_answer(_inside_answer(rest), look_alikes)
  except Fault as fault:
    action.fault, action.detail = fault.name, fault.detail
  return action


def _inside_answer(pieces: Sequence[Piece]) -> Sequence[Piece]:
  tags = [piece.text for piece in pieces if piece.special]
  if tags[0] != ANSWER:
    raise Fault("special_token_in_text", f"{tags[0]} outside a call")
  if END_ANSWER not in tags:
    raise Fault("unclosed_tag", f"{ANSWER} is never closed")
  if not pieces[-1].special or pieces[-1].text != END_ANSWER:
    raise Fault("text_after_answer", f"text after {END_ANSWER}")
  return pieces[1:-1]


def _read_action(pieces: Sequence[Piece], specs: Mapping[str, ToolSpec], max_calls: int,
                 action: Action) -> bool:
  """Fills `action.calls`; whether the turn makes calls."""
  blocks = _read_calls(pieces)
  if blocks is None:
    return False
  if len(blocks) > max_calls:
    raise Fault("too_many_calls", f"{len(blocks)} calls, at most {max_calls} are allowed")
  action.calls = [read_call(block, specs) for block in blocks]
  return True


def _read_think(pieces: Sequence[Piece], opened: bool, action: Action) -> Sequence[Piece]:
  """Fills `action.think`; what follows the thinking."""
  start = 0
  if not opened:
    while start < len(pieces) and pieces[start].blank:
      start += 1
    if start == len(pieces) or not pieces[start].special or pieces[start].text != THINK:
      raise Fault("no_think", "the turn does not begin with <think>")
    start += 1
  for i in range(start, len(pieces)):
    piece = pieces[i]
    if not piece.special:
      action.think += piece.text
    elif piece.text == END_THINK:
      action.think = action.think.strip()
      return pieces[i + 1:]
    elif piece.text in (CALL, END_CALL):
      raise Fault("call_in_think", f"{piece.text} inside the thinking")
    else:
      raise Fault("special_token_in_text", f"{piece.text} inside the thinking")
  raise Fault("unclosed_tag", "<think> is never closed")


def _read_calls(pieces: Sequence[Piece]) -> list[str] | None:
  """The text inside each <tool_call>, or None when the turn makes no call."""
  pieces = [p for p in pieces if not p.blank]
  if not pieces or not pieces[0].special or pieces[0].text != CALL:
    return None
  blocks: list[str] = []
  opened = False
  text = ""
  for piece in pieces:
    if not piece.special:
      if not opened:
        raise Fault("text_after_call", "text outside the calls of a turn that makes calls")
      text += piece.text
    elif piece.text == CALL:
      if opened:
        raise Fault("unclosed_tag", "<tool_call> inside <tool_call>")
      opened, text = True, ""
    elif piece.text == END_CALL and opened:
      blocks.append(text)
      opened = False
    else:
      raise Fault("special_token_in_text", f"{piece.text} among the calls")
  if opened:
    raise Fault("unclosed_tag", "<tool_call> is never closed")
  return blocks


def _read_answer(pieces: Sequence[Piece], look_alikes: Sequence[str]) -> str:
  for piece in pieces:
    if piece.special:
      raise Fault("special_token_in_text", f"{piece.text} in the answer")
  text = "".join(p.text for p in pieces).strip()
  if not text:
    raise Fault("empty_answer", "no call, and no text after the thinking")
  for spelling in look_alikes:
    if spelling in text:
      raise Fault("special_token_in_text", f"{spelling} spelled out in the answer")
  return text


def read_call(text: str, specs: Mapping[str, ToolSpec]) -> ToolCall:
  """One call from the text between its tags. Raises Fault."""
  data = read_json(text)
  if not isinstance(data, dict):
    raise Fault("wrong_type", "a call must be a JSON object")
  for key in data:
    if key not in ("name", "arguments"):
      raise Fault("unknown_argument", f"a call has name and arguments only, not {key[:60]!r}")
  for key in ("name", "arguments"):
    if key not in data:
      raise Fault("missing_argument", f"a call needs {key!r}")
  name, arguments = data["name"], data["arguments"]
  if not isinstance(name, str):
    raise Fault("wrong_type", "a call's name must be a string")
  if name not in specs:
    raise Fault("unknown_tool", f"no tool {name[:60]!r}")
  if not isinstance(arguments, dict):
    raise Fault("wrong_type", "a call's arguments must be an object")
  if wrong := validate(arguments, specs[name].parameters):
    raise Fault(_kind(wrong), wrong)
  return ToolCall(name, arguments)


def _kind(wrong: str) -> str:
  """The fault for `validate`'s sentence; a value out of its bounds counts as a wrong type."""
  for start, fault in (("unknown argument", "unknown_argument"),
                       ("missing argument", "missing_argument"),
                       ("too long", "arguments_too_large")):
    if wrong.startswith(start):
      return fault
  return "wrong_type"


def read_json(text: str) -> Any:
  """One JSON value, strictly: no duplicate keys, no NaN, bounded size and nesting.

  Raises Fault not_json, duplicate_key or arguments_too_large.
  """
  if len(text) > MAX_CALL_CHARS:
    raise Fault("arguments_too_large", f"{len(text)} characters, at most {MAX_CALL_CHARS}")
  if _depth(text) > MAX_DEPTH:
    raise Fault("arguments_too_large", f"nested deeper than {MAX_DEPTH}")
  try:
    value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse,
                       parse_float=_finite)
    # Lone surrogates are legal escapes but no text: neither UTF-8 nor a tokenizer can hold them.
    json.dumps(value, ensure_ascii=False).encode("utf-8")
  except ValueError as e:  # JSONDecodeError, UnicodeEncodeError, an integer of too many digits.
    raise Fault("not_json", str(e)[:200]) from e
  return value


def _depth(text: str) -> int:
  depth = deepest = 0
  for token in re.findall(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', text, re.DOTALL):
    if token in ("[", "{"):
      depth += 1
      deepest = max(deepest, depth)
    elif token in ("]", "}"):
      depth -= 1
  return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  data: dict[str, Any] = {}
  for key, value in pairs:
    if key in data:
      raise Fault("duplicate_key", f"key {key[:60]!r} twice")
    data[key] = value
  return data


def _refuse(constant: str) -> None:
  raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is out of range")
  return value
