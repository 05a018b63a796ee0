"""Hugging Face directories: how a model enters kr, reaches SGLang, and leaves kr.

A directory holds model.safetensors (or shards with an index), config.json of one of the
families in `kr.model.families`, and the tokenizer's files. Weights pass through tensor by tensor
in both directions. `export` then `load` gives the same bits, and so does `load` then `export`
in the type that was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import functools
import json
import logging
import math
import os
import pathlib
import re
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np

from kr.model import families
from kr.model import sharding
from kr.model import shards
from kr.model import tensors
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.shards import HfError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
                   "generation_config.json")
_CHUNK_BYTES = 4 * 2**20  # of a parameter that are in host memory beside the device's at a time
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # their files' names
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old files repeat what config.json says

_log = logging.getLogger("kr")


# -------------------------------------------------------------------- export


def export(params: dict[str, Any], cfg: ModelConfig, tokenizer_dir: str | os.PathLike[str],
           out_dir: str | os.PathLike[str], dtype: str = "float32",
           max_shard_bytes: int = shards.MAX_SHARD_BYTES) -> None:
  """Writes a Hugging Face directory: weights, config.json, the tokenizer's files.

  dtype: float32 or bfloat16. It is written beside out_dir and renamed when it is whole. On a
  mesh of several processes all must call it; the first one writes. Raises HfError if
  tokenizer_dir holds no tokenizer, or if out_dir is something else than an earlier export.
  """
  tokenizer_dir = pathlib.Path(tokenizer_dir)
  ids = check_tokenizer(tokenizer_dir, cfg)
  try:
    config = {**families.to_hf(cfg), **ids}
  except ValueError as e:
    raise HfError(f"the model cannot be exported: {e}") from e
  files = {name: (tokenizer_dir / name).read_bytes() for name in TOKENIZER_FILES
           if (tokenizer_dir / name).is_file()}
  table, parts = tensors.table(cfg), tensors.parts(cfg)
  specs = [shards.Spec(name, t.shape) for name, t in table.items()]

  def tensor(name: str) -> np.ndarray:
    t = table[name]
    return tensors.to_hf(_fetch(tensors.leaf(params, t.path), t.index), parts[t.path][0].layout)

  if jax.process_index() == 0:
    write(out_dir, config, files, specs, tensor, dtype, max_shard_bytes)
  elif not all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(params)):
    for spec in specs:  # takes part in gathering what the first process writes
      tensor(spec.name)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("kr.model.hf.export")


def _fetch(x: Any, index: tuple[int, ...]) -> np.ndarray:
  """x[index] in host memory; no more of x than that is copied."""
  if not isinstance(x, jax.Array) or len(x.devices()) == 1 and x.device.platform == "cpu":
    return np.asarray(x)[index]  # a view
  if index:
    start = (*index, *[0] * (x.ndim - len(index)))
    x = jax.lax.dynamic_slice(x, start, (*[1] * len(index), *x.shape[len(index):]))
  if not x.is_fully_addressable:
    x = multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x).reshape(x.shape[len(index):])


def to_tensors(params: dict[str, Any], cfg: ModelConfig) -> dict[str, np.ndarray]:
  """Parameters, or a tree like them, under Hugging Face's names and layouts."""
  parts = tensors.parts(cfg)
  return {name: np.ascontiguousarray(tensors.to_hf(
              np.asarray(tensors.leaf(params, t.path))[t.index], parts[t.path][0].layout))
          for name, t in tensors.table(cfg).items()}


def write(out_dir: str | os.PathLike[str], config: dict[str, Any], files: dict[str, bytes],
          specs: Iterable[shards.Spec], tensor: Callable[[str], np.ndarray],
          dtype: str = "float32", max_shard_bytes: int = shards.MAX_SHARD_BYTES) -> None:
  """Writes config.json, other files and weights (`shards.write`) as one directory.

  It is written beside out_dir and renamed when it is whole. Raises HfError if out_dir is
  something else than an earlier export, or cannot be written.
  """
  out = pathlib.Path(out_dir).absolute()
  _check_out(out)
  new = out.with_name(out.name + ".tmp")
  _check_out(new)  # what a killed export left there may go, nothing else
  text = json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n"
  try:
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, content in {"config.json": text.encode(), **files}.items():
      (new / name).write_bytes(content)
    shards.write(new, specs, tensor, dtype, max_shard_bytes)
    _replace(new, out)
  except OSError as e:
    raise HfError(f"could not write {out}: {e}") from e
  finally:
    shutil.rmtree(new, ignore_errors=True)


