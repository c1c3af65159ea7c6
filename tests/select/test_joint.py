"""Prefill, decode, verify and draft on one pool: pages, layouts, pairs, followers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from select_fakes import both, host, prefer, record, reference, request, row, run

from anyattn.core.capabilities import BackendRecord, FormSpec, PageSizes, Phase
from anyattn.core.select.decision import Accepted, Candidate, Decision, Degraded, ReasonCode, Rejected
from anyattn.core.select.pages import kernel_page, page_order
from anyattn.core.spec import Limits
from anyattn.errors import SelectionError

PREFILL, DECODE, VERIFY, DRAFT = Phase
SPECULATES = Limits(8, 512, 1024, max_draft_tokens=4)


def candidate(decision: Decision, name: str, phase: Phase = DECODE) -> Candidate:
    return next(c for c in decision.candidates if (c.backend, c.phase) == (name, phase))


def only(phase: Phase, **fields: object) -> object:
    return row(phases=(phase,), **fields)


# --- kernel pages ------------------------------------------------------------------------------------


def test_a_token_major_page_splits_and_a_head_major_one_does_not() -> None:
    pages = row(pages=PageSizes((16, 32)), layouts=("NHD", "HND"))
    assert kernel_page(pages, 64, "NHD") == 32
    assert kernel_page(pages, 64, "HND") is None
    assert kernel_page(pages, 32, "HND") == 32
    assert kernel_page(pages, 24, "NHD") is None
    assert kernel_page(pages, 32, "5D") is None


def test_token_tables_read_any_page_in_any_layout_of_their_row() -> None:
    tokens = row(form=FormSpec("token_csr", kernel_page=1), layouts=("NHD", "HND"))
    assert kernel_page(tokens, 48, "HND") == 1


def test_a_form_with_a_page_of_its_own_needs_a_multiple_of_it() -> None:
    fixed = row(form=FormSpec("block_table", kernel_page=16))
    assert kernel_page(fixed, 64, "NHD") == 16
    assert kernel_page(fixed, 24, "NHD") is None


# --- the pool ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "page"), [("cuda", 64), ("cpu", 16)])
def test_the_page_is_the_platforms_usual_one_where_all_fit(platform: str, page: int) -> None:
    free = record("a", row(architectures=(f"{platform}:x1",)))
    assert run((free,), facts=host(platform=platform)).kv.page_size == page
    assert page_order(platform)[0] == page


def test_the_pool_page_is_a_multiple_of_both_kernel_pages() -> None:
    entries = (
        record("p", only(PREFILL, pages=PageSizes((128,)))),
        record("d", only(DECODE, pages=PageSizes((64,)))),
    )
    decision = run(entries)
    assert (decision.kv.page_size, decision.prefill.kernel_page, decision.decode.kernel_page) == (
        128,
        128,
        64,
    )


def test_a_page_that_no_kernel_reads_in_pieces_is_preferred() -> None:
    entries = (record("p", only(PREFILL)), record("d", only(DECODE, pages=PageSizes((16,)))))
    decision = run(entries)
    assert (decision.kv.page_size, decision.decode.kernel_page) == (16, 16)


def test_a_page_that_only_a_row_lists_is_found() -> None:
    decision = run((record("a", row(pages=PageSizes((48,)))),))
    assert (decision.kv.page_size, decision.decode.kernel_page) == (48, 48)


def test_the_asked_page_is_kept_or_refused() -> None:
    entries = (record("odd", row(pages=PageSizes((48,)))), record("even", row(pages=PageSizes((32,)))))
    decision = run(entries, request(page_size=96), preferences=both("odd"))
    assert (decision.kv.page_size, decision.prefill.backend, decision.prefill.kernel_page) == (96, "odd", 48)
    assert run(entries, request(page_size=64), preferences=both("odd")).prefill.backend == "even"
    with pytest.raises(SelectionError, match="page_size: asked 20"):
        run(entries, request(page_size=20))


def test_a_page_that_keeps_a_better_backend_out_is_noted() -> None:
    entries = (record("good", row(pages=PageSizes((64,)))), reference())
    decision = run(entries, request(page_size=16), preferences=both("good"))
    assert decision.prefill.backend == "torch_native"
    assert "prefill: only the page or layout asked for keeps good out" in decision.notes


def test_the_asked_layout_is_kept() -> None:
    entries = (record("a", row(layouts=("NHD", "HND"))), record("b", row(layouts=("NHD",))))
    decision = run(entries, request(layout="HND"), preferences=both("b"))
    assert (decision.kv.layout, decision.decode.backend) == ("HND", "a")


def test_the_layout_is_the_first_of_the_decode_row_that_prefill_shares() -> None:
    entries = (
        record("p", only(PREFILL, layouts=("NHD", "HND"))),
        record("d", only(DECODE, layouts=("5D", "HND", "NHD"))),
    )
    assert run(entries).kv.layout == "HND"


# --- pairs -------------------------------------------------------------------------------------------


def test_the_best_pair_that_shares_a_pool_wins_and_the_loser_says_why() -> None:
    entries = (
        record("p1", only(PREFILL, layouts=("NHD",))),
        record("d1", only(DECODE, layouts=("HND",))),
        record("d2", only(DECODE, layouts=("NHD",))),
    )
    wishes = (prefer("p1"), prefer("d1", "d2", phase=DECODE))
    decision = run(entries, preferences=wishes)
    assert (decision.prefill.backend, decision.decode.backend) == ("p1", "d2")
    verdict = candidate(decision, "d1").verdict
    assert isinstance(verdict, Rejected)
    assert verdict.reasons[0].code is ReasonCode.NO_JOINT_LAYOUT
    assert "HND" in verdict.reasons[0].allowed


def test_between_equal_pairs_decode_keeps_its_first_choice() -> None:
    entries = (
        record("p1", only(PREFILL, layouts=("NHD",))),
        record("p2", only(PREFILL, layouts=("HND",))),
        record("d1", only(DECODE, layouts=("HND",))),
        record("d2", only(DECODE, layouts=("NHD",))),
    )
    wishes = (prefer("p1", "p2"), prefer("d1", "d2", phase=DECODE))
    decision = run(entries, preferences=wishes)
    assert (decision.prefill.backend, decision.decode.backend) == ("p2", "d1")


def test_a_degraded_row_is_the_last_resort_even_of_the_preferred_backend() -> None:
    entries = (record("slow", row(degraded="slow")), record("plain"))
    assert run(entries, preferences=both("slow")).decode.backend == "plain"
    entries = (record("a", row(degraded="slow", method="1"), row(method="2")),)
    assert run(entries).decode.method == "2"


def test_a_degraded_row_serves_where_the_better_one_does_not_fit_the_pool() -> None:
    entry = record("a", row(layouts=("HND",), method="fast"), row(degraded="copies", method="slow"))
    decision = run((entry,), request(layout="NHD"))
    assert decision.decode.method == "slow"
    assert isinstance(candidate(decision, "a").verdict, Degraded)


def test_an_unsupported_head_size_gets_the_reference_with_the_reason() -> None:
    from anyattn.core.spec import AttentionSpec

    odd = AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=100)
    decision = run((record("fast"), reference()), request(odd), preferences=both("fast"))
    assert decision.prefill.backend == decision.decode.backend == "torch_native"
    verdict = decision.decode.verdict
    assert isinstance(verdict, Degraded)
    assert verdict.reason.code is ReasonCode.DEGRADED
    assert verdict.reason.hint == "nearest: fast: no head size 100 (takes 64, 128)"


def test_nobody_at_all_is_an_error_with_the_nearest_candidates() -> None:
    with pytest.raises(SelectionError, match=r"no backend can serve prefill on cuda:x9 \(a: architecture"):
        run((record("a"),), facts=host("x9"))


# --- verify and draft --------------------------------------------------------------------------------


def trio(*verifiers: BackendRecord) -> tuple[BackendRecord, ...]:
    return (record("p", only(PREFILL)), record("d", only(DECODE)), *verifiers)


def test_verify_follows_prefill_then_decode_then_rank() -> None:
    everyone = (record("p"), record("d"), record("v"))
    wishes = (prefer("p"), prefer("d", phase=DECODE), prefer("v", phase=VERIFY))
    decision = run(everyone, preferences=wishes)
    assert decision.verify is not None
    assert (decision.verify.backend, decision.verify.evidence) == ("p", "same backend as prefill")
    assert decision.draft is not None
    assert (decision.draft.backend, decision.draft.evidence) == ("d", "same backend as decode")
    half = (record("p", only(PREFILL)), record("d"), record("v"))
    verify = run(half, preferences=wishes).verify
    assert verify is not None
    assert verify.backend == "d"
    verify = run(trio(record("u", only(VERIFY)), record("v", only(VERIFY))), preferences=wishes).verify
    assert verify is not None
    assert (verify.backend, verify.how) == ("v", "priority")


def test_verify_may_be_nobody_and_the_decision_stands() -> None:
    decision = run(trio(), request(limits=SPECULATES))
    assert decision.verify is None
    assert decision.draft is None
    assert any(note.startswith("verify: left empty") for note in decision.notes)
    assert decision.to_json()["verify"] is None
    with pytest.raises(SelectionError, match="no backend was found for verify"):
        decision.phase(VERIFY)
    assert decision.phase(DECODE).backend == "d"


def test_the_page_is_chosen_so_that_verify_fits() -> None:
    fussy = record("v", row(phases=(VERIFY, DRAFT), pages=PageSizes((128,))))
    decision = run(trio(fussy))
    assert decision.kv.page_size == 128
    assert decision.verify is not None
    assert decision.verify.kernel_page == 128


def test_verify_does_not_cost_prefill_and_decode_their_best() -> None:
    entries = (*trio(record("v", only(VERIFY, layouts=("HND",)))), record("x", row(layouts=("NHD", "HND"))))
    wishes = (prefer("p"), prefer("d", phase=DECODE))
    decision = run(entries, preferences=wishes)
    assert (decision.prefill.backend, decision.decode.backend) == ("p", "d")
    assert decision.verify is not None
    assert decision.verify.backend == "x"


def test_a_degraded_leader_does_not_lead() -> None:
    entries = (
        record("p", only(PREFILL), only(VERIFY, degraded="slow")),
        record("d", only(DECODE)),
        record("v"),
    )
    wishes = (prefer("p"), prefer("d", phase=DECODE))
    verify = run(entries, preferences=wishes).verify
    assert verify is not None
    assert verify.backend == "v"
    assert verify.verdict == Accepted()


# --- the property ------------------------------------------------------------------------------------

sizes = st.sampled_from([1, 8, 16, 32, 48, 64, 128, 256])
page_rules = st.one_of(
    st.lists(sizes, min_size=1, max_size=3).map(lambda s: PageSizes(tuple(s))),
    st.sampled_from([1, 8, 16, 32, 128]).map(lambda m: PageSizes(multiple_of=m)),
)
forms = st.sampled_from([FormSpec("block_table"), FormSpec("page_csr"), FormSpec("request_table")])
layout_lists = st.lists(st.sampled_from(["NHD", "HND", "5D"]), min_size=1, max_size=3, unique=True).map(tuple)
phase_lists = st.lists(st.sampled_from(list(Phase)), min_size=1, max_size=4, unique=True).map(tuple)
rows = st.builds(
    lambda pages, form, layouts, phases, slow: row(
        pages=pages, form=form, layouts=layouts, phases=phases, degraded="slow" if slow else None
    ),
    page_rules,
    forms,
    layout_lists,
    phase_lists,
    st.booleans(),
)
token_rows = st.builds(
    lambda layouts, phases: row(form=FormSpec("token_csr", kernel_page=1), layouts=layouts, phases=phases),
    layout_lists,
    phase_lists,
)
catalogs = st.lists(st.lists(st.one_of(rows, token_rows), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(catalogs, st.one_of(st.none(), st.sampled_from([1, 16, 24, 64, 96])))
def test_the_pool_page_suits_every_phase(catalog: list[list[object]], page: int | None) -> None:
    entries = tuple(record(f"b{i}", *group) for i, group in enumerate(catalog))  # type: ignore[arg-type]
    try:
        decision = run(entries, request(page_size=page))
    except SelectionError:
        return
    assert page is None or decision.kv.page_size == page
    for choice in (decision.prefill, decision.decode, decision.verify, decision.draft):
        if choice is None:
            continue
        assert decision.kv.page_size % choice.kernel_page == 0
        assert choice.row.pages.allows(choice.kernel_page)
        assert decision.kv.layout in choice.row.layouts
        paged = choice.row.form.kind in ("block_table", "page_csr")
        assert choice.kernel_page == decision.kv.page_size or decision.kv.layout == "NHD" or not paged
    assert Decision.from_json(decision.to_json()) == decision


@settings(max_examples=60, deadline=None)
@given(catalogs)
def test_a_pool_is_found_whenever_two_rows_share_one(catalog: list[list[object]]) -> None:
    entries = tuple(record(f"b{i}", *group) for i, group in enumerate(catalog))  # type: ignore[arg-type]
    flat = [r for e in entries for r in e.rows]
    shared = any(
        kernel_page(p, page, layout) and kernel_page(d, page, layout)
        for p in flat if PREFILL in p.phases
        for d in flat if DECODE in d.phases
        for page in (1, 16, 32, 48, 64, 128, 256)
        for layout in ("NHD", "HND", "5D")
    )  # fmt: skip
    if shared:
        assert run(entries).kv.page_size >= 1
