"""Comparability first: which tokens may be measured at all, and the reason for each that may not."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from simlab.token_log.comparable import examine
from simlab.token_log.faults import Finding
from simlab.token_log.tokens import Tokens

AGES = ("placeholder version", "negative age")  # the log-probs of such tokens are in order
CAUSES = {  # what is asked, and what to try if the answer is no
    "lengths": ("the lists of a row are of one length", "Write ids, mask and log-probs of a row from one list; never cut the longer one."),
    "other ids": ("the ids beside the log-probs are those of the tokens", "Write ids and log-probs from one answer of the engine; never re-tokenise text."),
    "missing": ("every row has both log-probs", "Leave such rows out of the loss too, or log the missing side."),
    "unused column": ("further columns are as long as the log-probs", "Log the column for the tokens of the response only."),
    "not finite": ("no sampled token has a log-prob of -inf or NaN", "Look for a sampled token outside of the trainer's own top-p or top-k; mask it, never set it to 0."),
    "above 0": ("no log-prob is above 0", "Check the sign, and that the column holds log-probs, not rewards or logits."),
    "rounding": ("no log-prob is above 0 by rounding", "Nothing: it is read as 0."),
    "duplicate": ("no response is there twice", "Log one rank of a context- or tensor-parallel group."),
    "identical": ("the columns differ somewhere", "The ratio is 1 and no method can act: log what the engine returned, or re-score before the step."),
    "placeholder": ("no side is exactly 0.0 where the other is far below", "Mask tokens that were not sampled (prompt, tool, appended end), or log their real log-prob."),
    "absurd": ("no gap reaches 20 nats", "Look at the first of these tokens: wrong ids, or a token outside of the truncated support."),
    "shift": ("the gap is smallest where the columns stand", "Shift the labels of one side; log-prob t must belong to token t on both."),
    "other weights": ("half of the gaps are below 2 nats", "Check the weight push: version, checksum, and the prefix cache of the engine."),
    "temperature": ("neither column is sharper than noise allows", "Divide the logits by one temperature on both sides."),
    "truncation": ("E[e^d] is 1, or mean d is 0", "Train without top-p, top-k and min-p, or replay the truncated support in the trainer."),
    "offset": ("no side is larger by a constant", "Look for a normaliser that one side forgets (vocabulary padding, a penalty, a bias)."),
    "placeholder version": ("no sampled token has a version below 0", "Write the version of the weights that sampled each token; -1 is for the prompt."),
    "negative age": ("no token was sampled by weights later than the trainer's", "Take the version when the request starts, and the trainer's before the step."),
    "grid": ("log-probs are not rounded to 8 or 11 bits", "Compute and write log-probs in float32."),
    "steps": ("gaps are not multiples of one step", "Compute the head's logits in float32 on both sides, or in neither."),
    "unfinished": ("every step is complete", "Audit it again when its writer is done."),
}  # fmt: skip


class Check(NamedTuple):
    """One question to a log, and its answer."""

    metric: str
    # quiet, note, alarm, set aside (some tokens), unusable (all tokens), not computable
    status: str
    sentence: str  # of a quiet check: what was asked
    value: float | None = None
    threshold: float | None = None
    null: str = ""  # what is expected where nothing is wrong
    place: str = ""
    next: str = ""  # what to try

    def plain(self) -> dict:
        """For audit.json: numbers that JSON has."""
        out = self._asdict()
        for name in ("value", "threshold"):
            if out[name] is not None and not math.isfinite(out[name]):
                out[name] = None
        return out


def comparability(t: Tokens, on_rows: list[Finding]) -> tuple[np.ndarray, list[Check]]:
    """Tokens that may be measured `[N]`, and every check, those that fired first.

    `on_rows` are the findings of the reader. A failed check takes out the tokens it speaks of, or all of
    them where it is about the columns; copied columns stay, as their ratio of 1 is the answer.
    """
    keep = t.mask.copy()
    findings = examine(t, lag=True)
    checks = []
    for finding in [*on_rows, *findings]:
        status = "note"
        if finding.cause == "identical":
            status = "alarm"
        elif finding.cause in AGES:
            status = "set aside"
        elif finding.tokens is not None:
            status = "set aside" if finding.refuses else "note"
            keep[finding.tokens] = False
        elif finding.cause == "lengths":
            status = "set aside"
        elif finding.refuses:
            status = "unusable"
        elif finding.cause in ("grid", "steps"):
            status = "alarm"
        place = "" if finding.token is None else t.place(finding.token)
        text = finding.text(t).removeprefix(f"{place}: ")
        checks.append(
            Check(
                finding.cause,
                status,
                text,
                finding.number,
                place=place,
                null=CAUSES[finding.cause][0],
                next=CAUSES[finding.cause][1],
            )
        )
    if any(x.status == "unusable" for x in checks):
        keep[:] = False
    fired = {x.metric for x in checks}
    quiet = [
        Check(cause, "quiet", asked) for cause, (asked, _) in CAUSES.items() if cause not in fired
    ]
    order = {"unusable": 0, "set aside": 1, "alarm": 2, "note": 3}
    return keep, [*sorted(checks, key=lambda x: order[x.status]), *quiet]
