"""Policies as Hugging Face directories, for a server that reads no Orbax checkpoint."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket

from kr.model import checkpoint
from kr.model import hf


class Exports:
  """The policies that one process exports, under `directory`; tokenizer: a directory of one.

  Each process has its own place there, `<host>-<process id>/<version>`, so that an evaluation and
  a training run do not take each other's away. What a killed process left is removed by the next.
  """

  def __init__(self, directory: str | os.PathLike[str], tokenizer: str | os.PathLike[str]):
    self._tokenizer = tokenizer
    root, host = pathlib.Path(directory), socket.gethostname()
    self._own = root / f"{host}-{os.getpid()}"
    for path in root.glob(f"{host}-*"):
      pid = path.name.rpartition("-")[2]
      if path == self._own or pid.isdecimal() and not _alive(int(pid)):
        shutil.rmtree(path, ignore_errors=True)

  def add(self, policy: str | os.PathLike[str], version: int) -> str:
    """The Hugging Face directory of a policy checkpoint; one that is such already stays.

    Raises CheckpointError and HfError.
    """
    if (pathlib.Path(policy) / "config.json").is_file():
      return str(policy)
    params, cfg = checkpoint.restore_policy(policy)
    hf.export(params, cfg, self._tokenizer, self._own / str(version))
    return str(self._own / str(version))

  def keep(self, version: int) -> None:
    """Removes all but this version."""
    for path in self._own.glob("*"):
      if path.name != str(version):
        shutil.rmtree(path, ignore_errors=True)

  def close(self) -> None:
    """Removes all, and the directory when no other process has any there."""
    shutil.rmtree(self._own, ignore_errors=True)
    try:
      self._own.parent.rmdir()
    except OSError:
      pass


def _alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass
  return True
