"""Verdicts on wrong numbers: NaN, infinity, outliers, and parameters that differ. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_rounded
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.verdicts.words.evidence import (
    JudgedVerdict,
    NumberOutlierEvidence,
    WrongNumbersEvidence,
    make_verdict,
)

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Facts, NumberOutlier, WrongNumbers


def build_number_verdicts(report: Facts) -> list[JudgedVerdict]:
    """Return verdicts on wrong numbers and outliers; [] if none were found or checked.

    Wrong numbers on all ranks may come from a rank with wrong numbers, and then have no verdict.
    """
    numbers = report["numbers"]
    if numbers is None:
        return []
    begins = [each["since_step"] for each in numbers["wrong"] if not each["is_everywhere"]]
    wrong = [
        _build_verdict(each)
        for each in numbers["wrong"]
        if not each["is_everywhere"] or each["since_step"] < min(begins, default=math.inf)
    ]
    return wrong + [_build_outlier_verdict(each) for each in numbers["outliers"]]


def _build_outlier_verdict(each: NumberOutlier) -> JudgedVerdict:
    ranks = tuple(each["ranks"])
    several = len(ranks) > 1
    subject = f"The {each['what']} is"
    action = "look at the learning rate and the data of this step."
    if not each["is_everywhere"]:
        who = f"Rank{'s' * several} {format_ranges(ranks)} {'have' if several else 'has'}"
        subject = f"{who} a {each['what']}"
        action = f"look at the data of {'these ranks' if several else 'this rank'} in this step."
    often = f" It is the largest of {each['count']} outliers." if each["count"] > 1 else ""
    text = (
        f"{subject} far above usual in step {each['step']}: {format_rounded(each['value'])}, usually"
        f" {format_rounded(each['usual'])}.{often}"
    )
    evidence = NumberOutlierEvidence(
        each["what"], ranks, each["value"], each["usual"], each["count"]
    )
    rank = None if several or each["is_everywhere"] else ranks[0]
    return make_verdict(
        "number_outlier", rank, None, None, None, each["step"], 0.6, text, action, evidence
    )


def _build_verdict(each: WrongNumbers) -> JudgedVerdict:
    ranks = tuple(each["ranks"])
    several = len(ranks) > 1
    who = "All ranks" if each["is_everywhere"] else f"Rank{'s' * several} {format_ranges(ranks)}"
    has = "have" if several or each["is_everywhere"] else "has"
    if each["what"] == "parameters":
        agreed = each["agreed_step"]
        equal = "" if agreed is None else f", equal in step {agreed}"
        differ = (
            f"{has} other parameters than the other ranks"
            if each["is_certain"]
            else "differ in parameters that should be equal"
        )
        text = f"{who} {differ}, first seen in step {each['since_step']} ({', '.join(each['names'])}{equal})."
        action = "continue from a checkpoint of an earlier step, without this machine if it happens again."
    else:
        text = f"{who} {has} a {each['what']} that is NaN or infinite, first seen in step {each['since_step']}."
        action = (
            "look at the learning rate and the data of this step."
            if each["is_everywhere"]
            else "look at the data of this rank in this step, then at its machine."
        )
    if each["is_slow"]:
        text += " It is also slow: its machine may be broken."
        action = "take this machine out of the job and test it."
    evidence = WrongNumbersEvidence(
        each["what"],
        ranks,
        each["agreed_step"],
        each["count"],
        tuple(each["names"]),
        each["is_slow"],
    )
    rank = None if several or each["is_everywhere"] else ranks[0]
    return make_verdict(
        "wrong_numbers", rank, None, None, None, each["since_step"],
        0.9 if each["is_certain"] else 0.6, text, action, evidence,
    )  # fmt: skip
