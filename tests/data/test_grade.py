import decimal

from hypothesis import given
from hypothesis import strategies as st
import pytest

from kr import types
from kr.data import grade as grade_lib
from kr.data.grade import grade


def _number(answer):
  return types.Task("n", "What is the population of Ayacucho?", answer, "onehop", "number")


def _text(answer, *aliases):
  return types.Task("t", "What is the capital of Peru?", answer, "onehop", "text", aliases)


@pytest.mark.parametrize("answer", [
    "140033", " 140033\n", "140,033", "140 033", "140'033", "140\u202f033", "140033.", "140033.0",
    "+140033", "140033 people", "140,033 inhabitants.", "1.40033e5"])
def test_spellings_of_the_right_integer_are_right(answer):
  assert grade(_number("140033"), answer)


@pytest.mark.parametrize("answer", [
    "", " ", ".", "-140033", "140034", "140032.9", "140033.1", "14003", "1400330", "140.033",
    "14,0033", "1,40033", "140033 or 140034", "140033, 140034", "140033 140034", "140033/140034",
    "140033 or",
    "about 140033", "the answer is 140033", "140033 million", "140033 thousand people",
    "140033 people or more", "What is the population of Ayacucho? 140033",
    "What is the population of Ayacucho?", "nan", "inf",
    "0x22301", "140033\n140034", "140033..", "\u0661\u0664\u0660\u0660\u0663\u0663", "140033 km km",
    "[140033]",
    "one hundred forty thousand thirty-three", "140033±1000", "140033-150000", "1e99", "1e-99"])
def test_wrong_hedged_and_hostile_numbers_are_wrong(answer):
  assert not grade(_number("140033"), answer)


def test_a_decimal_is_right_within_a_thousandth_of_its_size():
  # 55.845 / 1000 = 0.055845: from 55.789155 to 55.900845.
  task = _number("55.845")
  assert grade(task, "55.789155") and grade(task, "55.900845") and grade(task, "55.845 u")
  assert not grade(task, "55.789154") and not grade(task, "55.900846")
  negative = _number("-13.16")
  assert grade(negative, "-13.16\u00b0") and grade(negative, "\u221213.16")
  assert not grade(negative, "13.16")


@pytest.mark.parametrize("answer", [
    "The Hague", "the hague", "HAGUE", " The  Hague. ", "The-Hague", "Den Haag"])
def test_spellings_of_the_right_text_are_right(answer):
  assert grade(_text("The Hague", "Den Haag"), answer)


def test_accents_and_apostrophes_do_not_matter():
  assert grade(_text("Bogota"), "Bogot\u00e1")
  assert grade(_text("N'Djamena"), "N\u2019Djamena") and grade(_text("N'Djamena"), "NDjamena")


@pytest.mark.parametrize("answer", [
    "", "the", "...", "Lim", "Lima Peru", "Lima or Quito", "Lima, Quito", "Lima Lima", "not Lima",
    "It is Lima", "What is the capital of Peru?", "What is the capital of Peru? Lima",
    "Lima\nQuito",
    "Lima" + " " * 300, "Lima|Quito|Bogota", "*"])
def test_wrong_hedged_and_hostile_texts_are_wrong(answer):
  assert not grade(_text("Lima"), answer)


def test_no_answer_is_wrong():
  assert not grade(_number("1"), None) and not grade(_text("Lima"), None)


@pytest.mark.parametrize("answer", [
    "1" * 5_000_000, "1," * 2_000_000, "\u0301" * 1_000_000, "Lima " * 1_000_000])
def test_enormous_answers_are_wrong_whatever_they_hold(answer):
  assert not grade(_number("111"), answer) and not grade(_text("Lima"), answer)


def test_a_broken_task_is_an_error_and_not_a_wrong_answer():
  with pytest.raises(ValueError, match="not a number"):
    grade(_number("many"), "3")
  with pytest.raises(ValueError, match="answer_type"):
    grade(types.Task("x", "?", "1", "onehop", "date"), "1")


@given(st.text(max_size=220))
def test_any_text_is_graded_without_an_exception(answer):
  assert grade(_number("140033"), answer) in (True, False)
  assert grade(_text("Lima"), answer) in (True, False)


@given(st.text(alphabet="0123456789+-,. eE_'kmor", max_size=24))
def test_what_is_read_as_a_number_has_its_digits(answer):
  value = grade_lib.number(answer)
  if value is not None and "e" not in answer.lower():
    digits = "".join(c for c in answer.rstrip(" .") if c in "0123456789.")
    assert abs(value) == decimal.Decimal(digits)


@given(st.integers(-10**12, 10**12))
def test_every_integer_reads_as_itself_with_and_without_separators(n):
  task = _number(str(n))
  assert grade(task, str(n)) and grade(task, f"{n:,}")
  assert not grade(task, str(n + 1))
