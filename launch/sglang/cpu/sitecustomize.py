"""Runs at the start of each Python process of SGLang on a CPU: lets torchvision be imported.

torchvision registers fakes for two operators of its compiled library. A library that is linked
to CUDA does not load beside a torch without it, and then nothing has declared them.
"""

import importlib.abc
import importlib.machinery
import sys

_OPERATORS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
              "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _Finder(importlib.abc.MetaPathFinder):
  """Declares the operators as torchvision is about to be imported, once."""

  def find_spec(self, name, path=None, target=None):
    if name != "torchvision":
      return None
    sys.meta_path.remove(self)
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    import torch  # not before: most processes of SGLang need it, but not all
    for library in _libraries(spec):
      try:
        torch.ops.load_library(library)
        return None
      except OSError:
        pass
    self.library = torch.library.Library("torchvision", "DEF")  # as long as the finder lives
    for operator in _OPERATORS:
      self.library.define(operator)
    return None


def _libraries(spec):
  """The paths of torchvision's compiled library."""
  import pathlib
  roots = spec.submodule_search_locations if spec else []
  return [str(path) for root in roots for path in pathlib.Path(root).glob("_C*.so")]


_finder = _Finder()
sys.meta_path.insert(0, _finder)
