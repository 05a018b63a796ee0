"""What runs inside the sandbox: takes code on stdin, answers on stdout. Standard library only.

It is never imported: `sandbox.py` passes its source to the sandbox's interpreter, with the limits
as `name=number` arguments. It greets with four zero bytes. A message is a 4-byte big-endian length
and its bytes: a request is a token of 16 and the code in UTF-8; the reply is the same token (so
that nothing written ahead of time can pass for it), b"1" or b"0" for whether the code ran without
an error, and the output in UTF-8.

Imports are the costly part of a start: only modules that are built in or nearly free.
"""

import _ast
import builtins
import io
import os
import resource
import sys

# Model code shares this process and may replace anything in these modules: keep what the
# protocol needs.
_read, _write, _getpid, _exit, _kill, _waitpid = (
    os.read, os.write, os.getpid, os._exit, os.kill, os.waitpid)
_SIGKILL = 9
_CUT = "\n… cut\n"


def confine(limits):
  """Gives up root for good, then lowers the limits (in this order: limits do not bind root)."""
  if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(limits["uid"], limits["uid"], limits["uid"])
    os.setresuid(limits["uid"], limits["uid"], limits["uid"])
  for name, value in limits.items():
    if not name.startswith("RLIMIT_"):
      continue
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
  """An exception as the last line of its traceback, with the line of the code it comes from."""
  kind = type(error)
  name = kind.__qualname__
  if kind.__module__ not in ("builtins", "__main__"):
    name = f"{kind.__module__}.{name}"
  if isinstance(error, SyntaxError):
    return f"{name}: {error.msg} (line {error.lineno})"
  try:
    said = str(error)
  except BaseException:  # a hostile exception class
    said = "<exception str() failed>"
  text = f"{name}: {said}" if said else name
  step, line = error.__traceback__, None
  while step is not None:
    if step.tb_frame.f_code.co_filename == "<code>":
      line = step.tb_lineno
    step = step.tb_next
  return f"{text} (line {line})" if line else text


def execute(code, namespace):
  """Runs the code; (repr of the last expression or "", error text or "")."""
  try:
    tree = compile(code, "<code>", "exec", _ast.PyCF_ONLY_AST)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
      last = _ast.Expression(tree.body.pop().value)
    exec(compile(tree, "<code>", "exec"), namespace)
    if last is not None:
      value = eval(compile(last, "<code>", "eval"), namespace)
      return "" if value is None else repr(value), ""
    return "", ""
  except BaseException as e:
    if type(e) is SystemExit and e.code in (None, 0):
      return "", ""
    try:
      return "", str(describe(e))
    except BaseException:
      return "", "an exception that cannot be shown"


def end_children():
  """Kills and collects all other processes of the sandbox: none outlives the call."""
  try:
    _kill(-1, _SIGKILL)
    while True:
      _waitpid(-1, 0)
  except (ProcessLookupError, ChildProcessError):
    pass


def written(fd, size):
  """Head and tail of what a file holds, at most `size` bytes of each."""
  length = os.fstat(fd).st_size
  head = os.pread(fd, size, 0).decode("utf-8", "replace")
  tail = os.pread(fd, size, max(size, length - size)).decode("utf-8", "replace")
  return head + (_CUT if length > 2 * size else "") + tail


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
  module = type(sys)("__main__")
  module.__dict__["__builtins__"] = builtins
  sys.modules["__main__"] = module
  sys.argv = [""]
  _write(replies, bytes(4))  # ready: the time of the first call starts now
  while True:
    length = int.from_bytes(read_exactly(requests, 4), "big")
    request = read_exactly(requests, length)
    for fd, source in ((0, null), (1, raw), (2, raw)):
      os.dup2(source, fd)
    os.ftruncate(raw, 0)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.stderr = capture
    capture.reset()
    value, error = execute(request[16:].decode(), module.__dict__)
    if _getpid() != me:
      _exit(0)  # a fork of the code's that fell out of it
    end_children()
    parts = (capture.text(), written(raw, size), value, error)
    text = trim("\n".join(p.strip("\n") for p in parts if p.strip("\n")), size)
    reply = request[:16] + (b"0" if error else b"1") + text.encode("utf-8", "replace")
    reply = len(reply).to_bytes(4, "big") + reply
    while reply:
      reply = reply[_write(replies, reply):]


serve({name: int(value) for name, value in (arg.split("=") for arg in sys.argv[1:])})
