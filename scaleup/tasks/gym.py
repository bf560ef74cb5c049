"""The verifier of reasoning-gym: which part of a response is scored, and its score.

Some of its scorers evaluate that part as Python or by sympy (countdown, n_queens, ...), others fail on
an unexpected form, so all of it runs in worker processes of verifier.py: a deadline, limited memory,
and a failure counts as 0. A process is no sandbox.
"""

from __future__ import annotations

import base64
import pickle
import re
from contextlib import suppress

from reasoning_gym import create_dataset

from scaleup.tasks.verifier import Verifier


def last_number(text: str) -> str | None:
    """The last number of a text, without separators of thousands: "5 - 7 = -2." gives "-2".

    A minus is a sign where it touches the number and no digit, letter or closing bracket before it:
    "3-1" and "3 - 1" end in 1.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    number = r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    numbers = re.findall(number, text)
    return numbers[-1].replace(",", "") if numbers else None


def tagged(text: str) -> str | None:
    """What stands between the last <answer> and the </answer> after it."""
    tags = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return tags[-1].strip() if tags else None


EXTRACT = {"last_number": last_number, "tagged": tagged, "text": str.strip}


def packed(entry: dict) -> str:
    """An entry of a data set as text, for a process of this run."""
    return base64.b64encode(pickle.dumps(entry)).decode()


def scorer(extract: str, **options) -> Verifier:
    """The verifier of `create_dataset(**options)`; its `answer` is a packed entry."""
    data = create_dataset(**options)

    def score(answer: str, text: str, timeout: float) -> float:
        entry = pickle.loads(base64.b64decode(answer))  # of the parent's own making
        return float(data.score_answer(EXTRACT[extract](text), entry))

    with suppress(Exception):
        data.score_answer(data[0]["answer"], data[0])  # what it imports is imported now
    return score
