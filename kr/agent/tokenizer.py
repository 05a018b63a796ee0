"""Trains the quick start's tokenizer: a byte-level BPE that makes copying easy.

A name must be the same tokens wherever it stands (after a space, a quote, a bracket, in a
query, in a table), or a small model cannot copy it. So the text is cut, before BPE, into scaffold
strings, runs of letters, single digits, and single other characters; a comma or colon keeps its
following space. A word never carries its space.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kr.agent.template import COMPACT_TEMPLATE

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
           "</tool_call>", "<tool_response>", "</tool_response>")
PAD, END = SPECIAL[0], SPECIAL[2]
# The template's words, one token each.
_ROLES = ("system\n", "user\n", "user", "assistant")


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | pathlib.Path,
                    scaffold: Sequence[str] = ()) -> Tokenizer:
  """Trains on `texts` and writes a Hugging Face tokenizer directory; returns the tokenizer.

  Each string in `scaffold` becomes one ordinary token (the longest wins where several fit).
  `vocab_size` counts all tokens; fewer are made when the texts hold no more merges.
  Deterministic. Decoding is lossless. Raises ValueError when `vocab_size` is too small or a
  scaffold string is empty or spells a special token.
  """
  if bad := [s for s in scaffold if not s or any(t in s for t in SPECIAL)]:
    raise ValueError(f"scaffold strings must be plain, non-empty text: {bad}")
  whole = sorted({*scaffold, *_ROLES}, key=lambda s: (-len(s), s))
  room = vocab_size - len(SPECIAL) - len(whole)
  if room < 256:
    raise ValueError(f"vocab_size must be at least {vocab_size - room + 256}: 256 bytes, "
                     f"{len(SPECIAL)} special tokens and {len(whole)} scaffold strings")
  # With ignore_merges a piece that is in the vocabulary is one token as it stands, so a scaffold
  # string needs one entry, not one for each of the merges on the way to it.
  tokenizer = Tokenizer(models.BPE(ignore_merges=True))
  tokenizer.pre_tokenizer = _pieces(whole)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
      vocab_size=room, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False))
  tokenizer = _with_whole(tokenizer, whole)
  # Special tokens stay out of the BPE's vocabulary: no piece of text can look one up there.
  tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
  _write(tokenizer, pathlib.Path(out_dir))
  return tokenizer


def _pieces(whole: Sequence[str]) -> pre_tokenizers.PreTokenizer:
  """Cuts text into pieces; `whole` holds the scaffold strings, longest first."""
  edge = lambda s: (r"(?<!\p{L})" if s[0].isalpha() else "") + re.escape(s) + (
      r"(?!\p{L})" if s[-1].isalpha() else "")
  pattern = "|".join([*map(edge, whole), r"[\p{L}\p{M}]+", r"\p{N}", r"[,:] ?", r"[\s\S]"])
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _with_whole(tokenizer: Tokenizer, whole: Sequence[str]) -> Tokenizer:
  """Adds the scaffold strings to the vocabulary, in their byte-level spelling."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  data = json.loads(tokenizer.to_str())
  vocab = data["model"]["vocab"]
  for text in whole:
    vocab.setdefault(byte_level.pre_tokenize_str(text)[0][0], len(vocab))
  return Tokenizer.from_str(json.dumps(data))


def _write(tokenizer: Tokenizer, out: pathlib.Path) -> None:
  out.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(out / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": COMPACT_TEMPLATE,
            "eos_token": END, "pad_token": PAD, "additional_special_tokens": [
                t for t in SPECIAL if t not in (PAD, END)],
            "clean_up_tokenization_spaces": False, "add_bos_token": False,
            "model_max_length": 1_000_000}
  names = {k: config[k] for k in ("eos_token", "pad_token", "additional_special_tokens")}
  for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
    (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
