"""The inference server: one policy over HTTP, by the contract of SGLang's native API.

  python -m kr.serve --model=runs/quickstart/checkpoints/50 --port=30000

--model is a policy checkpoint of a run, or a Hugging Face directory of any family that
`kr.model.families` knows. The policy is sampled from its own untouched distribution: no
grammar, no parser, no penalty.
`curl localhost:30000/server_info` tells the settings. Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
import dataclasses
import errno
import importlib.metadata
import json
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from typing import Any
import uuid

from absl import app
from absl import flags
from absl import logging as absl_logging
from aiohttp import web
import jax

from kr.model import checkpoint
from kr.model import compiled
from kr.model import families
from kr.model import hf
from kr.model import request as protocol
from kr.model.config import ModelConfig
from kr.model.engine import Engine, EngineError

_MODEL = flags.DEFINE_string(
    "model", None, "Policy checkpoint or Hugging Face directory.", required=True)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer(
    "port", 30000, "Port to listen on; 0 takes a free one and logs it.", 0, 65535)
_SLOTS = flags.DEFINE_integer("slots", 64, "Requests that run at once; further ones queue.", 1)
_MAX_LEN = flags.DEFINE_integer(
    "max_len", None, "Longest prompt and output together, in tokens; default: 1024, or the "
    "model's if that is less.", 2)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the requests that bring none of their own.", 0)
_VERSION = flags.DEFINE_string("weight_version", "0", "The version of the weights in --model.")
_WARM_UP = flags.DEFINE_bool(
    "warm_up", False, "Compile the most common shapes before the first request.")
_COMPILE_CACHE = flags.DEFINE_string(
    "compile_cache", str(compiled.DIRECTORY),
    "Directory that keeps compiled programs for the next start; empty: none.")
_EXIT_WITH_STDIN = flags.DEFINE_bool(
    "exit_with_stdin", False,
    "End at once when standard input closes, as it does when the parent dies.")

_MAX_BODY_BYTES = 64 * 2 ** 20
_HEALTH_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0

_log = logging.getLogger("kr")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def load(path: str) -> tuple[Any, ModelConfig]:
  """(params, config) of a policy checkpoint or a Hugging Face directory. Raises ValueError."""
  if not os.path.isdir(path):
    raise ValueError(f"there is no model at {path}: give the directory of a policy checkpoint or "
                     "of a Hugging Face model")
  if os.path.isfile(os.path.join(path, "config.json")):
    return hf.load(path)
  return checkpoint.restore_policy(path)


def eos_ids(path: str) -> frozenset[int]:
  """The end-of-sequence ids that a Hugging Face directory declares; a checkpoint has none."""
  ids: set[int] = set()
  for name in ("config.json", "generation_config.json"):
    try:
      value = json.loads((pathlib.Path(path) / name).read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
      continue
    ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
  return frozenset(ids)


def _error(status: int, message: str) -> web.Response:
  kind = "BadRequest" if status < 500 else "ServerError"
  return web.json_response(
      {"error": {"message": message, "type": kind, "code": status}}, status=status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
  """Every failure answers JSON with a message, and the server keeps serving."""
  try:
    return await handler(request)
  except protocol.BadRequest as e:
    return _error(400, str(e))
  except EngineError as e:
    return _error(503, str(e))
  except web.HTTPException as e:
    if e.status < 400:
      raise
    return _error(e.status, f"{request.method} {request.path}: {e.reason}")
  except Exception as e:  # pylint: disable=broad-except
    _log.exception("%s %s failed", request.method, request.path)
    return _error(500, f"{type(e).__name__}: {e}")


async def _body(request: web.Request) -> dict[str, Any]:
  raw = await request.read()
  if not raw.strip():
    return {}
  try:
    body = json.loads(raw)
  except (ValueError, RecursionError) as e:
    raise protocol.BadRequest(f"the body is not JSON: {e}") from None
  if not isinstance(body, dict):
    raise protocol.BadRequest("the body must be a JSON object")
  return body


class Server:
  """The endpoints over one engine. model: the path that its weights came from."""

  def __init__(self, engine: Engine, model: str, eos: frozenset[int], settings: dict[str, Any]):
    self._engine, self._model, self._eos, self._settings = engine, model, eos, settings
    self._updating = asyncio.Lock()
    self._started = time.time()

  def application(self) -> web.Application:
    application = web.Application(middlewares=[_errors], client_max_size=_MAX_BODY_BYTES)
    both = {
        "/health": self.health, "/health_generate": self.health_generate,
        "/model_info": self.model_info, "/get_model_info": self.model_info,
        "/server_info": self.server_info, "/get_server_info": self.server_info,
        "/flush_cache": self.flush_cache, "/v1/models": self.models,
    }
    post = {
        "/generate": self.generate, "/update_weights_from_disk": self.update_weights,
        "/pause_generation": self.pause, "/continue_generation": self.resume,
        "/abort_request": self.abort,
    }
    for path, handler in both.items():
      application.router.add_get(path, handler)
    for path, handler in {**both, **post}.items():
      application.router.add_post(path, handler)
    return application

  async def generate(self, request: web.Request) -> web.Response:
    requests, batched = protocol.parse(await _body(request), self._eos)
    results = await self._run(requests)
    answers = [protocol.answer(q, r) for q, r in zip(requests, results)]
    return web.json_response(answers if batched else answers[0])

  async def _run(self, requests: list[protocol.Request]) -> list[protocol.Result]:
    """Runs requests; when the client goes away or one is refused, the others are aborted."""
    futures, done = [], False
    try:
      for q in requests:
        try:
          futures.append(self._engine.submit(q))
        except ValueError as e:
          raise protocol.BadRequest(str(e)) from None
      results = [await asyncio.shield(asyncio.wrap_future(f)) for f in futures]
      done = True
      return results
    finally:
      if not done:
        for q, _ in zip(requests, futures):
          self._engine.abort(q.rid)

  async def update_weights(self, request: web.Request) -> web.Response:
    body = await _body(request)
    protocol.check_types(body, {"model_path": str}, {
        "weight_version": (str, int), "flush_cache": bool, "abort_all_requests": bool,
        "load_format": str, "keep_pause": bool, "is_async": bool, "token_step": int,
        "torch_empty_cache": bool, "recapture_cuda_graph": bool, "manifest": dict})
    path, version = body["model_path"], body.get("weight_version")
    version = None if version is None else str(version)
    flush, abort_all = body.get("flush_cache") is not False, bool(body.get("abort_all_requests"))
    async with self._updating:
      started = time.monotonic()
      try:
        params, cfg = await asyncio.to_thread(load, path)
        self._check_config(cfg)
        future = await asyncio.to_thread(
            self._engine.update, params, version, flush=flush, abort_all=abort_all)
      except (ValueError, OSError) as e:
        return web.json_response({"success": False, "message": f"Failed to update weights: {e}",
                                  "num_paused_requests": 0}, status=400)
      paused = await asyncio.shield(asyncio.wrap_future(future))
      self._model = path
      _log.info("weights: version %s from %s in %.2f s", self._engine.version, path,
                time.monotonic() - started)
    return web.json_response({"success": True, "message": "Succeeded to update model weights.",
                              "num_paused_requests": paused})

  def _check_config(self, cfg: ModelConfig) -> None:
    """Refuses what another model's shapes need not show, and would be computed wrongly."""
    shapes = ("vocab", "width", "layers", "head_dim", "mlp", "max_len")  # the engine's to check
    for name in (f.name for f in dataclasses.fields(cfg) if f.name not in shapes):
      new, old = getattr(cfg, name), getattr(self._engine.cfg, name)
      if new != old:
        raise ValueError(f"the new model has {name}={new}, the served one {old}")

  async def pause(self, request: web.Request) -> web.Response:
    mode = (await _body(request)).get("mode", "abort")
    try:
      future = self._engine.pause(mode)
    except (ValueError, TypeError) as e:
      raise protocol.BadRequest(str(e)) from None
    await asyncio.wrap_future(future)
    return web.json_response({"status": "ok", "message": f"Generation paused ({mode})."})

  async def resume(self, request: web.Request) -> web.Response:
    await _body(request)
    await asyncio.wrap_future(self._engine.resume())
    return web.json_response({"status": "ok", "message": "Generation continued."})

  async def abort(self, request: web.Request) -> web.Response:
    body = await _body(request)
    protocol.check_types(body, {}, {"rid": str, "abort_all": bool, "abort_message": str})
    if not body.get("abort_all") and not body.get("rid"):
      raise protocol.BadRequest("give the rid to abort, or abort_all: true")
    await asyncio.wrap_future(self._engine.abort(None if body.get("abort_all") else body["rid"]))
    return web.json_response({"status": "ok"})

  async def flush_cache(self, request: web.Request) -> web.Response:
    try:
      deadline = time.monotonic() + min(float(request.query.get("timeout", 0)), 600.0)
    except ValueError:
      raise protocol.BadRequest("timeout must be a number of seconds") from None
    while not await asyncio.wrap_future(self._engine.flush()):
      if not time.monotonic() < deadline:
        running, queued = self._engine.load
        return web.Response(status=400, text=f"The cache was not flushed: {running} requests are "
                                             f"running, {queued} are queued.\n")
      await asyncio.sleep(0.02)
    return web.Response(text="Cache flushed.\n")

  async def health(self, request: web.Request) -> web.Response:
    return web.Response(status=200 if self._engine.alive else 503)

  async def health_generate(self, request: web.Request) -> web.Response:
    """200 when a token comes out; a paused server is healthy as well."""
    if self._engine.paused:
      return await self.health(request)
    probe = protocol.Request(rid=f"health.{uuid.uuid4().hex}", ids=[0], max_new_tokens=1)
    try:
      await asyncio.wait_for(self._run([probe]), _HEALTH_TIMEOUT_S)
    except asyncio.TimeoutError:
      return _error(503, f"no token within {_HEALTH_TIMEOUT_S:g} s")
    return web.Response()

  async def model_info(self, request: web.Request) -> web.Response:
    cfg = self._engine.cfg
    return web.json_response({
        "model_path": self._model, "weight_version": self._engine.version, "is_generation": True,
        "vocab_size": cfg.vocab, "context_length": self._engine.max_len, "model_type": cfg.family,
        "architectures": [families.ARCHITECTURES[cfg.family]], "preferred_sampling_params": None})

  async def models(self, request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [
        {"id": self._model, "object": "model", "owned_by": "kr",
         "max_model_len": self._engine.max_len}]})

  async def server_info(self, request: web.Request) -> web.Response:
    running, queued = self._engine.load
    return web.json_response({
        **self._settings, "model_path": self._model, "weight_version": self._engine.version,
        "vocab_size": self._engine.cfg.vocab, "context_length": self._engine.max_len,
        "paused": self._engine.paused, "running": running, "queued": queued,
        "uptime_s": round(time.time() - self._started, 1),
        "counts": self._engine.counts})


