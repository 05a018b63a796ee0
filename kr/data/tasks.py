"""Questions over a world whose answers are known, and that need the tools.

A task's `meta` holds all that a scripted solver needs:

    chains       one or two ways through the pages, each a list of
                 {"title", "key", "value"}: on the page `title` the fact `key` says `value`. All
                 but the last step of a chain are links: `value` is the next step's title.
    attribute    the key that is read last
    expression   the Python expression over the values read ("140033 + 99120"), or None
    entities     every title on the way, in order
    split        "train" or "heldout"

Train and held-out tasks share no entity at all: countries are split with all their cities,
and elements in runs of neighbours.
"""

from __future__ import annotations

import collections
import decimal
import json
import os
import pathlib
import random
import re
from typing import Any, Callable, Iterable

from kr import types
from kr.data import grade as grading
from kr.data.world import World

DEFAULT_MIX = {"onehop": 0.4, "twohop": 0.25, "threehop": 0.1, "comparison": 0.1,
               "arithmetic": 0.15}
HELDOUT_SHARE = 0.15
RARE_CURRENCY = 2      # countries that may share a currency that is asked for
_RUN = 6               # elements that follow one another are split together

# kind of page -> the facts that are asked for, by type of answer. What few answers share
# (continent, time zone) is not asked, since it could be guessed.
NUMBERS = {"city": ("population", "latitude", "longitude"),
           "country": ("population", "area", "calling code", "numeric code"),
           "element": ("atomic weight", "melting point", "density", "discovery year")}
TEXTS = {"city": ("country", "nearest city"),
         "country": ("capital", "currency"),
         "element": ("cas number", "next element", "previous element")}
COMPARED = {"city": ("population",), "country": ("population", "area"),
            "element": ("atomic weight", "melting point", "density")}
SUMMED = {"city": ("population",), "country": ("population", "area"), "element": ("atomic weight",)}
# Links that are followed: (kinds of page on the way, keys followed).
TWO_HOPS = (("city", ("country",)), ("city", ("nearest city",)), ("country", ("capital",)),
            ("element", ("next element",)), ("element", ("previous element",)))
THREE_HOPS = (("city", ("country", "capital")), ("city", ("country", "capital")),
              ("city", ("nearest city", "nearest city")),
              ("element", ("next element", "next element")),
              ("element", ("previous element", "previous element")))
_OF = {"next element": "the next element after {}",
       "previous element": "the previous element before {}",
       "nearest city": "the nearest city to {}"}

_ASK = ("What is {}?", "Find {}.", "Look up {}.")
_COMPARE = {
    "max": ("What is the larger {key}: that of {a} or that of {b}?",
            "Take whichever of {a} and {b} has the larger {key}. What is its {key}?"),
    "min": ("What is the smaller {key}: that of {a} or that of {b}?",
            "Take whichever of {a} and {b} has the smaller {key}. What is its {key}?")}
_ADD = ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?")
_SUBTRACT = ("What is the difference between {a} and {b}?", "How much do {a} and {b} differ?")


