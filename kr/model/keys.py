"""A config.json read with care: values are checked, and what nobody read is refused.

`kr.model.families` asks for the keys of a family by this.
"""

from __future__ import annotations

import math
from typing import Any

# Keys that do not change what a decoder computes: bookkeeping, initialisation, the losses of
# others' training, how others run it.
HARMLESS = set("""
  architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path
  auto_map
  use_cache initializer_range pretraining_tp bos_token_id eos_token_id pad_token_id unk_token_id
  sep_token_id decoder_start_token_id tokenizer_class task_specific_params
  _attn_implementation attn_implementation _attn_implementation_autoset return_dict
  output_hidden_states output_attentions torchscript use_bfloat16 id2label label2id problem_type
  finetuning_task chunk_size_feed_forward output_router_logits router_aux_loss_coef aux_loss_alpha
  seq_aux ep_size is_llama_config transformers.js_config unsloth_version unsloth_fixed
  num_nextn_predict_layers num_mtp_layers model_max_length
""".split())
REQUIRED = object()
# The least that a whole number may be, and the most.
_COUNTS = {
  **dict.fromkeys("""
    vocab_size hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size
    max_position_embeddings original_max_position_embeddings num_experts_per_tok
    moe_intermediate_size decoder_sparse_step moe_layer_freq kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim n_group topk_group""".split(), (1, 2 ** 31)),
  **dict.fromkeys("""
    q_lora_rank n_shared_experts first_k_dense_replace sliding_window
    max_window_layers""".split(), (0, 2 ** 31)),
  **dict.fromkeys("num_hidden_layers num_experts num_local_experts n_routed_experts".split(),
                  (1, 2 ** 16)),
}
_POSITIVE = set("""rms_norm_eps rope_theta factor low_freq_factor high_freq_factor beta_fast
  beta_slow attention_factor routed_scaling_factor""".split())
_KINDS = {"mlp_only_layers": list, "layer_types": list, "rope_scaling": dict,
          "rope_parameters": dict}


class Keys:
  """A config.json that remembers which of its keys were asked for."""

  def __init__(self, data: dict[str, Any]):
    self._data = data
    self._seen = set(HARMLESS)

  def take(self, key: str, default: Any = REQUIRED) -> Any:
    """A key's value; the default if it is missing or null. Raises KeyError, ValueError."""
    self._seen.add(key)
    if (value := self._data.get(key)) is not None:
      _check(key, value)
      return value
    if default is REQUIRED:
      raise KeyError(key)
    return default

  def flag(self, key: str, default: bool) -> bool:
    """True or false; refuses anything else."""
    self.only(key, False, True)
    return bool(self.take(key, default))

  def only(self, key: str, *allowed: Any) -> None:
    """Refuses any value but those; missing and null pass."""
    if (value := self.take(key, None)) is not None and value not in allowed:
      raise ValueError(f"{key}={value!r} is not supported; supported: "
                       f"{', '.join(map(repr, allowed))}")

  def end(self) -> None:
    """Refuses whatever nobody asked for: it might change the result."""
    rest = [k for k, v in self._data.items() if k not in self._seen and v is not None]
    if rest:
      raise ValueError(f"{rest[0]}={self._data[rest[0]]!r} is not supported: kr does not know "
                       f"what it means for this family")


def _check(key: str, value: Any) -> None:
  """Refuses what a key cannot be: text for a number, nothing, not a number, the absurd."""
  if key in _COUNTS:
    least, most = _COUNTS[key]
    if type(value) is not int or not least <= value <= most:
      raise ValueError(f"{key}={value!r} must be a whole number from {least} to {most}")
  if key in _POSITIVE and (type(value) not in (int, float) or not 0 < value < math.inf):
    raise ValueError(f"{key}={value!r} must be a number above 0")
  if key in _KINDS and not isinstance(value, _KINDS[key]):
    raise ValueError(f"{key}={value!r} must be a {_KINDS[key].__name__}")