def _settings() -> dict[str, Any]:
  """What a client must know to be sure that sampling is on-policy."""
  try:
    version = importlib.metadata.version("kr")
  except importlib.metadata.PackageNotFoundError:  # run from a clone that is not installed
    version = "unknown"
  return {
      "server": "kr", "version": version, "jax_version": jax.__version__,
      "device": jax.devices()[0].platform,
      "dtype": "float32", "max_running_requests": _SLOTS.value, "random_seed": _SEED.value,
      "tool_call_parser": None, "reasoning_parser": None, "grammar_backend": "none",
      "preferred_sampling_params": None, "speculative_algorithm": None,
      "enable_deterministic_inference": False, "skip_tokenizer_init": True}


def _bind() -> socket.socket:
  """The listening socket, before anything slow. Raises ValueError when it cannot be had."""
  family = socket.AF_INET6 if ":" in _HOST.value else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    sock.bind((_HOST.value, _PORT.value))
  except OSError as e:
    if e.errno == errno.EADDRINUSE:
      raise ValueError(f"port {_PORT.value} on {_HOST.value} is in use: give another --port "
                       "(--port=0 takes a free one), or end the program that has it") from None
    raise ValueError(f"cannot listen on {_HOST.value}:{_PORT.value}: {e.strerror or e}") from None
  return sock


