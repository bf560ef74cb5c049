"""Compositions against the options of verl and TRL, and the spelling of other frameworks' options."""

from __future__ import annotations

import pytest
from pairs import BOTH, BY_ROW, SEQ, Call, Padded, Pair, check, fold
from peers import trl, verl, verl_bypass
from torch import Tensor

from simlab.core.aggregate import mean
from simlab.stabilizers import bind
from simlab.study.specs import parse

PLAIN = {"clip_ratio_c": 1e9}  # verl's dual clip, out of the way
GSPO = "gspo:eps_low=0.2,eps_high=0.2"
OWN = f"{GSPO},per_token=true"


def spelled(spec: str, how: str = "token_mean") -> Call:
    """Minus the aggregated surrogate of a composition, over the tokens that it counts."""
    _, name, _, arguments = parse(spec)
    method = bind(name, **arguments)

    def loss(x: Padded) -> Tensor:
        b = x.flat()
        S = method.surrogate(b, **method.stats([b])).S
        return -mean(*fold(how, S, method.counted(b)))

    return Call(f"`{spec}`, {how}", loss)


def corrected(weight=None, threshold=2.0, rs=None, limits=None, normalize=False) -> dict:
    """verl's arguments of a rollout correction."""
    found = {"rollout_is": weight, "rollout_is_threshold": threshold} if weight else {}
    found |= {"rollout_rs": rs, "rollout_rs_threshold": limits} if rs else {}
    return found | ({"rollout_is_batch_normalize": True} if normalize else {})


