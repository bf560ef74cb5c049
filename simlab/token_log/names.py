"""Which column of a log plays which role: the names of this project, of a reader, or of the caller.

Names of others are never guessed: a reader knows its framework's, and a refusal proposes the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from simlab.token_log.tables import Chosen, refuse
from simlab.token_log.tokens import PER_RESPONSE, PER_TOKEN

BEFORE = "trainer_logprobs_before"
IDS = ("response", "response_id", "sample_index", "sequence_id")
KEYS = ("step", "lane", *IDS)
ROLES = {  # role: its column in this project's logs
    "trainer": "trainer_logprobs",
    "rollout": "rollout_logprobs",
    "mask": "loss_mask",
    "version": "weight_versions",
    "trained": "trainer_version",
    "before": BEFORE,
    "proximal": "proximal_logprobs",
    "advantage": "advantages",
    "entropy": "entropy",
    "token": "token_ids",
    "text": "token_texts",
    "reward": "reward",
    "group": "group",
    "step": "step",
    "prefill": "rollout_logprobs_prefill",
    "prefill_again": "rollout_logprobs_prefill_again",
    "trainer_again": "trainer_logprobs_again",
}
ELSEWHERE = {  # what others call a column; named in a refusal, never taken unasked
    "trainer": "train_log_probs train_logprobs prev_logprobs old_log_probs old_logprobs logp_train "
    "log_probs action_log_probs",
    "rollout": "rollout_log_probs inference_logprobs generation_logprobs generation_log_probs "
    "sampling_logprobs logprobs logp_rollout log_probs",
}


class Like:
    """A pattern of names, whatever their spelling: lossMask, loss-mask and LOSS_MASK are loss_mask."""

    def __init__(self, pattern: str, but: str = "$^"):
        self.pattern, self.but = re.compile(pattern), re.compile(but)

    def search(self, name: str) -> bool:
        """Whether a name is like it, and not like `but`."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
        return bool(self.pattern.search(words)) and not self.but.search(words)


_LOGPROB = r"(?=.*(log_?p|logprob|_lp$|^lp_|nll))"
LOOKS = {
    "trainer": Like(_LOGPROB + r"(?=.*(train|policy|actor|old|new|prev|cur|learn|fsdp|megatron))"),
    "rollout": Like(_LOGPROB + r"(?=.*(roll|infer|engine|gen|samp|behav|vllm|sglang|mu))"),
}
MASK_LIKE = Like(
    r"mask|trainable|sampled|generated|assistant|valid|is_(model|policy)|(^|_)keep($|_)|(^|_)weights?$"
)
_WEIGHTS = (
    r"(rollout|sampl\w*|actor|weights?|params?|policy|model|engine|behaviou?r|gen\w*|infer\w*)"
)
_COUNT = r"(step|iter\w*|update|ckpt|checkpoint)s?"
VERSION_LIKE = Like(
    rf"(^|_)(versions?|staleness|lag|ages?)($|_)|(^|_){_WEIGHTS}_{_COUNT}$|(^|_){_COUNT}_{_WEIGHTS}$",
    r"^(code|schema|data\w*|prompt|template|env|api|file|format|log|tokenizer|trainer|weight)_versions?$",
)
AGE_LIKE = Like(r"(^|_)(staleness|lag|ages?)($|_)")


class Names(NamedTuple):
    """Columns by role; "" is the name of the schema, and "none" says that there is no such column."""

    trainer: str = ""
    rollout: str = ""
    mask: str = ""
    version: str = ""
    trained: str = ""
    before: str = ""
    proximal: str = ""
    advantage: str = ""
    entropy: str = ""
    token: str = ""
    text: str = ""
    reward: str = ""
    group: str = ""
    step: str = ""
    prefill: str = ""
    prefill_again: str = ""
    trainer_again: str = ""

    def column(self, role: str, columns: Collection[str]) -> str:
        """The column that plays a role, "" if there is none."""
        name = getattr(self, role) or ROLES[role]
        return name if name in columns else ""

    @classmethod
    def of(cls, text: str) -> Names:
        """`trainer=logp_train,rollout=...`. Raises ValueError in one sentence."""
        given: dict[str, str] = {}
        for pair in filter(None, text.split(",")):
            role, equals, name = pair.partition("=")
            if not (equals and name) or role not in cls._fields:
                raise ValueError(
                    f"--map: {pair!r} is not role=column; roles are {', '.join(cls._fields)}"
                )
            if role in given:
                raise ValueError(f"--map: {role} is given twice")
            given[role] = name
        return cls(**given)

    def over(self, other: Names) -> Names:
        """These names, and those of `other` where these say nothing."""
        return Names(*(mine or its for mine, its in zip(self, other, strict=True)))


