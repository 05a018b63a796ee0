"""Hugging Face directories: how a policy reaches SGLang, and how a model enters or leaves kr.

A directory holds model.safetensors (or shards with an index), config.json of a
Qwen3ForCausalLM and the tokenizer's files. `export` then `load` gives the same bits.
Hugging Face's linear layers are stored [out, in]; kr's matrices are [in, out], heads
apart, layers stacked on axis 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import json
import os
import pathlib
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from kr.model import families
from kr.model import shards
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.shards import HfError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")
_LAYER = "model.layers.{}."
_FLOATS = {"F32", "F16", "BF16"}  # each of them is exact in float32
# Values of config.json that would change the result and that kr.model does not compute.
_ONLY = {"attention_bias": (False, None), "use_sliding_window": (False, None),
         "hidden_act": ("silu",), "quantization_config": (None,), "mlp_bias": (False, None)}


def _names(cfg: ModelConfig) -> dict[str, tuple[str, str | None]]:
  """kr's name -> (Hugging Face's name, or its suffix in a layer; layout of kr's matrix).

  Layout "in": the first axis is the input, the rest are outputs. "out": the last axis is
  the output, the rest are inputs. None: the same in both.
  """
  names = {
      "embed": ("model.embed_tokens.weight", None),
      "final_norm": ("model.norm.weight", None),
      "layers/attn_norm": ("input_layernorm.weight", None),
      "layers/wq": ("self_attn.q_proj.weight", "in"),
      "layers/wk": ("self_attn.k_proj.weight", "in"),
      "layers/wv": ("self_attn.v_proj.weight", "in"),
      "layers/wo": ("self_attn.o_proj.weight", "out"),
      "layers/q_norm": ("self_attn.q_norm.weight", None),
      "layers/k_norm": ("self_attn.k_norm.weight", None),
      "layers/mlp_norm": ("post_attention_layernorm.weight", None),
      "layers/gate": ("mlp.gate_proj.weight", "in"),
      "layers/up": ("mlp.up_proj.weight", "in"),
      "layers/down": ("mlp.down_proj.weight", "in"),
  }
  if not cfg.tied:
    names["head"] = ("lm_head.weight", "in")
  return names


def _to_hf(x: np.ndarray, layout: str | None) -> np.ndarray:
  """One layer's tensor: "in" is [D,…out] -> [out,D]; "out" is [H,h,D] -> [D,H·h]."""
  if layout == "in":
    x = x.reshape(x.shape[0], -1).T
  elif layout == "out":
    x = x.reshape(-1, x.shape[-1]).T
  return np.ascontiguousarray(x)


def to_tensors(params: dict[str, Any], cfg: ModelConfig) -> dict[str, np.ndarray]:
  """Parameters under Hugging Face's names and layouts, in float32."""
  out = {}
  for name, (hf, layout) in _names(cfg).items():
    tree, _, leaf = name.rpartition("/")
    x = np.asarray((params[tree] if tree else params)[leaf], np.float32)
    if tree:
      out.update({_LAYER.format(i) + hf: _to_hf(x[i], layout) for i in range(cfg.layers)})
    else:
      out[hf] = _to_hf(x, layout)
  return out


def from_tensors(tensors: dict[str, np.ndarray], cfg: ModelConfig) -> dict[str, Any]:
  """The inverse of `to_tensors`; raises HfError naming what is missing, extra or misshapen."""
  tensors = dict(tensors)
  if cfg.tied and "lm_head.weight" in tensors:
    if not np.array_equal(tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")):
      raise HfError("tie_word_embeddings is true, but lm_head.weight is not the embedding")
  shapes = transformer.shapes(cfg)

  def take(hf: str, layout: str | None, shape: tuple[int, ...]) -> np.ndarray:
    if hf not in tensors:
      raise HfError(f"tensor {hf} is missing")
    x = tensors.pop(hf)
    want = _to_hf(np.empty(shape, np.bool_), layout).shape
    if x.shape != want:
      raise HfError(f"tensor {hf} has shape {list(x.shape)}, config.json means {list(want)}")
    return (x.T if layout else x).astype(np.float32).reshape(shape)

  params: dict[str, Any] = {"layers": {}}
  for name, (hf, layout) in _names(cfg).items():
    tree, _, leaf = name.rpartition("/")
    if tree:
      shape = shapes[tree][leaf][1:]
      params[tree][leaf] = jnp.asarray(np.stack(
          [take(_LAYER.format(i) + hf, layout, shape) for i in range(cfg.layers)]))
    else:
      params[leaf] = jnp.asarray(take(hf, layout, shapes[leaf]))
  if tensors:
    raise HfError(f"tensors that a Qwen3ForCausalLM of this config has not: "
                  f"{', '.join(sorted(tensors)[:5])}")
  return params


def _token_ids(tokenizer_dir: pathlib.Path) -> dict[str, Any]:
  """The ids that config.json repeats from the tokenizer: end of turn and padding."""
  settings = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
  added = {t["content"]: t["id"]
           for t in json.loads((tokenizer_dir / "tokenizer.json").read_text())["added_tokens"]}
  out = {}
  for key in ("bos_token", "eos_token", "pad_token"):
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    if token in added:
      out[key + "_id"] = added[token]
  return out


def _replace(new: pathlib.Path, out: pathlib.Path) -> None:
  """Puts the finished directory `new` where `out` is; never over what is not a model."""
  if out.exists():
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
      raise HfError(f"{out} exists and is not a Hugging Face model: choose another directory")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old)
  else:
    new.rename(out)


