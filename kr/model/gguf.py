"""GGUF files of the llama architecture, turned into a Hugging Face directory.

Quantised weights become the float32 numbers that they stand for. llama.cpp stores the rows of
queries and keys with rotary pairs side by side; Hugging Face keeps a pair half a head apart.
Needs the package `gguf`: pip install -e '.[smollm2]'.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from kr.model import families
from kr.model import hf
from kr.model import shards
from kr.model import tensors as layouts

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_FIELDS = {
  "llama.block_count", "llama.context_length", "llama.embedding_length",
  "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv",
  "llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base",
  "llama.attention.layer_norm_rms_epsilon", "llama.vocab_size", "llama.rope.dimension_count",
}
_CONTROL = 3  # llama.cpp's type of a special token
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# How text is cut before the byte pairs are merged, by llama.cpp's name for it.
_CUTS = {
  "gpt-2": _BYTES,
  "smollm": {"type": "Sequence",
             "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]},
}


def convert(source: str | os.PathLike[str], out_dir: str | os.PathLike[str],
            dtype: str = "float32") -> None:
  """Writes the Hugging Face directory (weights, config, tokenizer) of a GGUF file.

  Raises HfError for another architecture, tokenizer or tensor, by name.
  """
  try:
    import gguf
  except ImportError as e:
    raise hf.HfError("reading GGUF needs the package gguf: pip install -e '.[smollm2]'") from e
  try:
    reader = gguf.GGUFReader(source)
    fields = {k: f.contents() for k, f in reader.fields.items()}
  except (OSError, ValueError, KeyError, IndexError) as e:
    raise hf.HfError(f"{source} is no GGUF file, or damaged: {e}") from e
  try:
    config = _config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    files = _tokenizer(fields)
    cfg = families.from_hf(config)
  except KeyError as e:
    raise hf.HfError(f"{source} lacks {e.args[0]!r}") from e
  except (ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError) as e:
    raise e if isinstance(e, hf.HfError) else hf.HfError(
        f"{source} is damaged, or not supported: {e}") from e
  heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
  tensors = {}
  for t in reader.tensors:
    name, suffix = _name(t.name)
    tensors[name] = (t, heads.get(suffix, 0))

  def tensor(name: str) -> np.ndarray:
    t, n = tensors[name]
    w = np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), np.float32)
    w = w.reshape([int(size) for size in reversed(t.shape)])
    return _apart(w, n) if n else w

  specs = [shards.Spec(name, tuple(int(size) for size in reversed(t.shape)))
           for name, (t, _) in tensors.items()]
  _check(specs, {name: t.shape for name, t in layouts.table(cfg).items()}, source)
  hf.write(out_dir, config, files, specs, tensor, dtype)


def _check(specs: list[shards.Spec], wanted: dict[str, tuple[int, ...]],
           source: str | os.PathLike[str]) -> None:
  """Refuses tensors other than the model's, before anything is written."""
  found = dict(specs)
  for name in [*wanted, *found]:
    if found.get(name) != wanted.get(name):
      raise hf.HfError(f"{source} is damaged: {name} is {found.get(name, 'missing')}, its fields "
                       f"mean {wanted.get(name, 'no such tensor')}")


def _name(name: str) -> tuple[str, str]:
  """llama.cpp's name -> (Hugging Face's, llama.cpp's without the layer)."""
  stem, _, kind = name.rpartition(".")
  if kind == "weight" and stem in _TOP:
    return f"{_TOP[stem]}.weight", stem
  if kind == "weight" and stem.startswith("blk."):
    _, layer, part = stem.split(".", 2)
    if part in _LAYER:
      return f"model.layers.{layer}.{_LAYER[part]}.weight", part
  raise hf.HfError(f"GGUF tensor {name} is not supported")


def _apart(w: np.ndarray, heads: int) -> np.ndarray:
  """[heads·h, D] with rotary pairs (2i, 2i + 1) -> pairs (i, i + h/2)."""
  return w.reshape(heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
  """config.json of a LlamaForCausalLM."""
  if (kind := fields.get("general.architecture")) != "llama":
    raise hf.HfError(f"GGUF architecture {kind!r} is not supported; supported: 'llama'")
  if other := sorted(k for k in fields if k.startswith("llama.") and k not in _FIELDS):
    raise hf.HfError(f"GGUF field {other[0]} is not supported")
  heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
  head_dim = fields.get("llama.attention.key_length", width // heads)
  for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
    if fields.get(key, head_dim) != head_dim:
      raise hf.HfError(f"GGUF field {key}={fields[key]} is not supported; supported: {head_dim}")
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    "hidden_size": width,
    "num_hidden_layers": fields["llama.block_count"],
    "num_attention_heads": heads,
    "num_key_value_heads": fields["llama.attention.head_count_kv"],
    "head_dim": head_dim,
    "intermediate_size": fields["llama.feed_forward_length"],
    "rope_theta": fields["llama.rope.freq_base"],
    "rope_scaling": None,
    # Stored in float32: 1e-5 comes out as 9.99…e-6.
    "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
    "tie_word_embeddings": tied,
    "max_position_embeddings": fields["llama.context_length"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    **{f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
       for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
       if f"tokenizer.ggml.{key}_token_id" in fields},
  }


def _tokenizer(fields: dict[str, Any]) -> dict[str, bytes]:
  """tokenizer.json, tokenizer_config.json and generation_config.json."""
  if (kind := fields["tokenizer.ggml.model"]) != "gpt2":
    raise hf.HfError(f"GGUF tokenizer {kind!r} is not supported; supported: 'gpt2'")
  if (cut := fields.get("tokenizer.ggml.pre", "gpt-2")) not in _CUTS:
    raise hf.HfError(f"GGUF tokenizer.ggml.pre {cut!r} is not supported; supported: "
                     f"{', '.join(sorted(_CUTS))}")
  tokens = fields["tokenizer.ggml.tokens"]
  plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}
  special = {i: {"content": tokens[i], **plain}
             for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == _CONTROL}
  tokenizer = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": i, **token} for i, token in special.items()],
    "normalizer": None,
    "pre_tokenizer": _CUTS[cut],
    "post_processor": None,
    "decoder": {**_BYTES, "add_prefix_space": True},
    "model": {
      "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
      "ignore_merges": False, "vocab": {token: i for i, token in enumerate(tokens)},
      "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
    },
  }
  ids = {name: fields[f"tokenizer.ggml.{key}_token_id"]
         for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
         if f"tokenizer.ggml.{key}_token_id" in fields}
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": fields["llama.context_length"],
    **{f"{name}_token": tokens[i] for name, i in ids.items()},
    "added_tokens_decoder": {str(i): token for i, token in special.items()},
  }
  if "tokenizer.chat_template" in fields:
    settings["chat_template"] = fields["tokenizer.chat_template"]
  generation = {f"{name}_token_id": i for name, i in ids.items() if name != "unk"}
  return {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
          "tokenizer_config.json": _text(settings), "generation_config.json": _text(generation)}


def _text(data: dict[str, Any]) -> bytes:
  return (json.dumps(data, ensure_ascii=False, indent=2) + "\n").encode()