def _watch_stdin() -> None:
  """Ends the process when standard input closes: no server outlives its trainer."""
  def watch():
    while os.read(0, 4096):
      pass
    os._exit(0)
  threading.Thread(target=watch, name="stdin", daemon=True).start()


async def _serve(sock: socket.socket, engine: Engine, ended: asyncio.Event) -> None:
  """Serves until a signal or the engine's death, then answers what is running and ends."""
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, ended.set)
  server = Server(engine, _MODEL.value, eos_ids(_MODEL.value), _settings())
  runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True,
                         shutdown_timeout=_STOP_TIMEOUT_S)
  await runner.setup()
  await web.SockSite(runner, sock, backlog=1024).start()
  _log.info("serving %s on http://%s:%d", _MODEL.value, *sock.getsockname()[:2])
  await ended.wait()
  engine.abort()
  await runner.cleanup()


def _start_engine(on_death: Callable[[], None]) -> Engine:
  params, cfg = load(_MODEL.value)
  max_len = _MAX_LEN.value or min(1024, cfg.max_len)
  if max_len > cfg.max_len:
    raise ValueError(f"--max_len={max_len} is more than the model's {cfg.max_len} tokens")
  engine = Engine(params, cfg, slots=_SLOTS.value, max_len=max_len, seed=_SEED.value,
                  version=_VERSION.value, on_death=on_death)
  if _WARM_UP.value:
    started = time.monotonic()
    engine.warm_up()
    _log.info("warm-up took %.1f s", time.monotonic() - started)
  return engine


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax says much
  _log.addHandler(logging.StreamHandler())
  _log.handlers[0].setFormatter(logging.Formatter("%(asctime)s kr.serve: %(message)s", "%H:%M:%S"))
  _log.setLevel(logging.INFO)
  _log.propagate = False
  if _EXIT_WITH_STDIN.value:
    _watch_stdin()
  if _COMPILE_CACHE.value:
    compiled.keep(_COMPILE_CACHE.value)
  loop = asyncio.new_event_loop()
  ended = asyncio.Event()
  try:
    sock = _bind()
    engine = _start_engine(lambda: loop.call_soon_threadsafe(ended.set))
  except (ValueError, OSError) as e:
    print(f"kr.serve: {e}", file=sys.stderr)
    sys.exit(1)
  loop.run_until_complete(_serve(sock, engine, ended))
  status = 0 if engine.alive else 1
  # A compilation in the engine's thread cannot be interrupted: do not wait for it for ever.
  stopper = threading.Thread(target=engine.stop, daemon=True)
  stopper.start()
  stopper.join(_STOP_TIMEOUT_S)
  sys.stderr.flush()
  os._exit(status)


if __name__ == "__main__":
  app.run(main)