def export(params: dict[str, Any], cfg: ModelConfig, tokenizer_dir: str | os.PathLike[str],
           out_dir: str | os.PathLike[str]) -> None:
  """Writes a Hugging Face directory: float32 weights, config.json, the tokenizer's files.

  It is written beside out_dir and renamed when it is whole. Raises HfError if tokenizer_dir
  holds no tokenizer, or if out_dir is something else than an earlier export.
  """
  tokenizer_dir, out = pathlib.Path(tokenizer_dir), pathlib.Path(out_dir).absolute()
  for name in TOKENIZER_FILES[:2]:
    if not (tokenizer_dir / name).is_file():
      raise HfError(f"{tokenizer_dir} has no {name}: give the directory of a saved tokenizer")
  ids = _token_ids(tokenizer_dir)
  if over := {k: i for k, i in ids.items() if i >= cfg.vocab}:
    raise HfError(f"the tokenizer's {over} lie outside of the model's {cfg.vocab} tokens")
  files = {name: (tokenizer_dir / name).read_text(encoding="utf-8") for name in TOKENIZER_FILES
           if (tokenizer_dir / name).is_file()}
  tensors = to_tensors(params, cfg)
  write(out, {**families.to_hf(cfg), **ids}, files,
        [shards.Spec(name, x.shape) for name, x in tensors.items()], tensors.__getitem__)


def write(out_dir: str | os.PathLike[str], config: dict[str, Any], files: dict[str, str],
          specs: Iterable[shards.Spec], tensor: Callable[[str], np.ndarray],
          dtype: str = "float32") -> None:
  """Writes config.json, text files and weights (`shards.write`) as one directory.

  It is written beside out_dir and renamed when it is whole. Raises HfError if out_dir is
  something else than an earlier export, or cannot be written.
  """
  out = pathlib.Path(out_dir).absolute()
  new = out.with_name(out.name + ".tmp")
  try:
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, text in {"config.json": json.dumps(config, indent=2) + "\n", **files}.items():
      (new / name).write_text(text, encoding="utf-8")
    shards.write(new, specs, tensor, dtype)
    _replace(new, out)
  except OSError as e:
    raise HfError(f"could not write {out}: {e}") from e
  finally:
    shutil.rmtree(new, ignore_errors=True)


def read_config(directory: str | os.PathLike[str]) -> ModelConfig:
  """The ModelConfig of a Hugging Face directory; refuses by name what kr does not compute."""
  path = pathlib.Path(directory) / "config.json"
  try:
    data = json.loads(path.read_text())
  except FileNotFoundError:
    raise HfError(f"{directory} is no Hugging Face model: it has no config.json") from None
  except (json.JSONDecodeError, UnicodeDecodeError) as e:
    raise HfError(f"{path} is damaged: {e}") from e
  names = data.get("architectures") or ["Qwen3ForCausalLM"]
  if names != ["Qwen3ForCausalLM"]:
    raise HfError(f"{path}: architecture {', '.join(names)} is not supported; "
                  "supported: Qwen3ForCausalLM")
  for key, allowed in _ONLY.items():
    if key in data and data[key] not in allowed:
      raise HfError(f"{path}: {key}={data[key]!r} is not supported; supported: {allowed[0]!r}")
  if other := set(data.get("layer_types") or ()) - {"full_attention"}:
    raise HfError(f"{path}: layer_types {', '.join(sorted(other))} is not supported; "
                  "supported: full_attention")
  try:
    return families.from_hf(data)
  except KeyError as e:
    raise HfError(f"{path} lacks {e.args[0]!r}") from e
  except HfError:
    raise
  except (ValueError, TypeError) as e:
    raise HfError(f"{path}: {e}") from e


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files: one, or the shards that the index lists."""
  index = directory / "model.safetensors.index.json"
  if index.is_file():
    return [directory / name
            for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
  return [directory / "model.safetensors"]


def load(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], ModelConfig]:
  """(params, config) of a Hugging Face directory; float16 and bfloat16 become float32.

  Raises HfError naming the architecture, value, tensor or type that is not supported.
  """
  cfg = read_config(directory)
  tensors: dict[str, np.ndarray] = {}
  try:
    for path in _files(pathlib.Path(directory)):
      with safetensors.safe_open(path, "np") as f:
        for name in f.keys():
          if (kind := f.get_slice(name).get_dtype()) not in _FLOATS:
            raise HfError(f"{path}: {name} is of type {kind}; supported: "
                          f"{', '.join(sorted(_FLOATS))}")
          tensors[name] = f.get_tensor(name)
  except FileNotFoundError as e:
    raise HfError(f"{directory} has no weights as safetensors: {e}") from e
  except (safetensors.SafetensorError, json.JSONDecodeError, KeyError) as e:
    raise HfError(f"the weights in {directory} are damaged: {e}") from e
  return from_tensors(tensors, cfg), cfg
