"""The on-policy guard: what in sampling settings or in a server's would change the distribution.

Every trained token must be sampled from the model's own untouched distribution. Judgements:

- A grammar backend that is merely available (`grammar_backend: "xgrammar"` is SGLang's default)
  is no fault: it acts only on requests that carry a schema, and kr's never do. The same holds for
  `enable_custom_logit_processor`.
- Default sampling parameters taken from the model (`sampling_defaults: "model"`) are no fault:
  kr's requests name every parameter.
- Preferred sampling parameters, parsers and watermarks are refused even where they would not touch
  a native request: they are asked for by whoever wants changed output.
- Deterministic inference is refused: requests without a seed then share one, so that all samples
  of a group are the same.
- Speculative decoding is refused: its acceptance thresholds may change the distribution.
"""

from __future__ import annotations

from typing import Any, Mapping

# Each parameter's value that leaves the distribution alone; sent with every request.
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
_SHAPING = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "grammar",
            "custom_logit_processor", "custom_params", "stop", "stop_regex", "sampling_seed")

# Server settings that must be off, and what to do when one is on.
_SERVER = {
    "tool_call_parser": "start the server without --tool-call-parser",
    "reasoning_parser": "start the server without --reasoning-parser",
    "preferred_sampling_params": "start the server without --preferred-sampling-params",
    "speculative_algorithm": "start the server without --speculative-algorithm",
    "grammar": "start the server without a grammar",
    "guided_decoding": "start the server without guided decoding",
    "json_schema": "start the server without a JSON schema",
    "regex": "start the server without a regular expression",
    "ebnf": "start the server without a grammar",
    "structural_tag": "start the server without a structural tag",
    "enable_deterministic_inference":
        "start the server without --enable-deterministic-inference; with it all samples of a "
        "group are the same",
    "enable_watermark": "start the server without --enable-watermark",
    "allow_auto_truncate": "start the server without --allow-auto-truncate; a prompt must be "
                           "refused, not shortened",
}
_OFF = (None, False, "", "none", "None", "NONE", {}, [])


def sampling_fault(sampling: Mapping[str, Any]) -> str | None:
  """What in the sampling settings changes the distribution, or None."""
  for name, value in sampling.items():
    if name in NEUTRAL:
      if value != NEUTRAL[name]:
        return (f"sampling setting {name}={value!r} changes the policy's distribution; on-policy "
                f"training needs {name}={NEUTRAL[name]!r}: set it so, or leave it out")
    elif name in _SHAPING and value not in _OFF:
      return (f"sampling setting {name}={value!r} constrains what is sampled; on-policy training "
              f"needs it left out")
  return None


def server_fault(info: Mapping[str, Any]) -> str | None:
  """What in a server's settings (as `/server_info` and `/model_info` say) is refused, or None."""
  for name, remedy in _SERVER.items():
    value = info.get(name)
    if value not in _OFF:
      return (f"the policy server runs with {name}={value!r}, so its samples are not on-policy; "
              f"{remedy}")
  return None


def logprob_fault(sampled: list[float], scored: list[float], tolerance: float) -> str | None:
  """Compares logprobs given with samples to those of the same tokens scored afterwards.

  The mean absolute difference counts: rounding makes single tokens differ, while a temperature,
  penalty or other change moves them all.
  """
  gap = sum(abs(a - b) for a, b in zip(sampled, scored, strict=True)) / max(1, len(sampled))
  if not gap <= tolerance:
    return (f"the policy server's logprobs of sampled tokens differ from its own scores of the "
            f"same tokens by {gap:.2g} on average (allowed: {tolerance:g}), so something changes "
            "the distribution or the logprobs; start the server with plain sampling")
  return None
