"""Two tiny tokenizers: kr's own compact one, and one with Qwen3's conventions."""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kr.tools.base import ToolSpec

SCAFFOLD = ['{"name": "search", "arguments": {"queries": ["', '"]}}',
            '{"name": "open", "arguments": {"id": "r', '"}}']
TEXTS = ["Ayacucho is a city in Peru.", "population: 140033", "# Ayacucho", "r1 Ayacucho: a city",
         "What is the population of Ayacucho?", "New York (U.S.) | 8804190", "search query"] * 20

# The format of Qwen3's template: newlines between the pieces, thinking stripped from history.
QWEN_STYLE = r"""
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
  {{- '<|im_start|>system\n' + messages[0].content + '\n\n# Tools\n\n<tools>' }}
  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {{- '\n</tools>\n\nCall like this:\n<tool_call>\n' }}
  {{- '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- else %}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages[1:] %}
  {%- if m.role == 'user' %}
    {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 + 1 > ns.asked and m.reasoning_content %}
      {{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content.lstrip('\n') }}
    {%- for call in m.tool_calls or [] %}
      {%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""".strip()


# The format of SmolLM2's template: no tools, no thinking, and a system prompt unless one is given.
PLAIN_STYLE = r"""
{%- if messages[0].role != 'system' %}
  {{- '<|im_start|>system\nI am small.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""".strip()
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def object_schema(required, **properties):
  return {"type": "object", "properties": properties, "required": required,
          "additionalProperties": False}


SPECS = [
    ToolSpec("search", "Searches.", object_schema(
        ["queries"], queries={"type": "array", "items": {"type": "string", "maxLength": 200}})),
    ToolSpec("open", "Opens a page.", object_schema(
        ["id"], id={"type": ["string", "integer"]}, loc={"type": "integer", "minimum": 1})),
]


def write_tokenizer(path: pathlib.Path, template: str, *, jinja_file=False, tags=TAGS,
                    pad="<|endoftext|>") -> pathlib.Path:
  """A tokenizer with Qwen3's conventions: tags are added tokens but not special ones."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                                 r"\s*[\r\n]+|\s+(?!\S)|\s+"), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(
      vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
  tokenizer.add_special_tokens(
      [AddedToken(t, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
  tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in tags])
  path.mkdir(exist_ok=True)
  tokenizer.save(str(path / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
            "pad_token": pad, "clean_up_tokenization_spaces": False}
  if jinja_file:
    (path / "chat_template.jinja").write_text(template)
  else:
    config["chat_template"] = template
  (path / "tokenizer_config.json").write_text(json.dumps(config))
  return path
