"""The inference engine: one thread that batches requests over the slots of a KV cache.

Other threads call `submit`, `abort`, `pause`, `resume`, `update` and `flush`. What they
post is carried out between two device calls, in order. The thread repeats: carry out what
was posted; give waiting requests a slot (`kr.model.slots`); run one batch of prompt
chunks; sample a few tokens for every request whose prompt is in (`kr.model.device`).

Invariant: of a request's tokens all but the newest are in the cache before it decodes;
the newest is the input of the decode step that samples its successor.
"""

from __future__ import annotations

from concurrent.futures import Future
import logging
import queue
import threading
import time
from typing import Any, Callable

from jax.sharding import Mesh
import numpy as np

from kr.model.config import ModelConfig
from kr.model.device import Device
from kr.model.request import Request, Result

PREFILLS_PER_DECODE = 4  # so that long prompts do not starve those who decode
LOG_EVERY_S = 20.0
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

_log = logging.getLogger("kr.engine")


class EngineError(Exception):
  """The engine cannot carry this out; the text says why."""


class _Job:
  """A request on its way."""

  def __init__(self, request: Request, seed: np.ndarray):
    self.request, self.seed = request, seed  # seed [2] uint32
    self.future: Future = Future()
    self.ids: list[int] = []
    self.logprobs: list[float] = []
    self.versions: list[list] = []
    self.slot = -1
    self.cached_tokens = -1
    self.retractions = 0
    self.input_logprobs = np.zeros(len(request.ids) if self.scored else 0, np.float32)

  @property
  def scored(self) -> bool:
    return self.request.score_from >= 0

  def result(self, finish: dict[str, Any], version: str) -> Result:
    scores = self.input_logprobs[self.request.score_from + 1:].tolist() if self.scored else []
    version = self.versions[-1][0] if self.versions else version
    return Result(self.ids, self.logprobs, [tuple(v) for v in self.versions], version, finish,
                  max(self.cached_tokens, 0), self.retractions, scores)


