"""The inference server as a child process: started, watched, restarted, and never left behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

KINDS = ("kr", "sglang", "sglang_jax")
_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class ServerError(RuntimeError):
  """The server could not be started or has died; the text holds the end of its log."""


# SGLang keeps some tokens of its context to itself; a request of max_len must fit all the same.
_SGLANG_MARGIN_TOKENS = 8


def _launcher(kind: str) -> str:
  return str(_ROOT / "launch" / f"{kind}.sh")


def _install(kind: str) -> None:
  """Has the launcher install its server, which is quick when it is there. Raises ServerError."""
  command = ["bash", _launcher(kind), "--install"]
  if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
    raise ServerError(f"{kind} is not installed, and {' '.join(command)} failed (see above): "
                      "mend that, or take the server kr (server.kind)")


def _max_places(model: str) -> int:
  """How many tokens the model in a Hugging Face directory was made for. Raises ServerError."""
  path = pathlib.Path(model) / "config.json"
  try:
    return int(json.loads(path.read_text("utf-8"))["max_position_embeddings"])
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ServerError(f"SGLang reads Hugging Face directories, and {path} is none of one "
                      f"({type(e).__name__}: {e})") from e


def free_port(host: str = "127.0.0.1") -> int:
  """A TCP port that nobody listens on just now."""
  with socket.socket() as sock:
    sock.bind((host, 0))
    return sock.getsockname()[1]


class ServerProcess:
  """An inference server on one policy. Also a context manager: started and healthy inside.

  kind: "kr", which is `python -m kr.serve`, or "sglang" or "sglang_jax", which launch/<kind>.sh
  starts: they take Hugging Face directories only, and are installed at their first start.
  model: policy checkpoint or Hugging Face directory. version: the number of these weights.
  slots, max_len, seed: as in kr.serve. log: file that its output is appended to (None: this
  process's standard error). env: additions to the environment. Of kr.serve alone: warm_up, and
  compile_cache, the directory of compiled programs; None: its default.

  The server runs in a session of its own, so that Ctrl-C reaches the trainer alone, and
  ends, with all of its processes, when its standard input closes: also when the trainer is
  killed. Raises ServerError for another kind.
  """

  def __init__(self, model: str | os.PathLike, *, kind: str = "kr", slots: int = 64,
               max_len: int = 1024, seed: int = 0, version: int = 0, warm_up: bool = False,
               log: str | os.PathLike | None = None,
               compile_cache: str | os.PathLike | None = None, host: str = "127.0.0.1",
               start_timeout_s: float = 120.0, env: dict[str, str] | None = None):
    if kind not in KINDS:
      raise ServerError(f"server.kind={kind!r} must be one of {', '.join(KINDS)}")
    self.kind, self.model, self.version = kind, str(model), int(version)
    self._slots, self._max_len, self._seed = slots, max_len, seed
    self._warm_up, self._compile_cache = warm_up, compile_cache
    self._log, self._log_start = None if log is None else pathlib.Path(log), 0
    self._host, self._port = host, 0
    self._start_timeout_s = start_timeout_s
    self._env = dict(env or {})
    self._process: subprocess.Popen | None = None
    self.restarts = 0

  @property
  def url(self) -> str:
    """Where it listens; the same after a restart. Known once it has been started."""
    return f"http://{self._host}:{self._port}"

  @property
  def pid(self) -> int | None:
    return self._process.pid if self._process else None

  def start(self) -> None:
    """Spawns the process; returns at once. Nothing happens when it runs already.

    Raises ServerError if SGLang, where that is wanted, cannot serve this model or be installed.
    """
    if self.alive():
      return
    self._port = self._port or free_port(self._host)
    if self.kind != "kr":
      command = self._sglang_command()
      _install(self.kind)
    else:
      command = self._kr_command()
    path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
    log = None
    if self._log is not None:
      self._log.parent.mkdir(parents=True, exist_ok=True)
      log = open(self._log, "ab")
      self._log_start = log.tell()
    try:
      self._process = subprocess.Popen(
          command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
          env={**os.environ, "PYTHONPATH": path, **self._env})
    finally:
      if log is not None:
        log.close()

  def _kr_command(self) -> list[str]:
    flags = dict(model=self.model, slots=self._slots, max_len=self._max_len, seed=self._seed,
                 warm_up=str(self._warm_up).lower(), weight_version=self.version, host=self._host,
                 port=self._port)
    if self._compile_cache is not None:
      flags["compile_cache"] = str(self._compile_cache)
    return [sys.executable, "-m", "kr.serve", "--exit_with_stdin",
            *(f"--{k}={v}" for k, v in flags.items())]

  def _sglang_command(self) -> list[str]:
    room = self._max_len + _SGLANG_MARGIN_TOKENS
    flags = {"context-length": room, "max-total-tokens": self._slots * room,
             "max-running-requests": self._slots, "random-seed": self._seed,
             "weight-version": self.version, "host": self._host}
    places = _max_places(self.model)
    if places < self._max_len:
      raise ServerError(f"max_len={self._max_len} is more than the {places} tokens of the model in "
                        f"{self.model}")
    if places < room:
      flags["json-model-override-args"] = json.dumps({"max_position_embeddings": room})
    return ["bash", _launcher(self.kind), "--exit-with-stdin", "--model", self.model,
            "--port", str(self._port), *(f"--{k}={v}" for k, v in flags.items())]

  def wait_healthy(self, timeout_s: float | None = None) -> None:
    """Blocks until `/health` answers. Raises ServerError when it dies or takes too long."""
    deadline = time.monotonic() + (self._start_timeout_s if timeout_s is None else timeout_s)
    while not self.healthy():
      if not self.alive():
        status = self._process.returncode if self._process else None
        raise ServerError(f"the inference server ended with status {status} before it was ready"
                          f"{self._tail()}")
      if time.monotonic() > deadline:
        self.stop()
        raise ServerError("the inference server was not ready in time; raise start_timeout_s"
                          f"{self._tail()}")
      time.sleep(0.1)

  def alive(self) -> bool:
    """Whether the process runs."""
    return self._process is not None and self._process.poll() is None

  def healthy(self, timeout_s: float = 5.0) -> bool:
    """Whether the process runs and answers."""
    if not self.alive():
      return False
    try:
      opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
      with opener.open(f"{self.url}/health", timeout=timeout_s) as response:
        return response.status == 200
    except (urllib.error.URLError, OSError):
      return False

  def restart(self, model: str | os.PathLike | None = None, version: int | None = None) -> None:
    """Ends what is left and starts again at the same address, with other weights if given.

    Blocks until it is healthy. Raises ServerError.
    """
    self.stop()
    self.model = self.model if model is None else str(model)
    self.version = self.version if version is None else int(version)
    self.restarts += 1
    self.start()
    self.wait_healthy()

  def stop(self, timeout_s: float = 8.0) -> None:
    """Ends the whole process group: asks, then kills. Safe to call at any time, twice too."""
    process, self._process = self._process, None
    if process is None:
      return
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
      try:
        os.killpg(process.pid, number)  # its own session: the group has the process's id
      except ProcessLookupError:
        pass
      try:
        process.wait(wait_s)
      except subprocess.TimeoutExpired:
        continue
      if number == signal.SIGKILL:
        break
    if process.stdin:
      process.stdin.close()

  def _tail(self, count: int = 15) -> str:
    if self._log is None or not self._log.is_file():
      return ""
    with self._log.open("rb") as file:
      file.seek(self._log_start)  # what earlier servers said explains nothing
      lines = file.read().decode(errors="replace").splitlines()[-count:]
    return f"; the end of {self._log}:\n  " + "\n  ".join(lines) if lines else ""

  def __enter__(self) -> "ServerProcess":
    try:
      self.start()
      self.wait_healthy()
    except BaseException:
      self.stop()
      raise
    return self

  def __exit__(self, *unused) -> None:
    self.stop()