def check_tokenizer(tokenizer_dir: str | os.PathLike[str], cfg: ModelConfig) -> dict[str, Any]:
  """`_token_ids` of a tokenizer that is whole and fits the model, else HfError."""
  tokenizer_dir = pathlib.Path(tokenizer_dir)
  for name in TOKENIZER_FILES[:2]:
    if not (tokenizer_dir / name).is_file():
      raise HfError(f"{tokenizer_dir} has no {name}: give the directory of a saved tokenizer")
  ids = _token_ids(tokenizer_dir)
  if over := {k: i for k, i in ids.items() if i >= cfg.vocab}:
    raise HfError(f"the tokenizer's {over} lie outside of the model's {cfg.vocab} tokens")
  return ids


def _token_ids(tokenizer_dir: pathlib.Path) -> dict[str, Any]:
  """The ids that config.json repeats from the tokenizer: end of turn and padding."""
  out = {}
  try:
    settings = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    added = {t["content"]: t["id"]
             for t in json.loads((tokenizer_dir / "tokenizer.json").read_text())["added_tokens"]}
    for key in ("bos_token", "eos_token", "pad_token"):
      token = settings.get(key)
      token = token.get("content") if isinstance(token, dict) else token
      if token in added:
        out[key + "_id"] = added[token]
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise HfError(f"the tokenizer in {tokenizer_dir} is damaged: {type(e).__name__}: {e}") from e
  return out


def _check_out(out: pathlib.Path) -> None:
  """Refuses to replace what is not an export: another's files, a run, a checkpoint."""
  if out.parent == out or out.exists() and not out.is_dir():
    raise HfError(f"{out} exists and is not a Hugging Face model: choose another directory")
  names = {p.name for p in out.iterdir()} if out.is_dir() else set()
  other = sorted(n for n in names if n not in (*TOKENIZER_FILES, "config.json", shards.INDEX)
                 and not _WEIGHTS.fullmatch(n))
  if other or names and "config.json" not in names:
    raise HfError(f"{out} exists and is not a Hugging Face model that kr wrote (it holds "
                  f"{', '.join(other[:3] or sorted(names)[:3])}): choose another directory")


def _replace(new: pathlib.Path, out: pathlib.Path) -> None:
  """Puts the finished directory `new` where `out` is."""
  if not out.exists():
    new.rename(out)
    return
  _check_out(out)
  old = out.with_name(out.name + ".old")
  _check_out(old)
  shutil.rmtree(old, ignore_errors=True)
  out.rename(old)
  new.rename(out)
  shutil.rmtree(old)


# -------------------------------------------------------------------- import


def read_config(directory: str | os.PathLike[str]) -> ModelConfig:
  """The ModelConfig of a Hugging Face directory; refuses by name what kr does not compute."""
  return _config(pathlib.Path(directory))[0]


def _config(directory: pathlib.Path) -> tuple[ModelConfig, int]:
  """(config, how many layers for predicting further tokens follow the model's own)."""
  path = directory / "config.json"
  try:
    data = json.loads(path.read_text())
  except FileNotFoundError:
    raise HfError(f"{directory} is no Hugging Face model: it has no config.json") from None
  except (json.JSONDecodeError, UnicodeDecodeError) as e:
    raise HfError(f"{path} is damaged: {e}") from e
  try:
    cfg = families.from_hf(data)
    return cfg, int(data.get("num_nextn_predict_layers") or data.get("num_mtp_layers") or 0)
  except KeyError as e:
    raise HfError(f"{path} lacks {e.args[0]!r}") from e
  except (ValueError, TypeError, AttributeError) as e:
    raise HfError(f"{path}: {e}") from e


def load(directory: str | os.PathLike[str], mesh: Mesh | None = None
         ) -> tuple[dict[str, Any], ModelConfig]:
  """(params, config) of a Hugging Face directory; float16 and bfloat16 become float32.

  With a mesh, each device gets its share of each parameter, as `kr.model.sharding` says, and a
  process reads no more than its devices get. Host memory holds the result and one piece of
  a parameter. Raises HfError naming the architecture, value, tensor or type that is not
  supported, and what is missing, extra or misshapen.
  """
  directory = pathlib.Path(directory)
  cfg, further = _config(directory)
  reader = shards.Reader(directory)
  _check_tensors(reader, cfg, further)
  declared = transformer.declare(cfg)
  params: dict[str, Any] = {}
  for path, (part, shape) in tensors.parts(cfg).items():
    where = mesh and NamedSharding(
        mesh, sharding.spec(mesh, tensors.leaf(declared, path).axes, shape))
    piece = functools.partial(_piece, reader, cfg, path, part, shape)
    tree = params.setdefault(path[0], {}) if len(path) > 1 else params
    tree[path[-1]] = _assemble(piece, shape, where)
  return params, cfg


