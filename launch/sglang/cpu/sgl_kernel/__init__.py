"""Answers SGLang's imports of its compiled kernels, on a machine without CUDA.

The published kernel wheel holds CUDA libraries alone. SGLang imports names of it as its modules
load, and calls none of them on the path of dense models with torch's own attention. A name that
is called after all says so.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"  # what SGLang asks for at least
__path__ = []  # a package: its submodules come from _Finder


class _Missing:
  """Stands for a kernel, or for what lies below one."""

  def __init__(self, name):
    self._name = name

  def __call__(self, *args, **kwargs):
    raise NotImplementedError(f"{self._name} is a CUDA kernel; this SGLang runs on a CPU")

  def __getattr__(self, name):
    return _missing(self._name, name)


def _missing(owner, name):
  if name.startswith("__"):  # what Python itself asks every object for
    raise AttributeError(name)
  return _Missing(f"{owner}.{name}")


def __getattr__(name):
  return _missing(__name__, name)


class _Loader(importlib.abc.Loader):
  """Makes submodules all of whose names are missing kernels."""

  def create_module(self, spec):
    module = types.ModuleType(spec.name)
    module.__path__ = []
    module.__getattr__ = lambda name: _missing(spec.name, name)
    return module

  def exec_module(self, module):
    pass


class _Finder(importlib.abc.MetaPathFinder):
  """Finds every submodule of this package."""

  def find_spec(self, name, path=None, target=None):
    if name.startswith(__name__ + "."):
      return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
    return None


sys.meta_path.insert(0, _Finder())