class Engine:
  """Continuous batching for one model.

  params: the tree of `kr.model.transformer`; cfg: its shape. slots: how many requests
  run at once, the others queue. max_len: prompt and output together, in tokens. steps:
  tokens sampled per device call. version: the name of the weights. mesh: the devices, see
  `kr.model.device`. on_death is called from the engine's thread after it has died of an error.
  """

  def __init__(self, params: Any, cfg: ModelConfig, *, slots: int = 64, max_len: int = 1024,
               seed: int = 0, version: str = "0", steps: int = 8, mesh: Mesh | None = None,
               on_death: Callable[[], None] = lambda: None):
    self.cfg, self.max_len, self.version, self.mesh = cfg, max_len, version, mesh
    self.paused = False
    self.counts = {"requests": 0, "output_tokens": 0, "prefill_tokens": 0, "cached_tokens": 0}
    self._device = Device(params, cfg, slots, max_len, steps, mesh)
    self._slots = self._device.slots
    self._jobs: dict[int, _Job] = {}  # slot -> job, in order of admission
    self._waiting: list[_Job] = []
    self._updates: list[tuple[Callable[[], Any], Future]] = []
    self._posted: queue.SimpleQueue = queue.SimpleQueue()
    self._live: set[str] = set()
    self._lock = threading.Lock()  # guards _live, _rng, and posting against the thread's end
    self._rng = np.random.default_rng(seed)
    self._stopping = self._ended = False
    self._on_death = on_death
    self._logged = (time.monotonic(), dict(self.counts))
    self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
    self._thread.start()

  # -- For other threads ------------------------------------------------------------------

  @property
  def alive(self) -> bool:
    return not self._ended

  @property
  def load(self) -> tuple[int, int]:
    """(requests running, requests queued)."""
    return len(self._jobs), len(self._waiting)

  def submit(self, request: Request) -> Future:
    """Queues a request; the future gives its Result. Raises ValueError naming what is wrong."""
    n, limit = len(request.ids), self.max_len - (request.max_new_tokens > 0)
    if not n:
      raise ValueError("input_ids is empty")
    if n > limit:
      raise ValueError(f"The input ({n} tokens) is longer than the context length allows "
                       f"({limit} tokens)")
    if min(request.ids) < 0 or max(request.ids) >= self.cfg.vocab:
      raise ValueError(f"input_ids holds an id outside the vocabulary (0 to {self.cfg.vocab - 1})")
    with self._lock:
      if request.rid in self._live:
        raise ValueError(f"Duplicate request: rid {request.rid!r} is already running")
      self._live.add(request.rid)
      seed = self._rng.integers(0, 2 ** 32, 2, np.uint32)
    if request.seed is not None:
      seed = np.array([request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF], np.uint32)
    job = _Job(request, seed)
    job.future.add_done_callback(lambda _: self._live.discard(request.rid))
    self._post(lambda: self._waiting.append(job), job.future)
    return job.future

  def abort(self, rid: str | None = None) -> Future:
    """Ends one request, or all: they finish with what they have. Unknown ids are ignored."""
    return self._post(lambda: self._abort(rid))

  def pause(self, mode: str = "abort") -> Future:
    """Stops sampling -> how many requests there were.

    abort: ends them. retract: they queue again, their KV is recomputed. in_place: they
    stay where they are. New requests queue until `resume`.
    """
    if mode not in ("abort", "retract", "in_place"):
      raise ValueError(f"mode {mode!r} is not one of abort, retract, in_place")
    return self._post(lambda: self._pause(mode))

  def resume(self) -> Future:
    """Ends a pause -> whether it did: not while the memory is released."""
    return self._post(self._resume)

  def update(self, params: Any, version: str | None, *, flush: bool = True,
             abort_all: bool = False) -> Future:
    """Takes new weights -> how many requests were paused meanwhile.

    Unless paused, the running requests finish first under the old weights, and no other
    starts before the new ones are in. Raises ValueError when they do not fit.
    """
    self._device.check(params)
    params = self._device.put(params)
    future: Future = Future()

    def post():
      if abort_all:
        self._abort(None)
      self._updates.append((lambda: self._update(params, version, flush), future))

    self._post(post, future)
    return future

  def flush(self) -> Future:
    """Forgets the KV cache -> True, or False when requests are running or queued."""
    return self._post(self._flush)

  def release(self) -> Future:
    """Gives up the memory of weights and cache until `update` -> whether it did.

    False unless the engine is paused. What was cached of running and queued requests is computed
    again after `resume`, which must not come before the update.
    """
    return self._post(self._release)

  def warm_up(self, spans: int = 2) -> None:
    """Compiles the programs that most requests need (of the `spans` shortest spans). Blocks."""
    self._post(lambda: self._device.warm_up(spans)).result()

  def stop(self) -> None:
    """Ends all requests (abort) and the thread. Blocks."""
    self._post(self._stop)
    self._thread.join()

  def _post(self, action: Callable[[], Any], later: Future | None = None) -> Future:
    """Has the thread carry out an action -> a future of its value.

    `later`: a future that something else will answer; it only fails when the engine ends.
    """
    future = later or Future()
    with self._lock:
      if not self._ended:
        self._posted.put((action, future, later is None))
        return future
    future.set_exception(EngineError("the engine has stopped"))
    return future

  # -- The engine thread: what was posted -------------------------------------------------

  def _main(self) -> None:
    error = EngineError("the engine has stopped")
    prefills = 0
    try:
      while not self._stopping:
        self._carry_out()
        if self._updates and (self.paused or not self._jobs):
          for action, future in self._updates:
            future.set_result(action())
          self._updates = []
        if self.paused:
          continue
        if not self._updates:
          self._admit()
        if prefills < PREFILLS_PER_DECODE and self._prefill():
          prefills += 1
          continue
        prefills = 0
        self._decode()
        self._log()
    except Exception as e:  # a bug, or the device: nobody may wait for ever
      _log.exception("the engine died")
      error = EngineError(f"the engine died: {e}")
    self._end(error)
    if not self._stopping:
      self._on_death()

  def _carry_out(self) -> None:
    """Does what was posted; waits for something when there is nothing else to do."""
    idle = (self.paused or not self._jobs and not self._waiting) and not self._updates
    while idle or not self._posted.empty():
      action, future, answers = self._posted.get()
      idle = False
      value = action()
      if answers:
        future.set_result(value)

  def _end(self, error: Exception) -> None:
    with self._lock:
      self._ended = True
    futures = [j.future for j in (*self._jobs.values(), *self._waiting)]
    futures += [f for _, f in self._updates]
    while not self._posted.empty():
      futures.append(self._posted.get()[1])
    for future in futures:
      if not future.done():
        future.set_exception(error)

  def _stop(self) -> None:
    self._abort(None)
    self._stopping = True

  def _finish(self, job: _Job, reason: dict[str, Any]) -> None:
    if job.slot >= 0:
      del self._jobs[job.slot]
      self._slots.release(job.slot)
    self.counts["requests"] += 1
    job.future.set_result(job.result(reason, self.version))

  def _abort(self, rid: str | None) -> None:
    for job in [*self._jobs.values(), *self._waiting]:
      if rid is None or job.request.rid == rid:
        if job.slot < 0:
          self._waiting.remove(job)
        self._finish(job, dict(_ABORTED))

  def _pause(self, mode: str) -> int:
    count = sum(self.load)
    self.paused = True
    if mode == "abort":
      self._abort(None)
    elif mode == "retract":
      for job in self._jobs.values():
        self._slots.release(job.slot, keep=False)
        job.slot = -1
        job.retractions += 1
      self._waiting = [*self._jobs.values(), *self._waiting]
      self._jobs = {}
    return count

  def _resume(self) -> bool:
    self.paused = self._device.params is None
    return not self.paused

  def _release(self) -> bool:
    if self.paused:
      self._pause("retract")
      self._slots.flush()
      self._device.release()
    return self.paused

  def _update(self, params: Any, version: str | None, flush: bool) -> int:
    self._device.load(params)
    self.version = self.version if version is None else version
    if flush:
      self._slots.flush()
    return sum(self.load) if self.paused else 0

  def _flush(self) -> bool:
    if self._jobs or self._waiting:
      return False
    self._slots.flush()
    return True

  def _log(self) -> None:
    then, before = self._logged
    seconds = time.monotonic() - then
    if seconds >= LOG_EVERY_S:
      rate = {k: (v - before[k]) / seconds for k, v in self.counts.items()}
      _log.info("%d running, %d queued; tokens/s: %.0f sampled, %.0f prefilled, %.0f reused",
                   *self.load, rate["output_tokens"], rate["prefill_tokens"], rate["cached_tokens"])
      self._logged = (time.monotonic(), dict(self.counts))

  # -- The engine thread: one batch -------------------------------------------------------

  def _admit(self) -> None:
    """Gives waiting requests a slot, in order, while there are free ones."""
    waiting = []
    for i, job in enumerate(self._waiting):
      if len(self._jobs) == self._slots.count:
        waiting += self._waiting[i:]
        break
      if not self._place(job):
        waiting.append(job)
    self._waiting = waiting

  def _place(self, job: _Job) -> bool:
    tokens = np.asarray(job.request.ids + job.ids, np.int32)
    usable = len(tokens) - 1  # the newest is always computed
    if job.scored:
      usable = min(usable, job.request.score_from)
    place = self._slots.place(tokens, usable)
    if place is None:
      return False
    if place.source != place.slot:
      self._device.copy(place.source, place.slot, place.reused)
    self._slots.take(place, tokens)
    job.slot = place.slot
    self._jobs[place.slot] = job
    if job.cached_tokens < 0:
      job.cached_tokens = place.reused
      self.counts["cached_tokens"] += place.reused
    return True

  def _prefill(self) -> bool:
    """Runs one batch of prompt chunks; False when no prompt is waiting for one."""
    pending = []
    for slot, job in list(self._jobs.items()):
      if self._slots.missing(slot):
        pending.append((slot, self._device.chunk(slot), job.scored))
      elif job.request.max_new_tokens == 0:
        self._finish(job, {"type": "length", "length": 0})
    if not pending:
      return False
    # The rows of a call have the same chunk length; the oldest request says which.
    _, chunk, scored = pending[0]
    slots = [s for s, *kind in pending if kind == [chunk, scored]]
    slots = slots[:self._device.row_limit(chunk, len(slots))]
    self.counts["prefill_tokens"] += sum(min(chunk, self._slots.missing(s)) for s in slots)
    scores = self._device.prefill(slots, chunk, scored)
    if scored:
      for slot, (first, logprobs) in zip(slots, scores):
        room = self._jobs[slot].input_logprobs[first:first + len(logprobs)]
        room[:] = logprobs[:len(room)]  # the output of a retracted request is not input
    return True

  def _decode(self) -> None:
    """Samples up to `steps` tokens for each request whose prompt is in the cache."""
    slots = [s for s in self._jobs if not self._slots.missing(s)]
    if not slots:
      return
    requests = [self._jobs[s].request for s in slots]
    sampling = np.array([(r.temperature, r.top_p, r.top_k if r.top_k > 0 else self.cfg.vocab,
                          r.min_p) for r in requests], np.float32)
    ids, logprobs = self._device.decode(slots, [self._jobs[s].seed for s in slots], sampling)
    for slot, *sampled in zip(slots, ids, logprobs):
      self._extend(self._jobs[slot], *sampled)

  def _extend(self, job: _Job, ids: list[int], logprobs: list[float]) -> None:
    """Appends what was sampled, up to the request's end, and finishes it there."""
    request, start = job.request, len(job.ids)
    room = min(request.max_new_tokens - start, self.max_len - len(request.ids) - start)
    reason = {"type": "length", "length": start + room} if room <= len(ids) else None
    ids = ids[:room]
    for i, token in enumerate(ids):
      if token in request.stop_ids:
        ids, reason = ids[:i + 1], {"type": "stop", "matched": token}
        break
    job.ids += ids
    job.logprobs += logprobs[:len(ids)]
    if job.versions and job.versions[-1][0] == self.version:
      job.versions[-1][2] = len(job.ids)
    else:
      job.versions.append([self.version, start, len(job.ids)])
    self._slots.extend(job.slot, ids)
    self.counts["output_tokens"] += len(ids)
    if reason:
      self._finish(job, reason)
