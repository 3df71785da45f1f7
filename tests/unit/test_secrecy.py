"""Masking: whole values, values that were cut, and values in names."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from evalfleet.channels.secrecy import Secrets, is_maskable

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


def test_a_key_of_several_lines_is_masked_however_it_is_printed() -> None:
    lines = [base64.b64encode(bytes(range(start, start + 48))).decode() for start in (0, 48, 96)]
    pem = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "c2hvcnQ5OQ==", "-----END PRIVATE KEY-----", ""])
    account = json.dumps({"type": "service_account", "private_key": pem}, indent=2)
    for value in (pem, account):
        secrets = Secrets({"KEY": value}, ("KEY",))
        for printed in (pem, pem.replace("\n", "\r\n"), "".join(f"    {line}\n" for line in pem.split("\n"))):
            masked = secrets.mask_text(printed)
            assert not any(line in masked for line in lines), masked
    assert "c2hvcnQ5OQ==" not in Secrets({"KEY": pem}, ("KEY",)).mask_text(f"  {pem}".replace("\n", "\n  "))
    assert Secrets({"KEY": account}, ("KEY",)).mask_text('{"type": 1}') == '{"type": 1}'


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


def test_a_log_of_16_mb_is_masked_in_no_more_memory_than_some_chunks() -> None:
    """Ten values in all their forms; what is read at once is bounded, and so is what is kept of it."""
    secrets = Secrets({f"KEY_{n}": f"sk-{n}-0123456789" for n in range(10)}, [f"KEY_{n}" for n in range(10)])
    block = (b"sk-1-012345678 " * (1 << 16) + base64.b64encode(b"sk-3-0123456789") + b"\n")[-(1 << 20) :]
    log, written = Endless(block, 16), Counted()
    secrets.copy_masked(log, written)
    assert written.total == 16 * (len(block) - len(base64.b64encode(b"sk-3-0123456789")) + len(b"***"))
    assert max(log.asked) <= 4 << 20
    assert written.longest <= 8 << 20


class Endless(io.BytesIO):
    """The same block, so many times; `asked`: how much was asked for at once."""

    def __init__(self, block: bytes, count: int) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._block = block
        self._left = count

    def read(self, size: int | None = -1, /) -> bytes:
        self.asked.append(1 << 62 if size is None or size < 0 else size)
        self._left -= 1
        return self._block if self._left >= 0 else b""


class Counted(io.BytesIO):
    """How much was written in all, and at most at once."""

    total = longest = 0

    def write(self, data: Any, /) -> int:
        self.total += len(data)
        self.longest = max(self.longest, len(data))
        return len(data)


@pytest.mark.parametrize(
    "encode",
    [
        lambda value: base64.b64encode(value),
        lambda value: base64.b64encode(b"x" + value + b"yz"),
        lambda value: base64.b64encode(b"user:" + value),
        lambda value: base64.urlsafe_b64encode(b"\xff\xfe" + value),
        lambda value: value.hex().encode(),
        lambda value: value.hex().upper().encode(),
        lambda value: quote(value, safe="").encode(),
        lambda value: quote_plus(value).encode(),
        lambda value: re.sub(b"%..", lambda found: found[0].lower(), quote_plus(value).encode()),
        lambda value: json.dumps(value.decode()).encode(),
    ],
)
def test_encoded_values_are_masked(encode: Callable[[bytes], bytes]) -> None:
    value = 'sk-p/roj "+" 0123456789?&=ümlaut'
    secrets = Secrets({"KEY": value}, ("KEY",))
    said = b"it said " + encode(value.encode()) + b" and no more"
    masked = secrets.mask(said)
    assert masked.startswith(b"it said ")
    assert masked.endswith(b" and no more")
    left = masked.removeprefix(b"it said ").removesuffix(b" and no more").replace(b"***", b"")
    assert len(left) <= 8, left  # the neighbours that were encoded with it


@pytest.mark.parametrize("cut", range(4, 29))
def test_a_value_that_was_cut_with_its_log_is_masked(cut: int) -> None:
    value = "sk-0123456789abcdefghijklmnopqr"
    mark = b"\n[... 4096 bytes left out ...]\n"
    secrets = Secrets({"KEY": value}, ("KEY",))
    for filler in (b"", b"x" * ((1 << 20) - 40), b"x" * (1 << 20)):
        for log in (
            filler + b"key: " + value[:cut].encode() + mark + b"tail" + filler,
            filler + b"head" + mark + value[cut - 1 :].encode() + b" was the key" + filler,
        ):
            out = io.BytesIO()
            secrets.copy_masked(io.BytesIO(log), out)
            assert value[:cut].encode() not in out.getvalue()
            assert value[cut - 1 :].encode() not in out.getvalue()
            assert b"***" in out.getvalue()
            assert mark in out.getvalue()


@pytest.mark.parametrize("value", ["true", "5000", "null", "1e10", "-0.125", "False", "score", "abc"])
def test_a_value_that_is_short_or_common_breaks_no_result(value: str) -> None:
    assert not is_maskable(value)
    result = b'{"score": 1, "success": true, "num_steps": 5000, "error": null}'
    assert Secrets({"KEY": value}, ("KEY",)).mask_result(result) == result


def test_what_is_masked_in_a_result_leaves_it_a_result() -> None:
    secrets = Secrets({"KEY": "num_steps", "OTHER": "123456789"}, ("KEY", "OTHER"))
    told = json.loads(secrets.mask_result(b'{"score": 1, "cost_usd": 123456789, "error": "of 123456789"}'))
    assert told == {"score": 1, "cost_usd": 123456789, "error": "of ***"}