def needed(path: Path, columns: Sequence[str], names: Names, more: Collection[str] = ()) -> Chosen:
    """The columns to read; `more` are roles beside the pair, mask and versions, read where they are there.

    Raises ValueError if a log-prob or a named column is missing.
    """
    for role, name in zip(Names._fields, names, strict=True):
        if name not in ("", "none") and name not in columns:
            refuse(path, f"column {name}, named as {role}, is missing", columns)
    score = score_column(columns, names, more)
    rollout = names.rollout or "rollout_logprobs"
    if more:
        _propose(path, columns, names, (score, rollout))
    for role, name in (("trainer", score), ("rollout", rollout)):
        if name not in columns:
            others = candidates(role, columns, (score, rollout))
            cure = f"; if {others[0]} is it, say {cure_of(role, others[0], more)}" if others else ""
            refuse(
                path, f"column {name} is missing{cure or f': the log-probs of the {role}'}", columns
            )
    if score == rollout:
        refuse(path, f"column {score} is named as both trainer and rollout", columns)
    chosen = [score, rollout]
    roles = ("mask", "version", "trained", *(x for x in PER_TOKEN if x in more))
    chosen += [x for x in (names.column(role, columns) for role in roles) if x]
    others = [x for x in KEYS if x in columns]
    others += [
        x for x in (names.column(y, columns) for y in (*PER_RESPONSE, "text") if y in more) if x
    ]
    if not names.column("mask", columns) and names.mask != "none":
        others += [x for x in columns if MASK_LIKE.search(x)]
    if not names.column("version", columns) and names.version != "none" and score != BEFORE:
        others += [x for x in columns if VERSION_LIKE.search(x)]
    once = dict.fromkeys(chosen)
    return Chosen(list(once), [x for x in dict.fromkeys(others) if x not in once])


def _propose(path: Path, columns: Sequence[str], names: Names, pair: tuple[str, str]) -> None:
    """Raises ValueError with the --map to try, where a log-prob is missing and a column may be it."""
    lacks = {
        role: x for role, x in zip(("trainer", "rollout"), pair, strict=True) if x not in columns
    }
    taken, tries = [x for x in pair if x in columns], []
    for role in lacks:
        found = candidates(role, columns, taken)
        tries += [f"{role}={found[0]}"] if found else []
        taken += found[:1]
    if lacks and len(tries) == len(lacks):
        missing = " and ".join(lacks.values())
        refuse(path, f"no column {missing}; try --map {','.join(tries)}", columns)
    if lacks:
        missing = " and ".join(f"{name} (log-probs of the {role})" for role, name in lacks.items())
        seen = f"; --map {','.join(tries)} would give the other" if tries else ""
        refuse(path, f"no column {missing}{seen}; name it by --map ROLE=COLUMN", columns)


def score_column(columns: Collection[str], names: Names, more: Collection[str] = ()) -> str:
    """The trainer's column: that of the rollout's weights if the question is noise, that of the loss otherwise."""
    if names.trainer:
        return names.trainer
    in_loss = ROLES["trainer"]
    wants_loss = "before" in more and in_loss in columns
    return BEFORE if BEFORE in columns and not wants_loss else in_loss


def candidates(role: str, columns: Collection[str], taken: Collection[str]) -> list[str]:
    """Columns that may play a role: names met elsewhere first, then names that look like it."""
    met = [x for x in ELSEWHERE[role].split() if x in columns and x not in taken]
    return met + [x for x in columns if LOOKS[role].search(x) and x not in (*taken, *met)]


def cure_of(role: str, name: str, more: Collection[str]) -> str:
    """The words of the command line that give a column a role."""
    return f"--map {role}={name}" if more else f"--noise replay:path=FILE,{role}={name}"
