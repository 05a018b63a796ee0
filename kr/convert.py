r"""Converts a policy; what --source is decides into what.

    python -m kr.convert --source=runs/quickstart --out=exports/quickstart
    python -m kr.convert --source=path/to/Qwen3-0.6B --out=policies/qwen3
    python -m kr.convert --source=model.gguf --out=starts/model

An Orbax checkpoint (of a run's workdir the newest, or the directory of one step, or a policy
alone) becomes a Hugging Face directory, which
transformers and SGLang load; a Hugging Face directory becomes an Orbax policy, which kr.serve
loads; a GGUF file becomes a Hugging Face directory.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags
from absl import logging

from kr import wiring
from kr.model import checkpoint
from kr.model import gguf
from kr.model import hf
from kr.model import shards

_SOURCE = flags.DEFINE_string("source", None, "What to convert.")
_OUT = flags.DEFINE_string("out", None, "Where to write.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Directory of the tokenizer; default: the one that the source names or "
    "holds.")
_DTYPE = flags.DEFINE_enum("dtype", None, sorted(shards.DTYPES), "Type of the weights of a Hugging "
                           "Face directory; default: float32.")


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise wiring.UserError(f"kr.convert takes flags only, not {' '.join(argv[1:])!r}; see --help")
  for name, value in (("source", _SOURCE.value), ("out", _OUT.value)):
    if not value:
      raise wiring.UserError(f"--{name} is missing; see --help")
  logging.set_verbosity(logging.WARNING)
  source, out = pathlib.Path(_SOURCE.value), pathlib.Path(_OUT.value)
  if source.resolve() in out.resolve().parents:  # a run removes its checkpoints in time
    raise wiring.UserError(f"--out={out} lies inside of --source={source}: choose another place")

  if (source / "checkpoints").is_dir():  # a workdir
    steps = checkpoint.Checkpoints(source / "checkpoints")
    if (latest := steps.latest()) is None:
      raise wiring.UserError(f"{source} has no checkpoint yet: train it first")
    source = pathlib.Path(steps.policy_path(latest))

  if source.is_file():
    if _TOKENIZER.value:
      raise wiring.UserError("a GGUF file brings its own tokenizer: leave --tokenizer out")
    gguf.convert(source, out, _DTYPE.value or "float32")
    kind = "Hugging Face directory"
  elif (source / "config.json").is_file():
    if _DTYPE.value:
      raise wiring.UserError("an Orbax policy is float32: leave --dtype out")
    tokenizer = pathlib.Path(_TOKENIZER.value or source).resolve()
    hf.check_tokenizer(tokenizer, hf.read_config(source))
    params, cfg = hf.load(source)
    checkpoint.save_policy(out, params, cfg, str(tokenizer))
    kind = "Orbax policy"
  elif (source / "policy").is_dir():
    tokenizer = tokenizer_of(source)
    params, cfg = checkpoint.restore_policy(source)
    hf.export(params, cfg, tokenizer, out, _DTYPE.value or "float32")
    kind = "Hugging Face directory"
  else:
    raise wiring.UserError(
        f"{source} is no Hugging Face directory, no GGUF file, no Orbax checkpoint and no workdir "
        "of a run" if source.exists() else f"there is no {source}")
  print(f"wrote {out}: {kind}", file=sys.stderr)


def tokenizer_of(source: pathlib.Path) -> pathlib.Path:
  """The tokenizer's directory: --tokenizer, or the one that the checkpoint names."""
  if _TOKENIZER.value:
    return pathlib.Path(_TOKENIZER.value)
  named = checkpoint.read_meta(source).get("tokenizer")
  if not named or not (source / named).is_dir():
    raise wiring.UserError(f"{source} names no tokenizer that is there: give --tokenizer=DIRECTORY")
  return source / named


if __name__ == "__main__":
  wiring.main_guard(main)
