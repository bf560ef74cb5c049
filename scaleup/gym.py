"""Answers to problems of reasoning-gym: what of a text is the answer, and what it is worth.

Some of its verifiers evaluate the answer as Python or by sympy (countdown, n_queens, ...), others fail
on an answer of an unexpected form, so all of it runs in processes of scaleup/verify.py: a deadline,
limited memory, and a failure counts as 0. A process is no sandbox.
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Callable
from contextlib import suppress

from reasoning_gym import create_dataset


def last_number(text: str) -> str | None:
    """The last number of a text, without separators of thousands: "5 - 7 = -2." gives "-2".

    A minus is a sign where it touches the number and no digit, letter or closing bracket before it:
    "3-1" and "3 - 1" end in 1.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    number = r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    found = re.findall(number, text)
    return found[-1].replace(",", "") if found else None


def tagged(text: str) -> str | None:
    """What stands between the last <answer> and the </answer> after it."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


EXTRACT = {"last_number": last_number, "tagged": tagged, "text": str.strip}


def packed(entry: dict) -> str:
    """An entry of a data set as text, for a process of this run."""
    return base64.b64encode(pickle.dumps(entry)).decode()


def scorer(extract: str, **options) -> Callable[[str, str, float], float]:
    """The verifier (packed entry, text of an answer, timeout) of `create_dataset(**options)`."""
    data = create_dataset(**options)

    def score(answer: str, text: str, timeout: float) -> float:
        entry = pickle.loads(base64.b64decode(answer))  # of the parent's own making
        return float(data.score_answer(EXTRACT[extract](text), entry))

    with suppress(Exception):
        data.score_answer(data[0]["answer"], data[0])  # what it imports is imported now
    return score
