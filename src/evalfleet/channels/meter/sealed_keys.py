"""How the real keys get to the meter past all that carries them: sealed by the controller, opened there.

What passes through an SSH server and a supervisor may stay in their memory, where an agent that gets hold of
them would find it. So each meter makes a pair of numbers at its start (Diffie and Hellman's, in group 14 of
RFC 3526), tells the public one, and orders with keys come sealed for it. This does not protect from a
supervisor that lies: that one starts the meter, and could read its memory, too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import lru_cache

PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
GENERATOR = 2
SECRET_BYTES = 32


class SealingPair:
    """A secret number, and the public one by which others seal for whoever has it."""

    def __init__(self) -> None:
        self._secret = int.from_bytes(os.urandom(SECRET_BYTES), "big")
        self.public = f"{pow(GENERATOR, self._secret, PRIME):x}"

    def key(self, public: str, nonce: str) -> bytes:
        """What only the two have in common, for one message. Raises ValueError."""
        other = int(public, 16)
        if not 1 < other < PRIME - 1:
            raise ValueError("that is no public number of group 14")
        shared = pow(other, self._secret, PRIME).to_bytes(256, "big")
        return hashlib.sha256(shared + nonce.encode()).digest()


@lru_cache(maxsize=1)
def _our_pair() -> SealingPair:
    """One for all that this process seals: a thousand machines are told in a short time."""
    return SealingPair()


def seal(data: bytes, public: str) -> dict[str, str]:
    """`data` as only the one with this public number can read it. Raises ValueError."""
    pair, nonce = _our_pair(), os.urandom(16).hex()
    key = pair.key(public, nonce)
    hidden = _mixed(data, key)
    return {"public": pair.public, "nonce": nonce, "data": hidden.hex(), "mark": _mark(hidden, key)}


def unseal(sealed: dict[str, str], pair: SealingPair) -> bytes:
    """Raises ValueError if it was sealed for somebody else, or has been changed."""
    key = pair.key(sealed["public"], sealed["nonce"])
    hidden = bytes.fromhex(sealed["data"])
    if not hmac.compare_digest(_mark(hidden, key), sealed["mark"]):
        raise ValueError("these orders were sealed for another meter")
    return _mixed(hidden, key)


def _mixed(data: bytes, key: bytes) -> bytes:
    """The same function hides and shows."""
    stream = hashlib.shake_256(b"stream" + key).digest(len(data))
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return mixed.to_bytes(len(data), "big")


def _mark(hidden: bytes, key: bytes) -> str:
    return hmac.new(b"mark" + key, hidden, "sha256").hexdigest()