class _Split:
  """The entities of one side of the split, and chains through them."""

  def __init__(self, name: str, world: World, titles: set[str], rng: random.Random):
    self.name, self.world, self.titles, self.rng = name, world, titles, rng
    self.by_kind: dict[str, list[str]] = {}
    # Cities by country, so that a big country is not asked for more often than a small one.
    self.cities: dict[str, list[str]] = {}
    for title in sorted(titles):
      kind = world.entities[title]["kind"]
      self.by_kind.setdefault(kind, []).append(title)
      if kind == "city":
        self.cities.setdefault(world.entities[title]["facts"]["country"], []).append(title)
    currencies = collections.Counter(
        e["facts"]["currency"] for e in world.entities.values() if e["kind"] == "country")
    self.common = {c for c, n in currencies.items() if n > RARE_CURRENCY}

  def pick(self, kind: str) -> str | None:
    if kind == "city" and self.cities:
      return self.rng.choice(self.cities[self.rng.choice(sorted(self.cities))])
    return self.rng.choice(self.by_kind[kind]) if self.by_kind.get(kind) else None

  def chain(self, title: str | None, keys: tuple[str, ...]) -> list[dict[str, str]] | None:
    """The steps that read `keys` one after the other from `title` on; None if not askable."""
    steps: list[dict[str, str]] = []
    for i, key in enumerate(keys):
      entity = self.world.entities.get(title) if title else None
      if entity is None or title not in self.titles or "(" in title or key not in entity["facts"]:
        return None
      if title in [s["title"] for s in steps]:
        return None  # back where it was: the question would contain its answer
      value = entity["facts"][key]
      steps.append({"title": title, "key": key, "value": value})
      if i + 1 < len(keys) or key in entity["links"]:
        title = entity["links"].get(key)
        if title not in self.titles or "(" in title or title in [s["title"] for s in steps]:
          return None
    return steps if self.askable(steps[-1]) else None

  def askable(self, step: dict[str, str]) -> bool:
    """Whether a value is hard to guess: a rare text, or a number with three digits that count."""
    key, value = step["key"], step["value"]
    if key == "currency":
      return value not in self.common
    if answer_type(key) == "number":
      return len(re.sub(r"[^0-9]", "", value).strip("0")) >= 3
    return True

  def keys(self, kind: str) -> tuple[str, ...]:
    return NUMBERS[kind] + TEXTS[kind]


def answer_type(key: str) -> str:
  """The type of the answer that the fact `key` gives: "number" or "text"."""
  return "number" if any(key in keys for keys in NUMBERS.values()) else "text"


def make(
    world: World, seed: int = 0, n_train: int = 4000, n_heldout: int = 400,
    mix: dict[str, float] | None = None, on_progress: Callable[[int], None] = lambda n: None,
) -> tuple[list[types.Task], list[types.Task]]:
  """Makes train and held-out tasks, a deterministic function of the world and the arguments.

  Args:
    mix: relative weights of the kinds, by default `DEFAULT_MIX`; each kind's share is exact to one.
    on_progress: called with 1 for each task made.

  Raises ValueError for an unknown kind, or if the world is too small for so many tasks.
  """
  mix = DEFAULT_MIX if mix is None else mix
  if unknown := sorted(set(mix) - set(_MAKERS)):
    raise ValueError(f"unknown kind of task {', '.join(unknown)}: known are {', '.join(_MAKERS)}")
  if not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0:
    raise ValueError(f"the mix needs weights of at least 0, and one above 0; got {mix}")
  rng = random.Random(f"tasks/{seed}")
  train, heldout = split_titles(world, rng)
  return (_fill(_Split("train", world, train, rng), n_train, mix, on_progress),
          _fill(_Split("heldout", world, heldout, rng), n_heldout, mix, on_progress))


def split_titles(world: World, rng: random.Random) -> tuple[set[str], set[str]]:
  """Splits the entities into (train, held-out) titles: whole countries, and runs of elements.

  Hubs belong to neither: no question is about them.
  """
  countries = sorted(t for t, e in world.entities.items() if e["kind"] == "country")
  elements = sorted((t for t, e in world.entities.items() if e["kind"] == "element"),
                    key=lambda t: int(world.entities[t]["facts"]["atomic number"]))
  runs = [elements[i:i + _RUN] for i in range(0, len(elements), _RUN)]
  held = set(rng.sample(countries, max(1, round(HELDOUT_SHARE * len(countries)))))
  held |= {t for t, e in world.entities.items()
           if e["kind"] == "city" and e["facts"]["country"] in held}
  held |= {t for run in rng.sample(runs, max(1, round(HELDOUT_SHARE * len(runs)))) for t in run}
  rest = {t for t, e in world.entities.items() if e["kind"] != "hub"} - held
  return rest, held


# ---- makers: each returns a task's parts, or None when the dice fell badly --------------------


