"""Grading: is this answer the task's answer? Strict, typed, and bounded in work.

A number must be the whole answer: "140,033", "140033 people." and "1.4e5" are read, "12 or 13",
"about 12" and a sentence are not. A text must equal the answer or an alias after
normalisation. So an answer that lists candidates, hedges or repeats the question loses.
"""

from __future__ import annotations

import decimal
import re
import unicodedata

from kr import types

MAX_CHARS = 200
RELATIVE_TOLERANCE = decimal.Decimal("1e-3")

_DIGITS = r"(?:[0-9]{1,3}(?P<sep>[,'_ \u00a0\u2009\u202f])[0-9]{3}(?:(?P=sep)[0-9]{3})*|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<value>[-+\u2212]?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}})?)"
    r"\s*(?P<unit>[^0-9\s.,].{0,24})?")
# An open list of units would let "12 or" and "12 million" through.
_UNITS = frozenset((
    "people", "inhabitants", "residents", "persons",
    "km", "km2", "km\u00b2", "km^2", "kilometres", "kilometers", "sq km", "square km",
    "square kilometres", "square kilometers", "k", "kelvin",
    "degrees", "\u00b0", "\u00b0n", "\u00b0s", "\u00b0e", "\u00b0w",
    "g/cm3", "g/cm\u00b3", "g/cm^3", "u", "da", "amu"))


def grade(task: types.Task, answer: str | None) -> bool:
  """True if `answer` is the answer of `task`; never raises for any answer.

  Numbers: exact if the task's answer is an integer, otherwise within 1e-3, relative.
  Answers longer than `MAX_CHARS` are wrong.
  """
  if not isinstance(answer, str) or not answer or len(answer) > MAX_CHARS:
    return False
  if task.answer_type == "number":
    return _same_number(task.answer, answer)
  if task.answer_type == "text":
    given = normalise(answer)
    return bool(given) and given in {normalise(a) for a in (task.answer, *task.aliases)}
  raise ValueError(f"task {task.id}: answer_type is {task.answer_type!r}, not 'number' or 'text'")


def number(text: str) -> decimal.Decimal | None:
  """The number that the whole of `text` is, or None. A known unit and a full stop may follow it."""
  match = _NUMBER.fullmatch(text.strip().removesuffix("."))
  if not match:
    return None
  unit = " ".join((match["unit"] or "").lower().split())
  if unit and unit not in _UNITS:
    return None
  value = match["value"].replace("\u2212", "-")
  if match["sep"]:
    value = value.replace(match["sep"], "")
  return decimal.Decimal(value)


def normalise(text: str) -> str:
  """Case, accents, punctuation, articles and spaces removed: "The Hague." becomes "hague"."""
  text = unicodedata.normalize("NFKD", text).casefold()
  text = "".join(c for c in text if not unicodedata.combining(c))
  text = re.sub(r"['\u2018\u2019`]", "", text)
  words = re.sub(r"[^\w]|_", " ", text).split()
  return " ".join(w for w in words if w not in ("a", "an", "the"))


def _same_number(expected: str, answer: str) -> bool:
  want, got = number(expected), number(answer)
  if want is None:
    raise ValueError(f"the expected answer {expected!r} is not a number")
  if got is None:
    return False
  if re.fullmatch(r"[-+]?[0-9]+", expected):
    return got == want
  return abs(got - want) <= RELATIVE_TOLERANCE * abs(want)
