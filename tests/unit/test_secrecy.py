"""Masking: whole values, values that were cut, and values in names."""

from __future__ import annotations

import io

import pytest

from evalfleet.channels.secrecy import Secrets

VALUE = 'key-"0123456789"-end'
SECRETS = Secrets({"KEY": VALUE, "SHORT": "abc", "OTHER": "unused"}, ("KEY", "SHORT"))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (VALUE[5:] + " and more", "*** and more"),
        (VALUE[-4:] + "\n", "***\n"),
        (VALUE[-3:] + "\n", VALUE[-3:] + "\n"),
        (VALUE, "***"),
        (r"0123456789\"-end and " + VALUE, "*** and ***"),
        ("nothing of it", "nothing of it"),
        ("", ""),
    ],
)
def test_the_end_of_a_text_may_begin_within_a_value(text: str, masked: str) -> None:
    assert SECRETS.mask_end(text) == masked


def test_only_named_values_that_are_long_enough_are_looked_for() -> None:
    assert SECRETS.mask_text("abc unused " + VALUE) == "abc unused ***"
    assert not Secrets({"SHORT": "abc"}, ("SHORT",))


def test_names_are_looked_at_as_bytes() -> None:
    assert SECRETS.in_name(f"a/{VALUE}.txt")
    assert SECRETS.in_name(f"bad\udcff{VALUE}")
    assert not SECRETS.in_name("a/key.txt")


@pytest.mark.parametrize("before", [0, 1, 7, (1 << 20) - 5, 1 << 20])
def test_a_value_across_two_chunks_is_masked(before: int) -> None:
    masked = io.BytesIO()
    data = b"x" * before + VALUE.encode() + b"y" * 10
    SECRETS.copy_masked(io.BytesIO(data), masked)
    assert masked.getvalue() == b"x" * before + b"***" + b"y" * 10
    assert SECRETS.found_in(io.BytesIO(data))
