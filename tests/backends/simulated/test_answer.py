"""The tokenizer is reversible, and answers follow from what came before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.answer import Answer, OutputLengths, TextDecoder, find_stop
from backends.simulated.tokenizer import shipped_tokenizer

TOKENIZER = shipped_tokenizer()


def answer_ids(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    answer = Answer(TOKENIZER, prompt, choice=choice)
    return [answer.next_id() for _ in range(count)]


@given(st.text())
def test_any_text_survives_being_tokenized(text: str) -> None:
    ids = TOKENIZER.encode(text)

    assert TOKENIZER.decode(ids) == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert all(0 <= token_id < TOKENIZER.vocabulary_size for token_id in ids)


def test_common_words_are_one_token_each() -> None:
    assert len(TOKENIZER.encode("the water and the machine")) == 5


def test_an_answer_resumed_from_its_middle_goes_on_as_if_unbroken() -> None:
    prompt = TOKENIZER.encode("tell me about water")
    whole = answer_ids(prompt, 600)

    resumed = answer_ids(prompt + whole[:170], 430)

    assert resumed == whole[170:]


def test_an_answer_resumed_inside_a_split_character_completes_it() -> None:
    prompt = TOKENIZER.encode("tell me about water")
    whole = answer_ids(prompt, 600)
    half = next(
        at
        for at in range(600)
        if not TOKENIZER.decode([whole[at]]).isprintable() or "\ufffd" in TOKENIZER.decode([whole[at]])
    )

    resumed = answer_ids(prompt + whole[: half + 1], 20)

    assert resumed == whole[half + 1 : half + 21]


def test_text_of_half_a_character_is_held_back_until_it_is_whole() -> None:
    first, second = TOKENIZER.split_character("🌊")
    decoder = TextDecoder(TOKENIZER)

    texts = [decoder.push([first], last=False), decoder.push([second], last=False)]

    assert texts == ["", "🌊"]


def test_answers_hold_characters_of_several_bytes() -> None:
    text = TOKENIZER.decode(answer_ids(TOKENIZER.encode("hello"), 300))

    assert {len(character.encode()) for character in text} >= {1, 2, 3, 4}
    assert "\ufffd" not in text


def test_several_answers_to_one_prompt_differ() -> None:
    prompt = TOKENIZER.encode("hello")

    assert answer_ids(prompt, 20, choice=0) != answer_ids(prompt, 20, choice=1)


def test_drawn_lengths_have_the_median_asked_for_and_stay_in_bounds() -> None:
    lengths = OutputLengths(seed=7, median_tokens=129, sigma=0.93)

    drawn = sorted(lengths.draw([number], 0, at_least=1, at_most=4000) for number in range(2000))

    assert 115 < drawn[1000] < 145
    assert 360 < drawn[1800] < 500
    assert lengths.draw([5], 0, at_least=1, at_most=3) <= 3


def test_a_stop_string_is_found_where_the_answer_says_it() -> None:
    prompt = TOKENIZER.encode("hello")
    ids = answer_ids(prompt, 40)
    stop_word = TOKENIZER.decode([ids[9]])

    stop = find_stop(TOKENIZER, prompt, 0, (stop_word,), 40)

    assert stop is not None
    assert stop.text == TOKENIZER.decode(ids).split(stop_word)[0]
    assert stop.tokens <= 10
