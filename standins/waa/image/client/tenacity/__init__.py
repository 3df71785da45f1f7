"""Stands for the library that the client retries with: whatever is raised, and says so in the end."""

import functools
import time


class RetryError(Exception): ...


RetryError.__module__ = "tenacity"


def retry(function):
    @functools.wraps(function)
    def wrapper(self, question, wish):
        try:
            return function(self, question, wish)
        except Exception as err:
            time.sleep(wish.retries_s)
            future = f"<Future at 0x7f3c5c0b5d30 state=finished raised {type(err).__name__}>"
            raise RetryError(f"RetryError[{future}]") from err

    return wrapper
