"""What argparse takes as a number, for scripts that measure: a wrong one ends them in one line, before they begin."""

import argparse
from collections.abc import Callable

__all__ = ["at_least", "list_at_least"]


def at_least(lowest: int) -> Callable[[str], int]:
    """`type=` of an option that takes a whole number."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest:
            raise argparse.ArgumentTypeError(f"takes a whole number of {lowest} or more, got {text!r}")
        return number

    return parse


def list_at_least(lowest: int) -> Callable[[str], list[int]]:
    """`type=` of an option that takes whole numbers with commas between them."""

    def parse(text: str) -> list[int]:
        try:
            return [at_least(lowest)(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            message = f"takes whole numbers of {lowest} or more with commas between them, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return parse
