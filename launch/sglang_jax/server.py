"""SGLang-JAX with what kr's contract asks of it besides: weight updates and versions.

    python server.py --model-path DIR --port 30000 …       flags of sgl_jax.launch_server

launch/sglang_jax.sh runs it in the environment that it makes. The engine is SGLang-JAX's own, all
in one process, which is its mode for trainers. Added are POST /update_weights_from_disk, the
`weight_version` of /get_model_info, and `weight_version` and `weight_versions` of each answer.

New weights are read by the model's own loader into arrays beside the old ones, in the scheduler's
thread, between two batches; then the compiled step is given the new arrays in place of the old.
For that moment a device holds the parameters twice.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import dataclasses
import importlib
import itertools
import os
import sys
from typing import Any

import flax.nnx as nnx
import jax

import versions

# Found in the environment that this runs in, which is not that of kr.
_ENGINE = "sgl_jax.srt"
http_server = importlib.import_module(f"{_ENGINE}.entrypoints.http_server")
io_struct = importlib.import_module(f"{_ENGINE}.managers.io_struct")
ServerArgs = importlib.import_module(f"{_ENGINE}.server_args").ServerArgs
kill_process_tree = importlib.import_module(f"{_ENGINE}.utils").kill_process_tree


@dataclasses.dataclass
class Update:
  """New weights, on their way to the scheduler's thread; `number` finds the waiting future."""
  number: int
  path: str
  version: str | None
  flush: bool


class Weights:
  """Weight updates of one engine. Its scheduler and tokenizer manager come with `attach`."""

  def __init__(self, version: str):
    self.versions = versions.Versions(version)
    self._numbers = itertools.count()
    self._waiting: dict[int, concurrent.futures.Future] = {}
    self._updating = asyncio.Lock()

  def attach(self, scheduler: Any, tokenizer_manager: Any) -> None:
    self._scheduler, self._manager = scheduler, tokenizer_manager
    handlers = scheduler._request_dispatcher._mapping
    handlers[:0] = [(io_struct.TokenizedGenerateReqInput, self._begin),
                    (io_struct.PauseGenerationReqInput, self._pause), (Update, self._apply)]

  async def update(self, path: str, version: str | None, flush: bool) -> tuple[bool, str]:
    """(success, message). Unless the engine is paused, running requests finish first.

    The messages to the scheduler are read in order, so a pause that was sent before is in force
    when the update comes.
    """
    if not os.path.isfile(os.path.join(path, "config.json")):
      return False, f"there is no Hugging Face directory {path}"
    async with self._updating:
      paused = self._manager.is_pause
      if not paused:
        await self._drain()
      number, future = next(self._numbers), concurrent.futures.Future()
      self._waiting[number] = future
      try:
        self._manager.auto_create_handle_loop()
        await self._manager.send_to_scheduler.send_pyobj(Update(number, path, version, flush))
        message = await asyncio.wrap_future(future)
      except Exception as e:  # whatever a loader makes of a directory: the old weights are served
        return False, f"Failed to update weights: {type(e).__name__}: {e}"
      finally:
        if not paused:
          await self._manager.continue_generation(io_struct.ContinueGenerationReqInput())
      self._manager.model_path = path
      return not message, message or "Succeeded to update model weights."

  async def _drain(self) -> None:
    """Has new requests wait, and waits for those that run."""
    async with self._manager.is_pause_cond:
      self._manager.is_pause = True
    while self._manager.rid_to_state:
      await asyncio.sleep(0.02)

  # In the scheduler's thread.

  def _begin(self, request: Any) -> Any:
    self.versions.begin(request.rid)
    return self._scheduler.handle_generate_request(request)

  def _pause(self, request: Any) -> Any:
    """Lets requests that were just prefilled join the running ones: a pause loses them otherwise.

    With overlapped scheduling they would have no result yet, so the launcher switches that off.
    """
    scheduler, last = self._scheduler, self._scheduler.last_batch
    if request.mode == "retract" and last is not None and last.forward_mode.is_extend():
      last.filter_batch(chunked_req_to_exclude=scheduler._prepare_chunked_reqs_to_exclude())
      if scheduler.running_batch.is_empty():
        scheduler.running_batch = last
      elif not last.is_empty():
        scheduler.running_batch.merge_batch(last)
      scheduler.last_batch = None
    return scheduler.pause_generation(request)

  def _apply(self, update: Update) -> None:
    future = self._waiting.pop(update.number)
    try:
      self._load(update.path)
      if update.version is not None:
        self.versions.change(update.version, self._living())
      future.set_result(self._flush() if update.flush else "")
    except Exception as e:
      future.set_exception(e)

  def _load(self, path: str) -> None:
    worker = getattr(self._scheduler.tp_worker, "worker", self._scheduler.tp_worker)
    runner = worker.model_runner
    old_path, runner.model_config.model_path = runner.model_config.model_path, path
    try:
      with jax.set_mesh(runner.mesh):
        runner.model.load_weights(runner.model_config)
    except BaseException:
      runner.model_config.model_path = old_path
      raise
    leaves, tree = jax.tree_util.tree_flatten(nnx.split(runner.model)[1])
    shapes = [[getattr(x, "shape", None) for x in xs] for xs in (leaves, runner.model_state_leaves)]
    if tree != runner._model_state_def or shapes[0] != shapes[1]:
      raise ValueError("the new model has other parameters than the served one")
    runner.model_state_leaves = leaves

  def _requests(self) -> list[Any]:
    batches = (self._scheduler.running_batch, self._scheduler.cur_batch, self._scheduler.last_batch)
    running = [req for batch in batches if batch is not None for info in batch.reqs_info
               for req in info.reqs or ()]
    chunked = [req for req in self._scheduler.chunked_reqs if req is not None]
    return [*self._scheduler.waiting_queue, *running, *chunked]

  def _living(self) -> dict[str, int]:
    return {req.rid: len(req.output_ids) for req in self._requests() if not req.finished()}

  def _flush(self) -> str:
    """Forgets the cache; what is wrong, or "". Retracted requests hold nothing of it and wait."""
    waiting, self._scheduler.waiting_queue = self._scheduler.waiting_queue, []
    try:
      success, message, *_ = self._scheduler.flush_cache()
    finally:
      self._scheduler.waiting_queue = waiting
    return "" if success else f"Weights were updated, but the cache was not flushed: {message}"