DROP = "denominator=drop"
DECOUPLED = [  # our corrections on ppo, verl's arguments, its preset
    ("tis", corrected("token"), "preset decoupled_token_is"),
    ("tis:level=sequence", corrected("sequence"), "preset decoupled_seq_is"),
    ("icepop", corrected("token", "0.5_5.0"), "preset decoupled_token_icepop"),
    (f"tis:level=sequence+keep:of=k,level=sum,min=0.5,max=2,{DROP}",
     corrected("sequence", 2.0, "seq_sum_k1", "0.5_2.0"), "preset decoupled_seq_is_rs"),
    (f"keep:of=k,level=mean,min=0.8,max=1.25,{DROP}",
     corrected(rs="seq_mean_k1", limits="0.8_1.25"), "preset decoupled_geo_rs, at wider limits"),
    (f"keep:of=k,min=0.5,max=2,{DROP}", corrected(rs="token_k1", limits="0.5_2.0"), "no preset"),
    (f"keep:of=k,gate=k2,max=0.1,{DROP}", corrected(rs="token_k2", limits="0.1"), "no preset"),
    (f"keep:of=k,gate=k3,max=0.1,{DROP}", corrected(rs="token_k3", limits="0.1"), "no preset"),
    (f"keep:of=k,gate=k2,level=sum,max=0.5,{DROP}", corrected(rs="seq_sum_k2", limits="0.5"), "no preset"),
    (f"keep:of=k,gate=k3,level=sum,max=0.5,{DROP}", corrected(rs="seq_sum_k3", limits="0.5"), "no preset"),
    (f"keep:of=k,gate=k2,level=mean,max=0.1,{DROP}", corrected(rs="seq_mean_k2", limits="0.1"), "no preset"),
    (f"keep:of=k,gate=k3,level=mean,max=0.1,{DROP}", corrected(rs="seq_mean_k3", limits="0.1"), "no preset"),
    (f"keep:of=k,gate=k2,level=max,max=0.5,{DROP}", corrected(rs="seq_max_k2", limits="0.5"), "no preset"),
    (f"keep:of=k,gate=k3,level=max,max=0.5,{DROP}", corrected(rs="seq_max_k3", limits="0.5"), "no preset"),
    (f"tis+keep:of=k,min=0.5,max=2,{DROP}+keep:of=k,gate=k3,level=mean,max=0.2,{DROP}",
     corrected("token", 2.0, "token_k1,seq_mean_k3", "0.5_2.0,0.2"), "a list of two rejections"),
    ("tis+norm:over=all", corrected("token", normalize=True), "rollout_is_batch_normalize"),
    ("icepop+norm:over=all", corrected("token", "0.5_5.0", normalize=True), "rollout_is_batch_normalize"),
    ("tis:level=sequence+norm:over=all,level=response",
     corrected("sequence", normalize=True), "rollout_is_batch_normalize"),
]  # fmt: skip
BYPASS = [
    (f"ppo:dual_clip=3+keep:level=mean,min=0.8,max=1.25,{DROP}",
     {"loss_type": "ppo_clip", "rollout_is": None} | corrected(rs="seq_mean_k1", limits="0.8_1.25"),
     "preset bypass_ppo_clip_geo_rs, at wider limits"),
    (f"ppo:dual_clip=3+keep:gate=k3,level=mean,max=0.1,{DROP}",
     {"loss_type": "ppo_clip", "rollout_is": None} | corrected(rs="seq_mean_k3", limits="0.1"),
     "preset bypass_ppo_clip_k3_rs, at a wider limit"),
    ("none+cap:max=2,level=sum", {"loss_type": "reinforce"} | corrected("sequence"), "preset bypass_pg_is"),
    (f"none+cap:max=2,level=sum+keep:level=mean,min=0.8,max=1.25,{DROP}",
     {"loss_type": "reinforce"} | corrected("sequence", 2.0, "seq_mean_k1", "0.8_1.25"), "preset bypass_pg_geo_rs, with weights"),
    ("none+dis", {"loss_type": "reinforce"} | corrected("token", "0.7_6.0"), "DIS of SAO"),
    ("none+dis:eps_low=0.8,eps_high=3", {"loss_type": "reinforce"} | corrected("token", "0.2_4.0"), "DIS of SAO"),
]  # fmt: skip
TRL = [
    ("ppo+tis:cap=3", ("token_truncate", None, 3.0)),
    ("ppo+clamp:of=k,low=0.5,high=3", ("token_truncate", 0.5, 3.0)),
    ("ppo+band:of=k,low=0.5,high=3", ("token_mask", 0.5, 3.0)),
    ("ppo+clamp:of=k,level=sum,low=0.5,high=3", ("sequence_truncate", 0.5, 3.0)),
    ("ppo+band:of=k,level=sum,low=0.5,high=3", ("sequence_mask", 0.5, 3.0)),
]
PAIRS = [
    *(Pair(spelled(f"ppo+{ours}"), verl("vanilla", **PLAIN, correct=theirs), said)
      for ours, theirs, said in DECOUPLED),
    *(Pair(spelled(ours), verl_bypass(**theirs), said) for ours, theirs, said in BYPASS),
    *(Pair(spelled(ours), trl("dapo", weight=theirs), "TRL's own") for ours, theirs in TRL),
    Pair(spelled(f"{OWN}+tis", SEQ),
         verl("gspo", "seq-mean-token-mean", correct=corrected("token")), "SAT's Table 1 is slime's, with a shared mean"),
    Pair(spelled(f"{GSPO}+tis", SEQ), trl("grpo", level="sequence", weight=("token_truncate", None, 2.0)),
         "SAT's Table 1: GSPO with TIS", BY_ROW),
    Pair(spelled("ppo+tis", "token_sum"), verl("vanilla", "token-sum", **PLAIN, correct=corrected("token")), "both"),
    Pair(spelled("dis", "token_mean"), verl_bypass(loss_type="reinforce", rollout_rs=None, **corrected("token", "0.7_6")),
         "both, but for the ends, which the paper excludes"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.ours.label} - {p.peer.label}")
def test_a_composition(pair, rows):
    """Value and gradient are those of the framework's option."""
    check(pair)
    assert pair.batches in (BOTH, BY_ROW)
    rows.add(pair.ours.label, pair.peer.label, pair.verdict, pair.paper)


SPELLINGS = [  # option, ours; the code of these frameworks does not install here
    ("slime `--use-tis`", "ppo+tis", "token clamp [0, 2]; on any base"),
    ("slime GSPO with `--use-tis`", f"{GSPO}+tis", "SAT's runs"),
    ("slime IcePop, `tis_clip_low` .5, `tis_clip` 5", "ppo+icepop", ""),
    ("slime MIS, geometric, veto 1e-4", "ppo+mis:level=geometric,veto=1e-4", ""),
    ("slime `--use-opsm`", "ppo+opsm", ""),
    ("slime `--use-rollout-logprobs`", "ppo", "ratio pi/mu"),
    ("OpenRLHF token, clip, ratio", "ppo+clamp:of=k,low=0.5,high=5", "TIS; default thresholds"),
    ("OpenRLHF token, mask, ratio", "ppo+band:of=k,low=0.5,high=5", "IcePop"),
    ("OpenRLHF token, mask, binary_kl", "ppo+keep:of=k,gate=binary_kl,max=0.003,weight=token", ""),
    ("OpenRLHF token, mask, tv", "ppo+keep:of=k,gate=tv,max=0.1,weight=token", ""),
    ("OpenRLHF seq, mask, ratio", "ppo+keep:of=k,level=mean,min=0.5,max=5,weight=token", "seq is the mean; seq-mask-tis"),
    ("OpenRLHF seq, mask, binary_kl", "ppo+keep:of=k,gate=binary_kl,level=mean,max=0.003,weight=token", ""),
    ("OpenRLHF seq, mask, tv", "ppo+keep:of=k,gate=tv,level=mean,max=0.1,weight=token", ""),
    ("FlashREINFORCE", "pg+keep:gate=binary_kl,level=mean,max=0.003", "and `flash_reinforce`"),
    ("prime-rl IPO", "ipo", ""),
    ("prime-rl IcePop", "none+band:low=0.2,high=5", "the total ratio"),
    ("prime-rl PPO, CISPO", "cispo", "and `ppo`"),
    ("prime-rl ref_kl", "pg+keep:gate=difference,min=-0.2+kl:coef=2e-3", "1e-3 d^2"),
    ("NeMo-RL TIS", "ppo+clamp:of=k,high=2", "token weights"),
    ("NeMo-RL IcePop", "ppo+icepop", ""),
    ("NeMo-RL seq-mask-tis", "ppo+keep:of=k,level=mean,min=0.999,max=1.002,weight=token", ""),
    ("NeMo-RL sequence ratios", f"{GSPO}+tis:level=sequence", "the weight is the product"),
    ("SkyRL tis, token", "ppo+tis:denominator=shrink", "cap 2"),
    ("SkyRL tis, sequence", "ppo+tis:level=sequence,cap=5", ""),
    ("SkyRL sequence mask, geometric", "ppo+keep:of=k,level=mean,min=0.99,max=1.01,denominator=shrink", ""),
    ("SkyRL sequence mask, product", "ppo+keep:of=k,level=sum,min=0.5,max=2,denominator=shrink", ""),
    ("SkyRL outlier veto, token mask, geometric mask",
     "ppo+keep:of=k,min=1e-4,max=100,scope=response,denominator=shrink+keep:of=k,min=0.5,max=2,denominator=shrink"
     "+keep:of=k,level=mean,min=0.99,max=1.01,denominator=shrink", "one after the other, on what is left"),
    ("ROLL is_weight, token", "ppo+tis:cap=1.2", ""),
    ("ROLL filter, difference", "ppo+keep:of=k,gate=difference,min=-0.2,max=0.2,denominator=drop", ""),
]  # fmt: skip


@pytest.mark.parametrize(("option", "spec", "note"), SPELLINGS, ids=lambda x: str(x))
def test_a_spelling(option, spec, note, rows):
    """It is a lawful composition."""
    _, name, _, arguments = parse(spec)
    bind(name, **arguments)
    rows.spellings.append((option, f"`{spec}`", note))
