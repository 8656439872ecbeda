"""The table of claims: the data is whole, every verdict is one that its judge gives, and the page is made of them."""

from __future__ import annotations

import pytest
from benchmarks.claims import calls, counted, training
from benchmarks.claims.__main__ import JUDGES, judge
from benchmarks.claims.claim import CONFIRMED, NOT_TESTABLE, REFUTED, Claim, claims
from benchmarks.claims.page import FILE, PAGE, page, read_results

CLAIMS = claims()
DOCUMENTS = {"hybrid-ring.txt", "head-parallel.txt", "dynamic-segments.txt", "overview.txt", "optimization.txt"}
QUICK = [claim for claim in CLAIMS if JUDGES[claim.judge].__module__ in (calls.__name__, counted.__name__)]
PLANNED = [claim for claim in CLAIMS if JUDGES[claim.judge].__module__ == training.__name__]


def test_every_document_has_claims_and_every_claim_a_judge_and_a_finding() -> None:
    assert {claim.document for claim in CLAIMS} == DOCUMENTS
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) > 24
    assert {claim.judge for claim in CLAIMS} == set(JUDGES)
    _, findings = read_results(FILE)
    assert list(findings) == [claim.name for claim in CLAIMS]
    assert {finding.verdict for finding in findings.values()} == {CONFIRMED, REFUTED, NOT_TESTABLE}
    assert all(finding.reason for finding in findings.values())


def test_only_what_no_computation_decides_is_said_in_the_data() -> None:
    for claim in CLAIMS:
        assert ("reason" in claim.given) == (claim.judge == "undefined"), claim.name


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.name)
def test_a_finding_is_what_the_judge_says_today(claim: Claim) -> None:
    _, findings = read_results(FILE)
    assert judge(claim) == findings[claim.name]


@pytest.mark.parametrize("name", ["125M has 125M weights"])
def test_the_planner_says_today_what_the_file_has(name: str) -> None:
    (claim,) = (claim for claim in PLANNED if claim.name == name)
    assert judge(claim) == read_results(FILE)[1][name]


@pytest.mark.slow
@pytest.mark.parametrize("claim", PLANNED, ids=lambda claim: claim.name)
def test_the_planner_says_today_what_the_file_has_of_every_claim(claim: Claim) -> None:
    assert judge(claim) == read_results(FILE)[1][claim.name]


def test_the_page_is_made_of_the_findings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(*read_results(FILE))


def test_a_claim_that_is_changed_is_judged_anew() -> None:
    """The verdict follows the figure: half of the tokens, or twice the memory, and it is another one."""
    by_name = {claim.name: claim for claim in CLAIMS}
    scores = dict(by_name["16K scores: 4 GB"].given)
    assert calls.scores(scores).verdict == REFUTED
    assert calls.scores(scores | {"bytes": 8.6e9}).verdict == CONFIRMED
    ring = dict(by_name["1B tokens, one layer on 64 GPUs"].given)
    assert calls.operands(ring).verdict == REFUTED
    assert calls.operands(ring | {"processes": 128}).verdict == CONFIRMED
    table = dict(by_name["memory scaling ratio 1.15"].given)
    assert calls.memory_table(table | {"ratio": 0.57}).verdict == CONFIRMED
    memory = dict(by_name["GTX 1080: 8 GB"].given)
    assert counted.sheet_memory(memory | {"device": "A100 80 GB"}).verdict == REFUTED
