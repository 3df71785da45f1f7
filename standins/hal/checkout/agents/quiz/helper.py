"""Agents import what stands beside them."""


def second(words: str) -> str:
    return words.split()[1]
