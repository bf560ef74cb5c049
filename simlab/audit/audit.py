"""One audit: read a log, say what can be compared, measure it, and say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from torch import Tensor

from simlab.audit import methods as per_method
from simlab.audit.alarms import alarms
from simlab.audit.batch import at_rollout, batch_of, of_responses, tokens_of
from simlab.audit.blocks import active, gaps
from simlab.audit.breakdown import breakdowns, worst_responses
from simlab.audit.checks import Check, comparability
from simlab.audit.facts import Facts, Limits, engine_part
from simlab.audit.measure import numbers
from simlab.core.tokens import TokenBatch
from simlab.token_log.faults import Finding
from simlab.token_log.tokens import Tokens

SCHEMA = 1  # of audit.json
MOST = 1 << 20  # tokens that the table of methods is computed on
MOST_INVERSE = 1 << 16  # and thresholds and overlaps
CLEAN, ALARMS, UNUSABLE, PARTLY = range(4)  # exit codes


@dataclass
class Audit:
    """The answer: plain numbers (audit.json), and the tokens for a page."""

    result: dict[str, Any]
    checks: list[Check]
    tokens: Tokens
    keep: np.ndarray  # [N] tokens that were measured
    limits: Limits = field(default_factory=Limits)

    @property
    def exit(self) -> int:
        """0 clean, 1 alarms, 2 unusable, 3 partly unusable."""
        return self.result["exit"]

    @property
    def findings(self) -> list[Check]:
        """What fired, the most important first."""
        return [x for x in self.checks if x.status in ("unusable", "set aside", "alarm", "note")]


def audit_tokens(
    t: Tokens,
    on_rows: Sequence[Finding] = (),
    name: str = "",
    methods: Sequence[tuple[str, str, dict]] | None = None,
    limits: Limits = Limits(),  # noqa: B008
) -> Audit:
    """The audit of a log's tokens; `on_rows` are its reader's findings.

    `methods` are (label, name, arguments), all that the registry has if None; only then are thresholds and
    overlaps computed.
    """
    keep, checks = comparability(t, list(on_rows))
    tokens = active(keep)
    result: dict[str, Any] = {"schema": SCHEMA, "simlab": version("simlab"), "log": name}
    sampled = int(t.mask.sum())
    result["counts"] = {
        "files": len(t.files),
        "responses": len(t.row),
        "tokens": len(t.mask),
        "sampled": sampled,
        "measured": len(tokens),
    }
    result["columns"] = dict(zip(("trainer", "rollout"), t.columns, strict=False)) | {
        "others": sorted(t.extra)
    }
    if len(tokens):
        checks = _measure(t, tokens, result, checks, methods, limits)
    elif not len(t.mask):
        text = "this log holds no tokens: there is nothing to measure"
        checks = [Check("empty", "unusable", text, 0.0, next="Check what writes it."), *checks]
    elif not sampled:
        text = "no token of this log is unmasked: there is nothing to measure"
        checks = [Check("empty", "note", text, 0.0, next="Check the mask."), *checks]
    statuses = {x.status for x in checks}
    lost = any(x.status == "set aside" for x in checks)
    result["exit"] = CLEAN
    if not len(tokens) and (sampled or not len(t.mask)):
        result["exit"] = UNUSABLE
    elif lost:
        result["exit"] = PARTLY
    elif "alarm" in statuses:
        result["exit"] = ALARMS
    result["findings"] = [x.plain() for x in checks if x.status not in ("quiet", "not computable")]
    result["checked"] = [x.plain() for x in checks if x.status == "quiet"]
    result["not_computable"] = [x.plain() for x in checks if x.status == "not computable"]
    result["limits"] = limits._asdict()
    return Audit(result, checks, t, keep, limits)


def _measure(
    t: Tokens,
    tokens: np.ndarray,
    result: dict,
    checks: list[Check],
    methods: Sequence[tuple[str, str, dict]] | None,
    limits: Limits,
) -> list[Check]:
    """Fill in the numbers; returns all checks."""
    result["mismatch"] = numbers(t, tokens)
    result["by"] = breakdowns(t, tokens)
    result["worst_responses"] = worst_responses(t, tokens)
    A = t.extra.get("advantage")
    known = A is not None and bool(np.isfinite(A[tokens]).all())
    some = of_responses(t, tokens, MOST)
    result["methods"] = []
    if methods is None or methods:
        part = batch_of(t, some)
        result["methods"] = per_method.table(part, known, at_rollout(part, t, some), methods)
    if methods is None:
        few = of_responses(t, tokens, MOST_INVERSE)
        small = batch_of(t, few)
        result["thresholds"] = per_method.thresholds(small, known)
        result["overlap"] = per_method.overlap(small, known)
        result["sat_quantile"] = per_method.local_quantiles(small)
    result["assumed"] = [
        text
        for text, holds in (
            ("advantages are not in the log: shares are means over all tokens at A = +1 and at A = -1", not known),
            ("no column of proximal log-probs: pi_old is the trainer's column", "proximal" not in t.extra),
            (f"the table of methods is of {len(some):,} tokens of evenly spaced responses", len(some) < len(tokens)),
        )
        if holds
    ]  # fmt: skip
    facts = Facts(
        t,
        tokens,
        gaps(t, tokens),
        engine_part(t, tokens),
        result["mismatch"],
        result["by"],
        result["methods"],
    )
    mine = alarms(facts, limits)
    fired = [x for x in mine if x.status == "alarm"]
    before = [x for x in checks if x.status in ("unusable", "set aside", "alarm")]
    rest = [x for x in [*mine, *checks] if x not in fired and x not in before]
    return [*before, *fired, *sorted(rest, key=lambda x: x.status != "note")]


def audit(
    batches: TokenBatch | Sequence[TokenBatch],
    before: Sequence[Tensor] | None = None,
    methods: Sequence[tuple[str, str, dict]] | None = (),
    limits: Limits = Limits(),  # noqa: B008
) -> Audit:
    """The audit of an optimizer batch in a training loop; torch and numpy are enough.

    `before` has the trainer's log-probs `[N]` at the weights that sampled, one tensor a batch, where a
    trainer keeps them. `methods` are (label, name, arguments); None is the whole registry, () none.
    """
    batches = [batches] if isinstance(batches, TokenBatch) else list(batches)
    return audit_tokens(tokens_of(batches, before), name="batch", methods=methods, limits=limits)
