"""Which version of the weights sampled which tokens, and how an answer of /generate says it."""

from __future__ import annotations

from typing import Any


class Versions:
  """Which version of the weights sampled which tokens.

  A request's spans open when the scheduler gets it, and at each update while it lives: as
  (version, number of tokens that it had by then).
  """

  def __init__(self, version: str):
    self.current = version
    self._opened: dict[str, list[tuple[str, int]]] = {}

  def begin(self, rid: str) -> None:
    self._opened[rid] = [(self.current, 0)]

  def change(self, version: str, living: dict[str, int]) -> None:
    """living: the tokens so far of each request that the scheduler has."""
    self.current = version
    for rid, count in living.items():
      self._opened.setdefault(rid, []).append((version, count))

  def spans(self, rid: str, tokens: int) -> list[dict[str, Any]]:
    """SGLang's `weight_versions` of a request that ended with so many tokens; forgets it."""
    opened = self._opened.pop(rid, [(self.current, 0)])
    ends = [start for _, start in opened[1:]] + [tokens]
    return [{"version": version, "start": start, "end": min(end, tokens)}
            for (version, start), end in zip(opened, ends) if start < min(end, tokens)]


def complete(answer: dict[str, Any], versions: Versions) -> None:
  """Adds its versions to an answer, and takes out of it what SGLang-JAX says twice.

  Every 50 tokens it sends on what a request has so far, and joins these pieces as if each were
  new: the last `completion_tokens` entries are the request's.
  """
  meta = answer["meta_info"]
  count = int(meta.get("completion_tokens") or 0)
  spans = versions.spans(meta["id"], count)
  meta["weight_versions"] = spans
  meta["weight_version"] = spans[-1]["version"] if spans else versions.current
  if entries := meta.get("output_token_logprobs"):
    meta["output_token_logprobs"] = entries[len(entries) - count:]
    answer["output_ids"] = [entry[1] for entry in meta["output_token_logprobs"]]
