"""Logs of the cases: rows as files have them, and the audit of such rows."""

import json

import numpy as np

from simlab.audit.audit import audit_tokens
from simlab.token_log.names import ROLES, Names
from simlab.token_log.pairs import read_tokens


def rows_of(trainer, rollout, **more):
    """Rows of lists, one a response; further columns by name, a list a row or one value for all."""
    rows = [
        {"trainer_logprobs": list(map(float, t)), "rollout_logprobs": list(map(float, r))}
        for t, r in zip(trainer, rollout, strict=True)
    ]
    for name, column in more.items():
        for i, row in enumerate(rows):
            row[name] = column[i] if isinstance(column, list) else column
    return rows


def wrote(tmp_path, rows, name="log.jsonl"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def audited(path, names="", methods=()):
    """The audit of a file; without methods it is quick."""
    tokens, on_rows = read_tokens(str(path), Names.of(names), tuple(ROLES))
    return audit_tokens(tokens, on_rows, str(path), methods)


def of_rows(tmp_path, rows, names="", methods=()):
    return audited(wrote(tmp_path, rows), names, methods)


def of_gaps(tmp_path, d, methods=(), **more):
    """A log with these gaps, one list a response, on log-probs of -3, -3.5, -4, -3, ..."""
    rollout = [[-3.0 - 0.5 * (i % 3) for i in range(len(x))] for x in d]
    trainer = [
        [r + gap for r, gap in zip(rs, x, strict=True)] for rs, x in zip(rollout, d, strict=True)
    ]
    return of_rows(tmp_path, rows_of(trainer, rollout, **more), methods=methods)


def first(audit):
    """(status, metric) of the first finding."""
    x = audit.findings[0]
    return x.status, x.metric


def check(audit, metric):
    return next(x for x in audit.checks if x.metric == metric)


def method(audit, name):
    return next(x for x in audit.result["methods"] if x["method"] == name)


def small(seed=0, rows=8, tokens=6, size=0.03):
    """(trainer, rollout) of most small inputs: rollout in -0.2 .. -6."""
    rng = np.random.default_rng(seed)
    rollout = rng.uniform(-6, -0.2, size=(rows, tokens))
    return rollout + rng.normal(size=rollout.shape) * size, rollout
