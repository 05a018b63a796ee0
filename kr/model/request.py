"""What a request may ask of the engine, what comes back, and both as the JSON of `/generate`.

The contract is SGLang's native API. What this server does not do is refused by name,
never ignored: a setting without effect would be a silent change of the distribution.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
import uuid


@dataclasses.dataclass(frozen=True)
class Request:
  """What to sample. ids: the prompt. seed None: the engine draws one.

  top_k <= 0, top_p 1 and min_p 0 switch these off; temperature 0 is greedy.
  score_from >= 0: also return the logprobs of ids[score_from + 1:].
  """
  rid: str
  ids: list[int]
  max_new_tokens: int = 128
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = -1
  min_p: float = 0.0
  seed: int | None = None
  stop_ids: frozenset[int] = frozenset()
  score_from: int = -1


@dataclasses.dataclass
class Result:
  """What came out. finish: SGLang's finish_reason. logprobs: natural log, one a token of ids.

  versions: (version, start, end), half open, over ids. input_logprobs[i] belongs to the
  prompt's token score_from + 1 + i. cached_tokens: prompt tokens not computed again.
  version: that of the newest token.
  """
  ids: list[int]
  logprobs: list[float]
  versions: list[tuple[str, int, int]]
  version: str
  finish: dict[str, Any]
  cached_tokens: int
  retractions: int
  input_logprobs: list[float]


class BadRequest(ValueError):
  """The client's mistake; the text says what is wrong."""


# Settings that change nothing at these values, and are refused at any other.
_NEUTRAL = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "min_new_tokens": (0, None), "n": (1, None), "logit_bias": (None, {}), "json_schema": (None,),
    "regex": (None,), "ebnf": (None,), "structural_tag": (None,), "custom_params": (None, {}),
    "stop": (None, [], ""), "stop_regex": (None, [], ""),
}
# Settings about text, of which this server has none.
_TEXTUAL = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "sampling_seed",
             "stop_token_ids", "ignore_eos")
_BODY = ("input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len", "stream",
         "session_id", "priority", "routing_key",
         "model", "log_metrics", "no_logs")  # what sglang-router adds
_BODY_NEUTRAL = {
    "top_logprobs_num": (0, None), "token_ids_logprob": (None, []),
    "return_hidden_states": (False, None), "return_bytes": (False, None),
    "return_entropy": (False, None), "background": (False, None),
    "return_text_in_logprobs": (False, True, None)}


def check_types(body: dict[str, Any], required: dict[str, Any], optional: dict[str, Any]) -> None:
  """Raises BadRequest for a missing, unknown or wrongly typed key. null counts as left out."""
  for key in required:
    if body.get(key) is None:
      raise BadRequest(f"{key} is missing")
  for key, value in body.items():
    kinds = required.get(key) or optional.get(key)
    if kinds is None:
      raise BadRequest(f"{key} is not supported")
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if value is not None and type(value) not in kinds:
      wanted = " or ".join(kind.__name__ for kind in kinds)
      raise BadRequest(f"{key} must be {wanted}, not {type(value).__name__}")


def _number(params: dict[str, Any], key: str, default: float, low: float, high: float,
            above: bool = False) -> float:
  value = params.get(key)
  if value is None:
    return default
  if type(value) not in (int, float) or not math.isfinite(value):
    raise BadRequest(f"{key} must be a number, not {value!r}")
  if not low <= value <= high or (above and value == low):
    bound = "above" if above else "at least"
    raise BadRequest(f"{key}={value!r} must be {bound} {low:g} and at most {high:g}")
  return float(value)


def _integer(params: dict[str, Any], key: str, default: int | None, low: int) -> int | None:
  value = params.get(key)
  if value is None:
    return default
  if type(value) is not int:
    raise BadRequest(f"{key} must be an integer, not {value!r}")
  if value < low:
    raise BadRequest(f"{key}={value} must be at least {low}")
  return value


def _flag(params: dict[str, Any], key: str) -> bool:
  value = params.get(key)
  if value is not None and type(value) is not bool:
    raise BadRequest(f"{key} must be true or false, not {value!r}")
  return bool(value)


def _ids(value: Any, key: str) -> list[int]:
  if not isinstance(value, list) or not all(type(i) is int for i in value):
    raise BadRequest(f"{key} must be a list of integers")
  return value


def _unsupported(params: dict[str, Any], known: tuple[str, ...], neutral: dict[str, tuple],
                 what: str) -> None:
  for key, value in params.items():
    if key in neutral:
      if value not in neutral[key]:
        raise BadRequest(f"{what} {key}={value!r} is not supported: this server samples from the "
                         "model's own distribution; leave it out")
    elif key not in known:
      raise BadRequest(f"{what} {key} is not known to this server")


