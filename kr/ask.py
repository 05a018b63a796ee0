r"""Asks a trained policy one question and shows its research as it happens.

    python -m kr.ask --workdir=runs/quickstart "What is the population of Ayacucho?"
"""

from __future__ import annotations

import sys
from typing import TextIO

from absl import flags

from kr import serving
from kr import wiring
from kr.agent import loop
from kr.eval.page import format_call, printable
from kr.types import StopReason, Task, Trajectory, Turn, trajectory_id

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "The run whose policy answers.")
_STEP = flags.DEFINE_string("step", "latest", "Which policy: latest, start, or a step's number.")

_WHY = {
    StopReason.MAX_TURNS: "it used up its turns",
    StopReason.CONTEXT_OVERFLOW: "its context is full",
    StopReason.TIME_LIMIT: "its time is up",
    StopReason.INVALID_ACTION: "its action was not valid",
}


class Show:
  """Prints turns as they come: thinking, calls, observations, and how it ended.

  Whatever a model or a page wrote is printed without control characters. Colours only on a
  terminal.
  """

  def __init__(self, out: TextIO = sys.stdout):
    self._out = out
    self._color = out.isatty()
    self._seen: set[int] = set()

  def turn(self, trajectory: Trajectory, turn: Turn) -> None:
    """Shows what is new: a turn when it has been read, its results when they are there."""
    number = len(trajectory.turns)
    if number not in self._seen:
      self._seen.add(number)
      self._print(f"[{number}] {turn.think}" if turn.think else f"[{number}]", "2")
      for call in turn.calls:
        self._print(f"  → {format_call(call)}", "36")
    if turn.calls and turn.results:
      for result in turn.results:
        self._print("\n".join(f"    {line}" for line in result.text.splitlines()),
                    "0" if result.ok else "31")

  def end(self, trajectory: Trajectory) -> None:
    """Shows the answer, or why there is none."""
    if trajectory.stop is StopReason.ANSWERED:
      self._print(f"\n{trajectory.answer}", "1")
      return
    why = _WHY.get(trajectory.stop, str(trajectory.stop))
    detail = trajectory.meta.get("fault_detail") or trajectory.meta.get("error")
    fault = f" ({trajectory.fault}{': ' + detail if detail else ''})" if trajectory.fault else (
        f" ({detail})" if detail else "")
    self._print(f"\nno answer: {why}{fault}", "31")

  def _print(self, text: str, style: str) -> None:
    text = printable(text)
    print(f"\x1b[{style}m{text}\x1b[0m" if self._color else text, file=self._out, flush=True)


async def ask(question, policy, toolbox, chat, limits, show: Show) -> Trajectory:
  """Runs the question and shows it. Raises UserError if the infrastructure fails."""
  task = Task(id="ask", question=question, answer="", kind="ask")
  trajectory = await loop.run(task, policy, toolbox, chat, limits, on_turn=show.turn,
                              trajectory_id=trajectory_id("ask", question))
  if trajectory.stop is StopReason.INFRASTRUCTURE:
    raise wiring.UserError(trajectory.meta.get("error", "the inference server failed"))
  show.end(trajectory)
  return trajectory


def main(argv: list[str]) -> None:
  # Bytes of the command line that are not UTF-8 come as lone surrogates.
  words = " ".join(argv[1:]).encode("utf-8", "surrogateescape")
  question = words.decode("utf-8", "replace").strip()
  if not question:
    raise wiring.UserError(
        "there is no question; ask one: "
        'python -m kr.ask --workdir=… "What is the population of Ayacucho?"')
  workdir, config = wiring.Workdir.open(_WORKDIR.value)
  policy_dir, name = workdir.policy(_STEP.value)
  with serving.session(config, workdir, policy_dir) as session:
    print(f"asking the policy {name} of {workdir.path}", file=sys.stderr)
    session.run(lambda policy: ask(question, policy, session.toolbox, session.chat,
                                   wiring.limits(config), Show()))


if __name__ == "__main__":
  wiring.main_guard(main)