def _onehop(split: _Split) -> dict[str, Any] | None:
  kind = split.rng.choices(("city", "country", "element"), (0.6, 0.2, 0.2))[0]
  return _lookup(split, split.chain(split.pick(kind), (split.rng.choice(split.keys(kind)),)))


def _twohop(split: _Split) -> dict[str, Any] | None:
  return _follow(split, *split.rng.choice(TWO_HOPS))


def _threehop(split: _Split) -> dict[str, Any] | None:
  return _follow(split, *split.rng.choice(THREE_HOPS))


def _follow(split: _Split, kind: str, links: tuple[str, ...]) -> dict[str, Any] | None:
  """A question for a fact of the page where `links` lead from a page of `kind`."""
  last = {"country": "country", "capital": "city", "nearest city": "city"}.get(links[-1], "element")
  keys = [k for k in split.keys(last) if k not in ("country", *links)]
  return _lookup(split, split.chain(split.pick(kind), (*links, split.rng.choice(keys))))


def _lookup(split: _Split, chain: list[dict[str, str]] | None) -> dict[str, Any] | None:
  if chain is None:
    return None
  return {"question": split.rng.choice(_ASK).format(_phrase(chain)), "answer": chain[-1]["value"],
          "target": chain[-1]["title"], "chains": [chain], "expression": None}


def _pair(split: _Split, asked: dict[str, tuple[str, ...]]) -> tuple | None:
  """Two chains that read the same key of two pages of a kind, whose values differ."""
  kind = split.rng.choices(("city", "country", "element"), (0.5, 0.25, 0.25))[0]
  key = split.rng.choice(asked[kind])
  a, b = (split.chain(split.pick(kind), (key,)) for _ in range(2))
  if a is None or b is None or a[0]["value"] == b[0]["value"]:
    return None
  return key, a, b


def _comparison(split: _Split) -> dict[str, Any] | None:
  if (pair := _pair(split, COMPARED)) is None:
    return None
  key, a, b = pair
  function = split.rng.choice(("max", "min"))
  pick = max if function == "max" else min
  best = pick((a[0], b[0]), key=lambda step: decimal.Decimal(step["value"]))
  question = split.rng.choice(_COMPARE[function]).format(key=key, a=a[0]["title"], b=b[0]["title"])
  return {"question": question, "answer": best["value"], "target": best["title"], "chains": [a, b],
          "expression": f"{function}({a[0]['value']}, {b[0]['value']})"}


def _arithmetic(split: _Split) -> dict[str, Any] | None:
  if (pair := _pair(split, SUMMED)) is None:
    return None
  _, a, b = pair
  x, y = a[0]["value"], b[0]["value"]
  if split.rng.random() < 0.5:
    templates, value, expression = _ADD, decimal.Decimal(x) + decimal.Decimal(y), f"{x} + {y}"
  else:
    templates, value = _SUBTRACT, abs(decimal.Decimal(x) - decimal.Decimal(y))
    expression = f"abs({x} - {y})"
  if value < 100:
    return None
  question = split.rng.choice(templates).format(a=_phrase(a), b=_phrase(b))
  return {"question": question, "answer": str(value), "target": a[0]["title"], "chains": [a, b],
          "expression": expression if value == value.to_integral() else f"round({expression}, 4)"}


_MAKERS: dict[str, Callable[[_Split], dict[str, Any] | None]] = {
    "onehop": _onehop, "twohop": _twohop, "threehop": _threehop, "comparison": _comparison,
    "arithmetic": _arithmetic}


def _phrase(chain: list[dict[str, str]]) -> str:
  """The chain in words: "the population of the capital of Peru"."""
  words = chain[0]["title"]
  for step in chain:
    words = _OF.get(step["key"], "the " + step["key"] + " of {}").format(words)
  return words


