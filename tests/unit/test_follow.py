"""Secrets in a file that comes in pieces, and pieces that nobody takes."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from evalfleet.channels.follow import MOST_WAITING, Follows, MaskedStream
from evalfleet.channels.link import Incoming
from evalfleet.channels.secrecy import SHORTEST, Secrets
from evalfleet.model import AttemptId, Piece

VALUES = {"A": "abab-secret", "C": "xyzzy"}
SECRETS = Secrets(VALUES, VALUES)
JOB = AttemptId("t.0")

texts = st.lists(st.sampled_from([*VALUES.values(), "abab", "se", "-", "\n", "xyz", "ä"]), max_size=12).map(
    lambda parts: "".join(parts).encode()
)


@given(texts, st.lists(st.integers(0, 60), max_size=6), st.data())
def test_pieces_show_what_the_whole_would_wherever_it_is_cut_and_taken_up_again(
    text: bytes, cuts: list[int], data: st.DataObject
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    stream, shown, position = MaskedStream(SECRETS, 0), b"", 0
    for start, stop in itertools.pairwise(edges):
        if data.draw(st.booleans()):  # the connection was lost: on from where the last piece ended
            stream, start = MaskedStream(SECRETS, stream.offset), stream.offset
        begins, new = stream.feed(start, text[start:stop], over=stop == len(text))
        assert begins == position
        position = stream.offset
        shown += new
    assert position == len(text)
    masked = SECRETS.mask(text)
    begun = SECRETS.begun_at_end(masked)
    assert shown == (masked[:-begun] + b"***" if begun >= SHORTEST else masked)


def test_one_that_begins_or_ends_in_the_middle_of_a_value_does_not_show_the_rest_of_it() -> None:
    stream = MaskedStream(SECRETS, 100)
    assert stream.feed(100, b"zzy", over=False) == (100, b"")
    assert stream.feed(103, b"!\n", over=False) == (100, b"zzy!\n"), "three letters are none"
    stream = MaskedStream(SECRETS, 100)
    assert stream.feed(100, b"b-secret on", over=False) == (100, b"*** on")
    assert stream.feed(111, b"\nabab-s", over=True) == (111, b"\n***")


def test_after_a_gap_nothing_is_joined() -> None:
    stream = MaskedStream(SECRETS, 0)
    assert stream.feed(0, b"one xyz", over=False) == (0, b"one ")
    assert stream.feed(500, b"zy two", over=False) == (500, b"zy two")
    assert stream.offset == 506


def test_who_takes_no_pieces_asks_for_them_again_and_misses_none() -> None:
    asyncio.run(_take_none_at_first())


async def _take_none_at_first() -> None:
    asked: list[int] = []
    dropped: list[int] = []
    follows: Follows

    async def ask(op: str, body: dict[str, object]) -> Incoming:
        offset = body["offset"]
        assert isinstance(offset, int)
        asked.append(offset)
        for n in range(2 * MOST_WAITING):
            over = offset + n == 3 * MOST_WAITING
            assert follows.on_piece(Incoming(follower=1, offset=offset + n, data=b"o", over=over))
        return Incoming(state="following")

    follows = Follows(ask, dropped.append)
    pieces = [piece async for piece in follows.pieces(JOB, "log", 0, SECRETS)]
    assert [piece.offset for piece in pieces] == list(range(3 * MOST_WAITING + 1))
    assert asked == [0, MOST_WAITING, 2 * MOST_WAITING, 3 * MOST_WAITING]
    assert set(dropped) == {1}, "the supervisor is told to send no more"
    assert pieces[-1] == Piece(3 * MOST_WAITING, b"o", 3 * MOST_WAITING + 1)
    assert not follows


def test_pieces_that_no_supervisor_sends_are_told() -> None:
    async def ask(op: str, body: dict[str, object]) -> Incoming:
        raise AssertionError

    async def main() -> None:
        follows = Follows(ask, lambda number: None)
        assert follows.on_piece(Incoming(follower=7, data=b"late"))
        assert not follows.on_piece(Incoming(follower=7, offset=-1))
        assert not follows.on_piece(Incoming(follower=7, data=bytes((1 << 20) + 1)))

    asyncio.run(main())