def sampling(params: Any, eos: frozenset[int]) -> dict[str, Any]:
  """The fields of a Request that `sampling_params` sets. Raises BadRequest naming the setting."""
  if params is None:
    params = {}
  if not isinstance(params, dict):
    raise BadRequest("sampling_params must be an object")
  _unsupported(params, _SAMPLING + _TEXTUAL, _NEUTRAL, "sampling setting")
  top_k = _integer(params, "top_k", -1, -1)
  if top_k == 0:
    raise BadRequest("top_k must be -1 (off) or at least 1")
  stop = _ids(params.get("stop_token_ids") or [], "stop_token_ids")
  ignore_eos = _flag(params, "ignore_eos")
  for key in _TEXTUAL:
    _flag(params, key)
  temperature = _number(params, "temperature", 1.0, 0.0, 1e6)
  return dict(
      max_new_tokens=_integer(params, "max_new_tokens", 128, 0),
      temperature=0.0 if temperature < 1e-6 else temperature,
      top_p=_number(params, "top_p", 1.0, 0.0, 1.0, above=True), top_k=top_k,
      min_p=_number(params, "min_p", 0.0, 0.0, 1.0),
      seed=_integer(params, "sampling_seed", None, -2 ** 63),
      stop_ids=frozenset(stop) | (frozenset() if ignore_eos else eos))


def parse(body: dict[str, Any], eos: frozenset[int]) -> tuple[list[Request], bool]:
  """A /generate body -> (requests, whether it was a batch). Raises BadRequest."""
  if body.get("text") is not None:
    raise BadRequest("text is not supported: this server has no tokenizer; send input_ids")
  _unsupported(body, (*_BODY, "text"), _BODY_NEUTRAL, "field")
  if _flag(body, "stream"):
    raise BadRequest("stream is not offered by this server")
  ids = body.get("input_ids")
  if ids is None:
    raise BadRequest("input_ids is missing")
  if not isinstance(ids, list) or not ids:
    raise BadRequest("input_ids is empty" if ids == [] else "input_ids must be a list of integers")
  batched = isinstance(ids[0], list)
  prompts = ids if batched else [ids]
  rids = _rids(body.get("rid"), len(prompts), batched)
  params = body.get("sampling_params")
  per_prompt = params if batched and isinstance(params, list) else [params] * len(prompts)
  if len(per_prompt) != len(prompts):
    raise BadRequest(f"{len(per_prompt)} sampling_params for {len(prompts)} prompts")
  score_from = _integer(body, "logprob_start_len", -1, -1) if _flag(body, "return_logprob") else -1
  requests = []
  for rid, prompt, settings in zip(rids, prompts, per_prompt):
    prompt = _ids(prompt, "input_ids")
    if score_from >= max(len(prompt), 1):
      raise BadRequest(f"logprob_start_len={score_from} is past the end of the prompt of "
                       f"{len(prompt)} tokens")
    requests.append(Request(rid=rid, ids=prompt, score_from=score_from, **sampling(settings, eos)))
  return requests, batched


def _rids(rid: Any, count: int, batched: bool) -> list[str]:
  if rid is None:
    return [uuid.uuid4().hex for _ in range(count)]
  if isinstance(rid, str) and rid:
    return [f"{rid}_{i}" for i in range(count)] if batched else [rid]
  if batched and isinstance(rid, list) and len(rid) == count:
    if all(isinstance(r, str) and r for r in rid):
      return rid
  raise BadRequest("rid must be a non-empty string, or a list of one for each prompt of a batch")


def answer(request: Request, result: Result) -> dict[str, Any]:
  """The JSON of one finished request. Logprobs are [logprob, id, null]; text is always empty."""
  meta = {
      "id": request.rid, "finish_reason": result.finish, "prompt_tokens": len(request.ids),
      "completion_tokens": len(result.ids), "cached_tokens": result.cached_tokens,
      "weight_version": result.version, "num_retractions": result.retractions,
      "weight_versions": [{"version": v, "start": start, "end": end}
                          for v, start, end in result.versions],
      "output_token_logprobs": [[p, t, None] for p, t in zip(result.logprobs, result.ids)],
      "input_token_logprobs": [],
  }
  if request.score_from >= 0:  # the first has no predecessor within the range, hence no logprob
    scored = zip([None, *result.input_logprobs], request.ids[request.score_from:])
    meta["input_token_logprobs"] = [[p, t, None] for p, t in scored]
  return {"text": "", "output_ids": result.ids, "meta_info": meta}
