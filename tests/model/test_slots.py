"""Which slot a request gets, and what it need not compute."""

import numpy as np

from kr.model.slots import Slots


def fill(slots, slot, tokens, busy=False, filled=None):
  """Puts tokens into a slot as if a request had computed all of them."""
  tokens = np.asarray(tokens, np.int32)
  slots.held[slot, :len(tokens)] = tokens
  slots.known[slot] = len(tokens)
  slots.filled[slot] = len(tokens) if filled is None else filled
  slots.busy[slot] = busy


def place(slots, tokens):
  return slots.place(np.asarray(tokens, np.int32), len(tokens) - 1)


A = list(range(100, 150))
B = list(range(200, 250))


def test_the_next_turn_continues_in_its_own_slot():
  slots = Slots(3, 128)
  fill(slots, 0, B)
  fill(slots, 1, A)
  assert place(slots, A + [7, 8]) == (1, 1, 50)


def test_the_same_prompt_again_still_computes_its_last_token():
  slots = Slots(2, 128)
  fill(slots, 0, A[:-1])
  assert place(slots, A[:-1]).reused == 48


def test_a_sibling_copies_the_prefix_and_leaves_the_owner_its_slot():
  slots = Slots(3, 128)
  fill(slots, 1, A + [1, 2, 3])
  got = place(slots, A + [9])
  assert got.slot != 1 and got.source == 1 and got.reused == 50


def test_a_prefix_can_be_copied_from_a_running_request():
  slots = Slots(2, 128)
  fill(slots, 0, A, busy=True, filled=49)
  assert place(slots, A + [1]) == (1, 0, 49)


def test_a_short_common_prefix_is_not_copied():
  slots = Slots(2, 128)
  fill(slots, 0, A[:10] + B)
  assert place(slots, A) == (1, 1, 0)


def test_a_request_waits_while_its_prefix_is_computed_for_another():
  slots = Slots(2, 128)
  fill(slots, 0, A, busy=True, filled=0)
  assert place(slots, A) is None
  assert place(slots, B) is not None
  slots.filled[0] = 49
  assert place(slots, A) == (1, 0, 49)


def test_the_least_recently_used_slot_is_evicted():
  slots = Slots(3, 128)
  for slot, first in ((2, 0), (0, 60), (1, 300)):
    fill(slots, slot, range(first, first + 50), busy=True)
    slots.release(slot)
  assert place(slots, [7, 7, 7]).slot == 2


def test_every_slot_busy_means_wait():
  slots = Slots(1, 128)
  fill(slots, 0, A, busy=True)
  assert place(slots, B) is None


def test_after_a_flush_nothing_old_is_reused_not_even_from_a_running_request():
  slots = Slots(3, 128)
  fill(slots, 0, A)
  fill(slots, 1, B, busy=True)
  slots.flush()
  assert place(slots, A + [1]).reused == 0
  assert place(slots, B + [1]).reused == 0
  slots.release(1)
  assert slots.filled[1] == 0


def test_a_released_slot_forgets_what_was_never_computed():
  slots = Slots(2, 128)
  fill(slots, 0, A, busy=True, filled=20)
  slots.release(0)
  assert slots.known[0] == 20
  assert place(slots, A).reused == 20


def test_a_prompt_of_one_token_reuses_nothing():
  slots = Slots(2, 128)
  fill(slots, 0, A)
  assert place(slots, A[:1]).reused == 0