def _fill(split: _Split, n: int, mix: dict[str, float], on_progress: Callable[[int], None]
          ) -> list[types.Task]:
  """`n` tasks with distinct questions in the shares of `mix`, in a mixed order."""
  total = sum(mix.values())
  want = {kind: int(n * weight / total) for kind, weight in mix.items()}
  for kind in sorted(mix, key=mix.get, reverse=True)[:n - sum(want.values())]:
    want[kind] += 1
  made: dict[str, types.Task] = {}
  for kind, count in want.items():
    mine = tries = 0
    while mine < count:
      tries += 1
      if tries > 200 + 60 * count:
        raise ValueError(
            f"the world is too small for {count} {split.name} tasks of the kind {kind} "
            f"({mine} found): build a larger world or ask for fewer tasks")
      parts = _MAKERS[kind](split)
      if parts and parts["question"] not in made and not _tells(parts):
        made[parts["question"]] = _task(kind, split.name, parts)
        mine += 1
        on_progress(1)
  tasks = list(made.values())
  split.rng.shuffle(tasks)
  return tasks


def _tells(parts: dict[str, Any]) -> bool:
  """Whether the question holds its answer, or nearly ("the capital of Mexico": Mexico City)."""
  question = f" {grading.normalise(parts['question'])} "
  answer = grading.normalise(parts["answer"])
  titles = [grading.normalise(chain[0]["title"]) for chain in parts["chains"]]
  return f" {answer} " in question or any(f" {t} " in f" {answer} " for t in titles)


def _task(kind: str, split: str, parts: dict[str, Any]) -> types.Task:
  chains = parts["chains"]
  entities = list(dict.fromkeys(step["title"] for chain in chains for step in chain))
  key = chains[0][-1]["key"]
  return types.Task(
      id=f"{split}-{types.trajectory_id(parts['question'])[:10]}", question=parts["question"],
      answer=parts["answer"], kind=kind, answer_type=answer_type(key), hops=len(entities),
      target=parts["target"],
      meta={"chains": chains, "attribute": key, "expression": parts["expression"],
            "entities": entities, "split": split})


# ---- how much could be guessed -------------------------------------------------------------


def guesser_share(train: list[types.Task], heldout: list[types.Task]) -> float:
  """The share of held-out tasks that a guesser without tools gets right, in [0, 1].

  For each question it has two kinds of guesses, and is right if any of them is graded right,
  which is more than a real guesser could do: the most frequent training answer for the same kind
  and attribute (ties: the smallest), and every run of up to four words of the question.
  """
  counts: dict[tuple, collections.Counter] = {}
  for task in train:
    key = task.kind, task.meta.get("attribute")
    counts.setdefault(key, collections.Counter())[task.answer] += 1
  modal = {k: min(c, key=lambda a: (-c[a], a)) for k, c in counts.items()}
  right = 0
  for task in heldout:
    words = task.question.split()
    guesses = {" ".join(words[i:i + n]) for n in range(1, 5) for i in range(len(words))}
    guesses.add(modal.get((task.kind, task.meta.get("attribute")), ""))
    right += any(grading.grade(task, guess) for guess in sorted(guesses))
  return right / len(heldout) if heldout else 0.0


# ---- files ---------------------------------------------------------------------------------


def save(tasks: Iterable[types.Task], path: str | os.PathLike) -> None:
  """Writes tasks as JSON lines; the file appears whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  tmp = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with tmp.open("w", encoding="utf-8") as f:
      f.writelines(json.dumps(task.to_json(), ensure_ascii=False) + "\n" for task in tasks)
      f.flush()
      os.fsync(f.fileno())
    os.replace(tmp, path)
  finally:
    tmp.unlink(missing_ok=True)


def load(path: str | os.PathLike) -> list[types.Task]:
  """Reads what `save` wrote. Raises ValueError naming the line that is not a task."""
  tasks = []
  with pathlib.Path(path).open(encoding="utf-8", errors="replace") as f:
    for i, line in enumerate(f, 1):
      try:
        tasks.append(types.Task.from_json(json.loads(line)))
      except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"{path}, line {i}: not a task ({e})") from e
  return tasks
