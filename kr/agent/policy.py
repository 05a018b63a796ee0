"""The policy as the agent loop sees it, and the client of the inference server's HTTP contract.

The contract is SGLang's native API: `/generate` with token ids in, token ids and logprobs out.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, Sequence


@dataclasses.dataclass
class Sampled:
  """One sampled turn.

  ids, logprobs: what was sampled, the stop token included, with natural-log probabilities.
  version: the one policy version that sampled all of it. finish: "stop", "length" or "abort"; an
  aborted turn must not be used. `mixed`: aborted because several versions sampled it.
  """
  ids: list[int]
  logprobs: list[float]
  version: int
  finish: str
  prompt_tokens: int = 0
  cached_tokens: int = 0
  seconds: float = 0.0
  mixed: bool = False


class PolicyError(Exception):
  """The policy's infrastructure failed, after retries: no fault of the policy."""


class ContextOverflow(PolicyError):
  """The server refuses the prompt because it is longer than its context."""


class OffPolicyError(Exception):
  """Sampling would not follow the model's own untouched distribution."""


class Policy(Protocol):
  """What the loop needs; a scripted policy can stand in for a served one."""

  async def generate(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int],
                     rid: str, temperature: float | None = None) -> Sampled: ...
