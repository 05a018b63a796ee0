"""What tests of directories share."""

import json

import pytest
import tokenizers


@pytest.fixture
def tokenizer_dir(tmp_path):
  """A saved tokenizer with an end-of-turn and a padding token."""
  path = tmp_path / "tokenizer"
  path.mkdir()
  tok = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
  tok.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
  tok.save(str(path / "tokenizer.json"))
  (path / "tokenizer_config.json").write_text(json.dumps({
      "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
      "pad_token": "<|endoftext|>"}))
  (path / "chat_template.jinja").write_text("{{ messages }}")
  return path
