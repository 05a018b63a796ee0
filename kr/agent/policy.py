"""The policy as the agent loop sees it, and the client of the inference server's HTTP contract.

The contract is SGLang's native API: `/generate` with token ids in, token ids and logprobs out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import re
import time
from typing import Any, Mapping, Protocol, Sequence

import aiohttp

from kr.agent import on_policy

_OVERFLOW = re.compile(r"context length|longer than|too long|max_len|maximum length", re.I)
_BF16_TOLERANCE = 0.05


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


class _Retriable(Exception):
  """A failure that another attempt may mend."""


class _Duplicate(_Retriable):
  """The server believes that a request of this id still runs."""


class PolicyClient:
  """The policy behind an inference server; use it within one event loop.

  sampling: settings for every request over the neutral ones of `on_policy.NEUTRAL`.
  vocab_size: bounds the ids that are sent (an id out of the vocabulary kills some servers);
  None: asked of the server before the first request. retries: further attempts after a
  connection error, a timeout or a 5xx answer, `backoff_s` · 2^n apart.
  """

  def __init__(self, base_url: str, sampling: Mapping[str, Any] | None = None,
               timeout_s: float = 600.0, retries: int = 4, *, backoff_s: float = 0.5,
               vocab_size: int | None = None):
    self._url = base_url.rstrip("/")
    self._sampling = dict(sampling if sampling is not None else {"temperature": 1.0})
    self._timeout = aiohttp.ClientTimeout(total=timeout_s)
    self._retries = retries
    self._backoff_s = backoff_s
    self._vocab_size = vocab_size
    self._context_tokens: int | None = None  # prompt and output together; 0: not known
    self._session: aiohttp.ClientSession | None = None
    self._paused = False
    self._version = 0  # For servers that do not report the version: the last one published.

  @property
  def url(self) -> str:
    """The server's address."""
    return self._url

  # Sampling and scoring.

  async def generate(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int],
                     rid: str, temperature: float | None = None) -> Sampled:
    """Samples one turn after `ids`.

    A turn that was aborted, or that several versions sampled, comes back with finish "abort". One
    that asks for more than the server's context holds gets what it holds: finish "length". A
    retry aborts the earlier attempt and sends the same `rid`, or, if the server still holds that
    for taken, one that begins with it; cancelling aborts the request.
    Raises ContextOverflow for a prompt over the server's context, PolicyError otherwise.
    """
    settings = {**on_policy.NEUTRAL, **self._sampling}
    if temperature is not None:
      settings["temperature"] = temperature
    start_s = time.monotonic()
    await self._check_ids(ids)
    if self._context_tokens:  # some servers refuse what others cut
      max_new_tokens = min(max_new_tokens, max(self._context_tokens - len(ids), 1))
    answer = await self._generate(ids, rid, -1, {
        **settings, "max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_ids),
        "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False})
    sampled = self._read(answer)
    sampled.seconds = time.monotonic() - start_s
    return sampled

  async def score(self, ids: Sequence[int], rid: str | None = None) -> list[float]:
    """Log-probabilities of a given sequence, one per id; 0.0 for the first, which has none."""
    await self._check_ids(ids)
    answer = await self._generate(ids, rid or f"score.{time.monotonic_ns()}.", 0, {
        **on_policy.NEUTRAL, "max_new_tokens": 0})
    entries = _field(answer, "meta_info", "input_token_logprobs")
    if [e[1] for e in entries] != list(ids):
      raise PolicyError(f"{self._url} scored other tokens than were sent")
    return [float(e[0]) if i else 0.0 for i, e in enumerate(entries)]

  async def _generate(self, ids: Sequence[int], rid: str, logprob_start: int,
                      sampling: dict[str, Any]) -> dict[str, Any]:
    body = {"input_ids": list(ids), "rid": rid, "sampling_params": sampling,
            "return_logprob": True, "logprob_start_len": logprob_start, "stream": False}
    try:
      return await self._call("POST", "/generate", body)
    except asyncio.CancelledError:
      await asyncio.shield(self._abort_quietly(body["rid"]))
      raise

  async def _check_ids(self, ids: Sequence[int]) -> None:
    if self._vocab_size is None or self._context_tokens is None:
      info = await self.info()
      self._vocab_size = _vocabulary(info) if self._vocab_size is None else self._vocab_size
      self._context_tokens = int(info.get("context_length") or 0)
    if not ids:
      raise PolicyError("an empty prompt cannot be continued")
    low, high = min(ids), max(ids)
    if low < 0 or (self._vocab_size and high >= self._vocab_size):
      raise PolicyError(f"token id {low if low < 0 else high} is outside the model's vocabulary of "
                        f"{self._vocab_size or 'unknown size'}: tokenizer and model do not match")

  def _read(self, answer: dict[str, Any]) -> Sampled:
    """A Sampled from the server's answer; ids are those that the logprobs name."""
    meta = _field(answer, "meta_info")
    reason = _field(meta, "finish_reason")
    finish = reason.get("type") if isinstance(reason, dict) else reason
    if finish == "abort" and _OVERFLOW.search(str(reason)):
      raise ContextOverflow(str(reason))
    entries = meta.get("output_token_logprobs") or []
    ids = [int(e[1]) for e in entries]
    versions = {str(v["version"]) for v in meta.get("weight_versions") or ()}
    mixed = len(versions) > 1
    sampled = Sampled(
        ids=ids, logprobs=[], version=self._version, finish="abort" if mixed else finish,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0), mixed=mixed)
    if sampled.finish == "abort":
      return sampled
    if finish not in ("stop", "length"):
      raise PolicyError(f"{self._url} ended a turn with the unknown reason {reason!r}")
    if not _within(ids, answer.get("output_ids", ids)) or not ids:
      raise PolicyError(f"{self._url} returned logprobs of {len(ids)} tokens that are not the "
                        f"{len(answer.get('output_ids', ids))} it sampled")
    sampled.logprobs = [_logprob(e[0], self._url) for e in entries]
    version = versions.pop() if versions else meta.get("weight_version")
    sampled.version = self._version if version is None else _version(version, self._url)
    return sampled

  # The server's state.

  async def info(self) -> dict[str, Any]:
    """What the server says of itself: `/server_info` and, over it, `/get_model_info`."""
    server = await self._call("GET", "/server_info", missing={})
    return {**server, **await self._call("GET", "/get_model_info")}

  async def check_on_policy(self, probe: Sequence[int] = (1,), tolerance: float | None = None
                            ) -> dict[str, Any]:
    """Raises OffPolicyError, naming the setting, its value and what to change.

    Looks at the client's settings, at the server's, and at what it does: tokens sampled after
    the ids of `probe` are scored again, and must have the same logprobs within `tolerance` (mean;
    default 1e-3, and 0.05 for a server in half precision, whose rounding is that large). Returns
    what it found: {"logprob_gap", "reports_version"}.
    """
    info = await self.info()
    fault = on_policy.sampling_fault(self._sampling) or on_policy.server_fault(info)
    if fault:
      raise OffPolicyError(fault)
    half = any(t in str(info.get("dtype", "")) for t in ("16", "half"))
    tolerance = tolerance or (_BF16_TOLERANCE if half else 1e-3)
    sampled = await self.generate(probe, max_new_tokens=16, stop_ids=[],
                                  rid=f"probe.{time.monotonic_ns()}.")
    if sampled.finish == "abort":
      raise PolicyError(f"{self._url} aborted the probe of the on-policy check; try again")
    scored = (await self.score([*probe, *sampled.ids]))[len(probe):]
    if fault := on_policy.logprob_fault(sampled.logprobs, scored, tolerance):
      raise OffPolicyError(fault)
    gaps = [abs(a - b) for a, b in zip(sampled.logprobs, scored, strict=True)]
    return {"logprob_gap": max(gaps), "reports_version": info.get("weight_version") is not None}

  async def update_weights(self, path: str | pathlib.Path, version: int) -> None:
    """Publishes the policy in `path` as `version`; running requests are retracted and go on.

    Their turns then mix two versions, which `generate` reports as aborted. Pauses and resumes
    generation unless it is paused already. Raises PolicyError with the server's message.
    """
    was_paused = self._paused
    if not was_paused:
      await self.pause()
    try:
      try:
        answer = await self._call("POST", "/update_weights_from_disk", {
            "model_path": str(path), "weight_version": str(version), "flush_cache": True})
        if answer.get("success") is False:
          raise PolicyError(f"{self._url} did not load {path}: {answer.get('message')}")
      except PolicyError as e:
        if "cache was not flushed" not in str(e):
          raise
        await self.flush()  # The weights did change: only the old keys and values must go.
      self._version = version
    finally:
      if not was_paused:
        await self.resume()
    reported = (await self._call("GET", "/get_model_info")).get("weight_version")
    if reported is not None and str(reported) != str(version):
      raise PolicyError(f"{self._url} reports weight version {reported!r} after version {version} "
                        "was published: does something else publish to this server?")

  async def pause(self, mode: str = "retract") -> None:
    """Stops generation. Running requests wait ("retract": their cache is recomputed)."""
    await self._call("POST", "/pause_generation", {"mode": mode})
    self._paused = True

  async def resume(self) -> None:
    """Continues after `pause`."""
    await self._call("POST", "/continue_generation", {})
    self._paused = False

  async def abort(self, rid: str | None = None) -> None:
    """Aborts one request, or all; each answers with what it has so far."""
    await self._call("POST", "/abort_request", {"rid": rid} if rid else {"abort_all": True})

  async def flush(self) -> None:
    """Empties the server's cache; tried again while requests are just ending."""
    for attempt in range(self._retries + 4):
      try:
        await self._call("POST", "/flush_cache", {})
        return
      except PolicyError as e:
        error = e
        await asyncio.sleep(self._backoff_s * min(2 ** attempt, 8))
    raise PolicyError(f"the cache could not be flushed: {error}")

  async def healthy(self) -> bool:
    """Whether the server answers `/health`; never raises for a server that is down."""
    try:
      async with self._open().get(f"{self._url}/health",
                                  timeout=aiohttp.ClientTimeout(total=5)) as response:
        return response.status == 200
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
      return False

  async def aclose(self) -> None:
    """Closes the connections."""
    if self._session is not None:
      await self._session.close()
      self._session = None

  # HTTP.

  def _open(self) -> aiohttp.ClientSession:
    if self._session is None:
      # Hundreds of turns wait at once; the server does the queueing, not the connector.
      self._session = aiohttp.ClientSession(
          connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, trust_env=False)
    return self._session

  async def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *,
                  missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request with retries; the JSON answer, or `missing` (if given) on 404.

    A body with a `rid` is that of /generate; its `rid` is replaced where the server has it stuck:
    SGLang loses the abort of a request that came during a pause, and ignores every further one.
    """
    error: Exception | None = None
    for attempt in range(self._retries + 1):
      if attempt:
        await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
        if body and path == "/generate":
          await self._abort_quietly(body["rid"])  # No duplicate of the lost attempt goes on.
          if isinstance(error, _Duplicate):
            body["rid"] = f"{body['rid']}{attempt}."
      try:
        return await self._once(method, path, body, missing)
      except _Retriable as e:
        error = e
    raise PolicyError(f"policy server {self._url} failed {self._retries + 1} times on {path}: "
                      f"{error}; is it running? See its log.") from error

  async def _once(self, method: str, path: str, body: dict[str, Any] | None,
                  missing: dict[str, Any] | None) -> dict[str, Any]:
    try:
      async with self._open().request(method, self._url + path, json=body) as response:
        status, text = response.status, await response.text()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as e:
      raise _Retriable(str(e) or type(e).__name__) from e
    if status == 404 and missing is not None:
      return missing
    if status >= 400:
      raise _refusal(status, _message(text))
    try:
      data = json.loads(text)
    except ValueError:
      data = {"message": text}
    return data if isinstance(data, dict) else {"data": data}

  async def _abort_quietly(self, rid: str) -> None:
    try:
      await self._once("POST", "/abort_request", {"rid": rid}, {})
    except (PolicyError, _Retriable):
      pass  # A server that cannot abort is down or has forgotten the request: nothing goes on.


def _refusal(status: int, message: str) -> Exception:
  """The exception for an error status."""
  if "duplicate request" in message.lower():
    return _Duplicate(f"HTTP {status}: {message}")
  if status >= 500 or status in (408, 429):
    return _Retriable(f"HTTP {status}: {message}")
  if status in (400, 413, 422) and _OVERFLOW.search(message):
    return ContextOverflow(message)
  return PolicyError(f"the policy server refused the request (HTTP {status}): {message}")


def _message(text: str) -> str:
  """The server's own message in an error body."""
  try:
    data = json.loads(text)
  except ValueError:
    return text.strip()[:500]
  if isinstance(data, dict):
    error = data.get("error", data)
    if isinstance(error, dict):
      return str(error.get("message", error))
    return str(error)
  return str(data)


def _field(data: Any, *path: str) -> Any:
  for key in path:
    if not isinstance(data, dict) or data.get(key) is None:
      raise PolicyError(f"the policy server's answer lacks {'.'.join(path)}; kr needs SGLang's "
                        "/generate with return_logprob")
    data = data[key]
  return data


def _within(ids: list[int], output_ids: list[int]) -> bool:
  """Whether `ids` are the sampled ids; some servers put extra entries around them."""
  return any(output_ids[i:i + len(ids)] == ids for i in range(len(output_ids) - len(ids) + 1))


def _logprob(value: Any, url: str) -> float:
  if not isinstance(value, (int, float)) or not value <= 1e-6:  # NaN compares false.
    raise PolicyError(f"{url} returned {value!r} as a log-probability")
  return float(value)


def _version(value: Any, url: str) -> int:
  if value == "default":  # SGLang's name for the weights that it started with.
    return 0
  try:
    return int(value)
  except ValueError:
    raise PolicyError(f"{url} reports weight version {value!r}; kr numbers versions: start the "
                      "server with --weight-version=0") from None


def _vocabulary(info: Mapping[str, Any]) -> int:
  """The vocabulary's size as the server or its model directory tells it; 0 when neither does."""
  if info.get("vocab_size"):
    return int(info["vocab_size"])
  config = pathlib.Path(str(info.get("model_path", ""))) / "config.json"
  try:
    return int(json.loads(config.read_text("utf-8"))["vocab_size"])
  except (OSError, ValueError, KeyError, TypeError):
    return 0