def _check_tensors(reader: shards.Reader, cfg: ModelConfig, further: int) -> None:
  """Refuses what is missing, misshapen or extra, before anything is read."""
  names = reader.names()
  for name, t in tensors.table(cfg).items():
    reader.check(name, t.shape)
    names.discard(name)
  if cfg.tied and "lm_head.weight" in names:
    shape = (cfg.vocab, cfg.width)
    reader.check("lm_head.weight", shape)
    if not np.array_equal(*(reader.read(name, tensors.whole(shape))
                            for name in ("lm_head.weight", "model.embed_tokens.weight"))):
      raise HfError("tie_word_embeddings is true, but lm_head.weight is not the embedding")
    names.discard("lm_head.weight")
  after = tuple(f"model.layers.{cfg.layers + i}." for i in range(further))
  if left := sorted(n for n in names if n.startswith(after) or _DERIVED.search(n)):
    _log.warning("left out, as kr does not predict further tokens and derives rotary positions "
                 "itself: %d tensors, %s … %s", len(left), left[0], left[-1])
  if extra := sorted(names - set(left)):
    raise HfError(f"tensors that a {families.ARCHITECTURES[cfg.family]} of this config has not: "
                  f"{', '.join(extra[:5])}{' …' if len(extra) > 5 else ''}")


def _piece(reader: shards.Reader, cfg: ModelConfig, path: tuple[str, ...], part: tensors.Part,
           shape: tuple[int, ...], index: tensors.Slices) -> np.ndarray:
  """A piece of a parameter in kr's layout, float32; each tensor is read once."""
  n = part.stacked
  stack, rest = index[:n], index[n:]
  out = np.empty([s.stop - s.start for s in index], np.float32)
  source = tensors.hf_slices(part.layout, shape[n:], rest)
  for place, name in tensors.names(cfg, path, part, stack):
    target = tuple(i - s.start for i, s in zip(place, stack))
    out[target] = tensors.from_hf(reader.read(name, source), part.layout, out.shape[n:])
    if out[target].size and not math.isfinite(out[target].min() - out[target].max()):
      raise HfError(f"tensor {name} holds NaN or infinity: the checkpoint is broken")
  return out


def _assemble(piece: Callable[[tensors.Slices], np.ndarray], shape: tuple[int, ...],
              where: NamedSharding | None) -> jax.Array:
  """The parameter whose pieces `piece` gives, on one device or as `where` says.

  A large one comes in chunks of its first axis, each written into the finished array: what
  the host holds besides is one chunk.
  """
  rows = max(1, _CHUNK_BYTES * shape[0] // (4 * math.prod(shape)))
  if rows >= shape[0] or where and where.spec[0] is not None:
    return _put(piece, shape, 0, where)
  out = jnp.zeros(shape, jnp.float32, device=where)
  for start in range(0, shape[0], rows):
    size = min(rows, shape[0] - start)
    out = _insert(out, _put(piece, (size, *shape[1:]), start, where), start)
    out.block_until_ready()  # else chunks pile up in the queue
  return out


@functools.partial(jax.jit, donate_argnums=0)
def _insert(whole: jax.Array, chunk: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(whole, chunk, start, 0)


def _put(piece: Callable[[tensors.Slices], np.ndarray], shape: tuple[int, ...], start: int,
         where: NamedSharding | None) -> jax.Array:
  """The part of a parameter from `start` on its first axis that has this shape."""
  def read(index: tuple[slice, ...]) -> np.ndarray:
    a, b, _ = index[0].indices(shape[0])
    return piece((slice(a + start, b + start),
                  *(slice(*s.indices(size)[:2]) for s, size in zip(index[1:], shape[1:]))))

  if where is None:
    return jnp.asarray(read(tensors.whole(shape)))
  found: dict[str, np.ndarray] = {}  # devices may hold copies of the same piece

  def once(index: tuple[slice, ...]) -> np.ndarray:
    key = str(index)
    if key not in found:
      found[key] = read(index)
    return found[key]

  return jax.make_array_from_callback(shape, where, once)
