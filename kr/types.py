"""The data that flows through kr: tasks, tool calls, segments, turns, trajectories.

Everything here is plain Python and numpy, and everything survives a round trip
through JSON (`to_json`, `from_json`), because the replay buffer, the evaluation and
the viewer all read the same record.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any

import numpy as np


class StopReason(str, enum.Enum):
  """Why a rollout ended. Errors are values: a rollout never raises for these."""
  ANSWERED = "answered"
  MAX_TURNS = "max_turns"
  CONTEXT_OVERFLOW = "context_overflow"
  INVALID_ACTION = "invalid_action"
  TIME_LIMIT = "time_limit"
  PAUSED = "paused"
  INFRASTRUCTURE = "infrastructure"


# The stops that the format reward penalises: the policy's own fault.
FORMAT_FAULTS = frozenset({StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW,
                           StopReason.INVALID_ACTION, StopReason.TIME_LIMIT})


@dataclasses.dataclass(frozen=True)
class Task:
  """A question with a verifiable answer.

  `answer_type` is "number" or "text". `aliases` are further accepted spellings of a
  text answer. `target` names the entity whose value is the answer: train and held-out
  splits share none. `hops` counts the pages that must be read.
  """
  id: str
  question: str
  answer: str
  kind: str
  answer_type: str = "text"
  aliases: tuple[str, ...] = ()
  hops: int = 1
  target: str = ""
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, data: dict[str, Any]) -> "Task":
    return cls(**{**data, "aliases": tuple(data.get("aliases", ()))})


@dataclasses.dataclass(frozen=True)
class ToolCall:
  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass
class ToolResult:
  """What a tool answered, as the policy will read it.

  `ok` is False when the tool reports a failure of its own (the text says which).
  `meta` is for metrics and viewers only and never reaches the policy; the browser puts
  `{"url": ...}` there for each page it opened.
  """
  text: str
  ok: bool = True
  seconds: float = 0.0
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Segment:
  """Four equally long columns, append-only: what is there never changes.

  tokens: token ids. mask: 1 where the policy sampled the token. logprobs: behaviour
  log-probability (natural log), 0 where mask is 0. versions: policy version, -1 where
  mask is 0.
  """
  tokens: list[int] = dataclasses.field(default_factory=list)
  mask: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)

  def __len__(self) -> int:
    return len(self.tokens)

  def append_context(self, ids: list[int]) -> None:
    """Appends tokens that the policy did not sample (prompt, observation)."""
    self.tokens += ids
    self.mask += [0] * len(ids)
    self.logprobs += [0.0] * len(ids)
    self.versions += [-1] * len(ids)

  def append_sampled(self, ids: list[int], logprobs: list[float], version: int) -> None:
    """Appends tokens that the policy sampled, with their behaviour logprobs."""
    if len(ids) != len(logprobs):
      raise ValueError(f"{len(ids)} sampled ids but {len(logprobs)} logprobs")
    self.tokens += ids
    self.mask += [1] * len(ids)
    self.logprobs += [float(x) for x in logprobs]
    self.versions += [version] * len(ids)

  def arrays(self) -> dict[str, np.ndarray]:
    """The columns as int32 / float32 arrays of shape [T]."""
    return {
        "tokens": np.asarray(self.tokens, np.int32),
        "mask": np.asarray(self.mask, np.int32),
        "logprobs": np.asarray(self.logprobs, np.float32),
        "versions": np.asarray(self.versions, np.int32),
    }


@dataclasses.dataclass
class Turn:
  """One step of a trajectory: what was sampled, how it was read, what came back.

  The sampled tokens are `segments[segment].tokens[start:stop]`. `fault` names the
  format fault, if any; then `calls` and `answer` are empty.
  """
  segment: int
  start: int
  stop: int
  version: int
  think: str = ""
  calls: list[ToolCall] = dataclasses.field(default_factory=list)
  answer: str | None = None
  fault: str | None = None
  results: list[ToolResult] = dataclasses.field(default_factory=list)
  policy_s: float = 0.0
  tools_s: float = 0.0


@dataclasses.dataclass
class Trajectory:
  """One rollout of one task: append-only segments, and the turns that index them.

  `stop` is None while it runs. `correct` is None until graded; infrastructure failures
  are never graded. `tool_state` is what the toolbox needs to re-attach a paused
  trajectory's session; `meta` is free for metrics.
  """
  id: str
  task: Task
  sample: int = 0
  segments: list[Segment] = dataclasses.field(default_factory=list)
  turns: list[Turn] = dataclasses.field(default_factory=list)
  stop: StopReason | None = None
  answer: str | None = None
  fault: str | None = None
  correct: bool | None = None
  tool_state: dict[str, Any] | None = None
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def sampled_tokens(self) -> int:
    return sum(sum(s.mask) for s in self.segments)

  @property
  def pages(self) -> set[str]:
    """Distinct URLs that were opened."""
    return {r.meta["url"] for t in self.turns for r in t.results if "url" in r.meta}

  def to_json(self) -> dict[str, Any]:
    # Not dataclasses.asdict, which takes each token apart: that costs more than all else here.
    return {**vars(self), "task": self.task.to_json(), "meta": dict(self.meta),
            "segments": [{name: list(column) for name, column in vars(s).items()}
                         for s in self.segments],
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
            "stop": self.stop.value if self.stop else None}

  @classmethod
  def from_json(cls, data: dict[str, Any]) -> "Trajectory":
    data = dict(data)
    data["task"] = Task.from_json(data["task"])
    data["segments"] = [Segment(**s) for s in data["segments"]]
    data["turns"] = [
        Turn(**{**t,
                "calls": [ToolCall(**c) for c in t["calls"]],
                "results": [ToolResult(**r) for r in t["results"]]})
        for t in data["turns"]]
    data["stop"] = StopReason(data["stop"]) if data["stop"] else None
    return cls(**data)


def trajectory_id(*parts: Any) -> str:
  """A short stable id made of its parts, such as (seed, step, task id, sample)."""
  return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:16]
