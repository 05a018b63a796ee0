"""What runs inside the sandbox: takes code on stdin, answers on stdout. Standard library only.

It is never imported: `sandbox.py` passes its source to the sandbox's interpreter, with the limits
as JSON in argv[1]. It greets with four zero bytes. A message is a 4-byte big-endian length and
JSON. A request is {"token", "code"}; its reply repeats the token, so that nothing written ahead of
time can pass for it.
"""

import ast
import builtins
import io
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types

# Model code shares this process and may replace anything in these modules: keep what the
# protocol needs.
_read, _write, _pack, _unpack = os.read, os.write, struct.pack, struct.unpack
_dumps, _loads, _getpid, _exit = json.dumps, json.loads, os.getpid, os._exit
_kill, _waitpid, _SIGKILL = os.kill, os.waitpid, signal.SIGKILL
_CUT = "\n… cut\n"


def confine(limits):
  """Gives up root for good, then lowers the limits (in this order: limits do not bind root)."""
  if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(limits["uid"], limits["uid"], limits["uid"])
    os.setresuid(limits["uid"], limits["uid"], limits["uid"])
  for name, value in limits["rlimits"].items():
    which = getattr(resource, name)
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


class Capture(io.TextIOBase):
  """stdout and stderr of the code: the first and the last `size` characters of what it writes."""

  def __init__(self, size):
    self._size = size
    self.reset()

  def reset(self):
    self._head, self._tail, self._held, self._total = "", [], 0, 0

  def write(self, text):
    if not isinstance(text, str):
      raise TypeError(f"write() argument must be str, not {type(text).__name__}")
    self._total += len(text)
    start = self._size - len(self._head)
    if start > 0:
      self._head += text[:start]
    if len(text) > start:   # the rest goes to the tail, of which the end is kept
      rest = text[max(start, len(text) - self._size, 0):]
      self._tail.append(rest)
      self._held += len(rest)
      if self._held > 4 * self._size or len(self._tail) > 4096:
        self._tail = ["".join(self._tail)[-self._size:]]
        self._held = len(self._tail[0])
    return len(text)

  def writable(self):
    return True

  @property
  def encoding(self):
    return "utf-8"

  @property
  def buffer(self):
    return _Bytes(self)

  def text(self):
    tail = "".join(self._tail)[-self._size:]
    gap = _CUT if self._total > len(self._head) + len(tail) else ""
    return self._head + gap + tail


class _Bytes(io.RawIOBase):
  """`sys.stdout.buffer`."""

  def __init__(self, capture):
    self._capture = capture

  def writable(self):
    return True

  def write(self, data):
    view = memoryview(data).cast("B")
    for start in range(0, len(view), 1 << 16):
      self._capture.write(str(view[start:start + (1 << 16)], "utf-8", "replace"))
    return len(view)


def trim(text, size):
  """Head and tail of a text that is longer than `size` characters."""
  if len(text) <= size:
    return text
  half = (size - len(_CUT)) // 2
  return text[:half] + _CUT + text[-half:]


def describe(error):
  """An exception's last traceback line, with the line of the code that it comes from."""
  try:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, SyntaxError):
      return f"{text.splitlines()[-1]} (line {error.lineno})"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
             if frame.f_code.co_filename == "<code>"]
    return f"{text} (line {lines[-1]})" if lines else text
  except BaseException:  # a hostile exception class
    return "an exception that cannot be shown"


def execute(code, namespace):
  """Runs the code; (repr of the last expression or "", error text or "")."""
  try:
    tree = ast.parse(code, "<code>")
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
      last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "<code>", "exec"), namespace)
    if last is not None:
      value = eval(compile(last, "<code>", "eval"), namespace)
      return "" if value is None else str(repr(value)), ""
    return "", ""
  except SystemExit as e:
    return "", "" if e.code in (None, 0) else describe(e)
  except BaseException as e:
    return "", describe(e)


def end_children():
  """Kills and collects all other processes of the sandbox: none outlives the call."""
  try:
    _kill(-1, _SIGKILL)
    while True:
      _waitpid(-1, 0)
  except (ProcessLookupError, ChildProcessError):
    pass


def read_exactly(fd, size):
  data = b""
  while len(data) < size:
    chunk = _read(fd, min(size - len(data), 1 << 20))
    if not chunk:
      _exit(0)
    data += chunk
  return data


def serve(limits):
  """Answers requests until stdin ends."""
  # The pipes move away from 0, 1, 2, so that nothing the code prints can get into a reply. What
  # bypasses sys.stdout (child processes, os.write) lands in a file, bounded by RLIMIT_FSIZE.
  requests, replies = os.dup(0), os.dup(1)
  null = os.open(os.devnull, os.O_RDWR)
  raw = os.open("/tmp/.out", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
  os.unlink("/tmp/.out")
  confine(limits)
  size, me = limits["output_chars"], _getpid()
  capture = Capture(size)
  module = types.ModuleType("__main__")
  module.__dict__["__builtins__"] = builtins
  sys.modules["__main__"] = module
  sys.argv = [""]
  _write(replies, _pack(">I", 0))  # ready: the time of the first call starts now
  while True:
    length, = _unpack(">I", read_exactly(requests, 4))
    request = _loads(read_exactly(requests, length))
    for fd, source in ((0, null), (1, raw), (2, raw)):
      os.dup2(source, fd)
    os.ftruncate(raw, 0)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.stderr = capture
    capture.reset()
    value, error = execute(request["code"], module.__dict__)
    if _getpid() != me:
      _exit(0)  # a fork of the code's that fell out of it
    end_children()
    parts = [capture.text()]
    written = os.fstat(raw).st_size
    if written:
      head = os.pread(raw, size, 0).decode("utf-8", "replace")
      rest = os.pread(raw, size, max(size, written - size)).decode("utf-8", "replace")
      parts.append(head + (_CUT if written > 2 * size else "") + rest)
    text = "\n".join(p.strip("\n") for p in (*parts, value, error) if p.strip("\n"))
    reply = _dumps({"token": request["token"], "ok": not error, "text": trim(text, size)}).encode()
    reply = _pack(">I", len(reply)) + reply
    while reply:
      reply = reply[_write(replies, reply):]


serve(json.loads(sys.argv[1]))