def add_routes(app: Any, weights: Weights) -> None:
  """Puts the routes over SGLang-JAX's of the same path."""
  respond = http_server.ORJSONResponse
  theirs = {route.path: route.endpoint for route in app.router.routes
            if getattr(route, "endpoint", None)}

  async def update_weights(request: http_server.Request):
    body = await request.json()
    if not isinstance(body, dict) or not isinstance(body.get("model_path"), str):
      return respond({"success": False, "message": "model_path is missing"}, status_code=400)
    version = body.get("weight_version")
    success, message = await weights.update(
        body["model_path"], None if version is None else str(version),
        body.get("flush_cache") is not False)
    return respond({"success": success, "message": message, "num_paused_requests": 0},
                   status_code=200 if success else 400)

  async def generate(obj: io_struct.GenerateReqInput, request: http_server.Request):
    if obj.stream:
      return respond({"error": {"message": "stream is not offered: its pieces have no versions"}},
                     status_code=400)
    try:
      answer = await theirs["/generate"](obj, request)
    except TypeError as e:  # a sampling setting that it does not know
      return respond({"error": {"message": str(e)}}, status_code=400)
    for one in answer if isinstance(answer, list) else [answer]:
      if isinstance(one, dict) and "meta_info" in one:
        versions.complete(one, weights.versions)
    return answer

  async def model_info():
    # Prompt and output together must stay below its context, where SGLang's may reach it.
    context = (await theirs["/get_server_info"]()).get("context_length")
    return {**await theirs["/get_model_info"](), "weight_version": weights.versions.current,
            **({"context_length": context - 1} if context else {})}

  ours = {"/update_weights_from_disk": (update_weights, ["POST"]),
          "/generate": (generate, ["POST"]), "/get_model_info": (model_info, ["GET"]),
          "/model_info": (model_info, ["GET"]),
          "/server_info": (theirs["/get_server_info"], ["GET"])}
  app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) not in ours]
  for path, (endpoint, methods) in ours.items():
    app.add_api_route(path, endpoint, methods=methods, response_model=None)


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument("--weight-version", default="0")  # SGLang's flag, which SGLang-JAX has not
  own, theirs = parser.parse_known_args(argv)
  sys.argv = [sys.argv[0], *theirs, "--enable-single-process"]
  weights = Weights(own.weight_version)
  launch = http_server._launch_subprocesses_or_threads

  def launch_and_attach(*args: Any, **kwargs: Any) -> Any:
    manager, templates, info = launch(*args, **kwargs)
    weights.attach(info["scheduler"], manager)
    return manager, templates, info

  http_server._launch_subprocesses_or_threads = launch_and_attach
  add_routes(http_server.app, weights)
  try:
    http_server.launch(ServerArgs.from_cli())
  finally:
    kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
  main(sys.argv[1:])
