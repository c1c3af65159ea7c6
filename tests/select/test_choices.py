"""Explicit choices: arguments beat environment beats pins; each is honoured or refused, never replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from select_fakes import KLIB, both, host, library, prefer, record, reference, request, row, run

from anyattn.core.capabilities import PageSizes, Phase
from anyattn.core.facts import LibraryState
from anyattn.core.select.choices import load_pins
from anyattn.core.select.decision import Degraded, ReasonCode, Rejected
from anyattn.core.spec import Limits
from anyattn.errors import ConfigError, SelectionError, UnknownNameError

A, B, C = record("alpha"), record("beta"), record("gamma")
PIN = {"host": {"platform": "cuda", "arch": "x1"}}


def chosen(decision: Any) -> tuple[str, str]:
    return decision.prefill.backend, decision.decode.backend


def test_nothing_said_goes_by_preference() -> None:
    decision = run((A, B), preferences=both("beta"))
    assert chosen(decision) == ("beta", "beta")
    assert decision.decode.how == "priority"


def test_arguments_beat_environment_beats_pins_beats_preference() -> None:
    pins = [{**PIN, "prefill": "gamma", "decode": {"backend": "gamma"}}]
    environ = {"ANYATTN_BACKEND": "beta"}
    decision = run((A, B, C), preferences=both("alpha"), pins=pins)
    assert (chosen(decision), decision.decode.how) == (("gamma", "gamma"), "pinned")
    decision = run((A, B, C), preferences=both("gamma"), pins=pins, environ=environ)
    assert (chosen(decision), decision.decode.how) == (("beta", "beta"), "environment")
    asked = request(decode="alpha")
    decision = run((A, B, C), asked, preferences=both("gamma"), pins=pins, environ=environ)
    assert chosen(decision) == ("beta", "alpha")
    assert (decision.prefill.how, decision.decode.how) == ("environment", "explicit")


def test_an_argument_for_all_phases_beats_an_environment_for_one() -> None:
    decision = run((A, B), request(backend="alpha"), environ={"ANYATTN_DECODE_BACKEND": "beta"})
    assert chosen(decision) == ("alpha", "alpha")


@pytest.mark.parametrize("phase", list(Phase))
def test_each_phase_has_an_argument_and_a_variable(phase: Phase) -> None:
    by_argument = run((A, B), request(**{phase.value: "beta"})).phase(phase)
    assert (by_argument.backend, by_argument.how) == ("beta", "explicit")
    variable = {f"ANYATTN_{phase.name}_BACKEND": "beta"}
    by_variable = run((A, B), environ=variable).phase(phase)
    assert (by_variable.backend, by_variable.how) == ("beta", "environment")


def test_a_phases_own_choice_beats_the_general_one() -> None:
    assert chosen(run((A, B), request(backend="alpha", decode="beta"))) == ("alpha", "beta")
    environ = {"ANYATTN_BACKEND": "alpha", "ANYATTN_PREFILL_BACKEND": "beta"}
    assert chosen(run((A, B), environ=environ)) == ("beta", "alpha")


def test_the_others_say_that_somebody_else_was_named() -> None:
    decision = run((A, B), request(backend="beta"), preferences=both("alpha"))
    verdict = next(c.verdict for c in decision.candidates if c.backend == "alpha")
    assert isinstance(verdict, Rejected)
    assert verdict.reasons[0].code is ReasonCode.EXPLICIT_OTHER
    assert "backend='beta'" in verdict.reasons[0].asked


def test_a_choice_that_cannot_serve_is_refused_with_reasons_and_the_nearest() -> None:
    tiny = record("tiny", row(phases=(Phase.DECODE,), dtypes=("float32",)))
    with pytest.raises(SelectionError) as caught:
        run((tiny, A, B), request(decode="tiny"), preferences=both("beta"))
    text = str(caught.value)
    assert "'tiny' can't serve decode on cuda:x1" in text
    assert "dtype: asked bfloat16, allowed float32" in text
    assert "allowed: beta, alpha" in text
    assert "decode='beta'" in str(caught.value.hint)


def test_a_choice_for_all_phases_names_the_phases_it_fails_in() -> None:
    half = record("half", row(phases=(Phase.DECODE,)))
    with pytest.raises(SelectionError) as caught:
        run((half, A), request(backend="half"))
    assert "can't serve prefill" in str(caught.value)
    assert "prefill='alpha'" in str(caught.value.hint)
    assert "decode='half' would pass" in str(caught.value.hint)


def test_a_choice_from_the_environment_is_refused_too() -> None:
    with pytest.raises(SelectionError, match="ANYATTN_PREFILL_BACKEND=tiny"):
        run((record("tiny", row(dtypes=("float32",))), A), environ={"ANYATTN_PREFILL_BACKEND": "tiny"})


def test_two_choices_without_a_common_pool_are_refused() -> None:
    entries = (record("n"), record("h", row(layouts=("HND",))), record("x", row(layouts=("NHD", "HND"))))
    with pytest.raises(SelectionError) as caught:
        run(entries, request(prefill="n", decode="h"))
    assert "share no KV page size and layout" in str(caught.value)
    assert "layouts HND" in str(caught.value.allowed)
    assert "decode='n'" in str(caught.value.hint)


def test_the_automatic_partner_adapts_to_an_explicit_choice() -> None:
    entries = (record("n"), record("h", row(layouts=("HND",))), record("x", row(layouts=("NHD", "HND"))))
    decision = run(entries, request(decode="h"), preferences=both("n", "x"))
    assert chosen(decision) == ("x", "h")


def test_a_broken_library_is_passed_over_and_refused_when_named() -> None:
    facts = host("x1", library(state=LibraryState.BROKEN, reason="undefined symbol"))
    entries = (record("lib", row(providers=(KLIB,))), reference())
    decision = run(entries, facts=facts, preferences=both("lib"))
    assert chosen(decision) == ("torch_native", "torch_native")
    refused = next(c for c in decision.candidates if c.backend == "lib")
    assert isinstance(refused.verdict, Rejected)
    assert refused.verdict.reasons[0].code is ReasonCode.LIBRARY_BROKEN
    assert refused.importable == "no"
    with pytest.raises(SelectionError, match="undefined symbol"):
        run(entries, request(backend="lib"), facts)


def test_importable_is_unknown_until_probed() -> None:
    entry = record("lib", row(providers=(KLIB,)))
    for state, word in ((LibraryState.UNKNOWN, "unknown"), (LibraryState.USABLE, "yes")):
        decision = run((entry, A), facts=host("x1", library(state=state)))
        assert {c.importable for c in decision.candidates if c.backend == "lib"} == {word}
        assert {c.importable for c in decision.candidates if c.backend == "alpha"} == {"yes"}


def test_a_general_choice_leaves_an_unused_verify_empty_and_a_used_one_refused() -> None:
    plain = record("plain", row(phases=(Phase.PREFILL, Phase.DECODE)))
    decision = run((plain, A), request(backend="plain"))
    assert (decision.verify, decision.draft) == (None, None)
    assert any("verify: left empty, backend='plain'" in note for note in decision.notes)
    speculates = Limits(8, 512, 1024, max_draft_tokens=4)
    with pytest.raises(SelectionError, match="can't serve verify, draft"):
        run((plain, A), request(backend="plain", limits=speculates))
    named = request(backend="plain", limits=speculates, verify="alpha", draft="alpha")
    assert run((plain, A), named).phase(Phase.VERIFY).backend == "alpha"


def test_unknown_names_are_errors_wherever_they_come_from() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        run((A, B), request(backend="alpa"))
    with pytest.raises(UnknownNameError, match="did you mean 'beta'"):
        run((A, B), environ={"ANYATTN_DRAFT_BACKEND": "betta"})
    with pytest.raises(UnknownNameError, match="gama"):
        run((A, B), pins=[{**PIN, "decode": "gama"}])
    with pytest.raises(UnknownNameError, match="did you mean 'NHD'"):
        run((A, B), request(layout="NHDD"))
    with pytest.raises(UnknownNameError, match="did you mean 'bfloat16'"):
        request(dtype="bfloat61")


def test_an_old_name_warns_and_is_resolved() -> None:
    with pytest.warns(DeprecationWarning, match="use 'new'"):
        decision = run((record("new", deprecated_aliases=("old",)),), request(decode="old"))
    assert decision.decode.backend == "new"
    assert decision.decode.evidence == "decode='old' (now called 'new')"


def test_page_from_the_environment_is_kept_and_noted() -> None:
    decision = run((A,), environ={"ANYATTN_PAGE_SIZE": "32"})
    assert decision.kv.page_size == 32
    assert "KV pool: ANYATTN_PAGE_SIZE=32" in decision.notes
    assert run((A,), request(page_size=128), environ={"ANYATTN_PAGE_SIZE": "32"}).kv.page_size == 128
    for text in ("many", "0", "-4"):
        with pytest.raises(ConfigError, match="ANYATTN_PAGE_SIZE"):
            run((A,), environ={"ANYATTN_PAGE_SIZE": text})


# --- pins --------------------------------------------------------------------------------------------


def test_a_printed_decision_can_be_pinned(tmp_path: Path) -> None:
    before = run((A, B), request(page_size=16, backend="beta"))
    path = tmp_path / "pins.json"
    path.write_text(json.dumps(before.to_json()))
    after = run((A, B), preferences=both("alpha"), environ={"ANYATTN_PINS": str(path)})
    assert chosen(after) == ("beta", "beta")
    assert (after.kv, after.decode.how) == (before.kv, "pinned")


def test_a_pin_holds_for_its_chip_and_its_model() -> None:
    pins = [{**PIN, "decode": "beta", "request": {"dtype": "float16"}}, {**PIN, "decode": "gamma"}]
    assert run((A, B, C), pins=pins).decode.backend == "gamma"
    assert run((A, B, C), request(dtype="float16"), pins=pins).decode.backend == "beta"
    assert run((A, B, C), facts=host("x2"), pins=pins).decode.backend == "alpha"


def test_a_pinned_pool_does_not_bind_who_was_named_over_the_pin() -> None:
    pins = [{**PIN, "decode": "hnd", "kv": {"page_size": 16, "layout": "HND"}}]
    entries = (record("hnd", row(layouts=("HND",))), B, record("any", row(layouts=("HND", "NHD"))))
    decision = run(entries, pins=pins)
    assert (decision.kv.page_size, decision.kv.layout, decision.decode.backend) == (16, "HND", "hnd")
    assert "KV pool: pinned layout='HND'" in decision.notes
    assert run(entries, request(decode="beta"), pins=pins).kv.layout == "NHD"


def test_the_origin_of_a_page_is_told_when_it_is_in_the_way() -> None:
    entries = (record("p64", row(pages=PageSizes((64,)))), A)
    with pytest.raises(SelectionError, match="ANYATTN_PAGE_SIZE=16"):
        run(entries, request(decode="p64"), environ={"ANYATTN_PAGE_SIZE": "16"})
    with pytest.raises(SelectionError, match="ANYATTN_PAGE_SIZE=16"):
        run(entries[:1], environ={"ANYATTN_PAGE_SIZE": "16"})


def test_a_pin_that_cannot_serve_is_refused() -> None:
    tiny = record("tiny", row(dtypes=("float32",)))
    with pytest.raises(SelectionError, match="pinned decode='tiny'"):
        run((tiny, A), pins=[{**PIN, "decode": "tiny"}])
    with pytest.raises(SelectionError, match="no backend can serve"):
        run((record("hnd", row(layouts=("HND",))), record("n", row(dtypes=("float32",)))), pins=[
            {**PIN, "kv": {"layout": "NHD"}}
        ])  # fmt: skip


@pytest.mark.parametrize("text", ["{", "[1]", '{"decode": "a"}', '[{"host": {"platform": "cuda"}}]'])
def test_unreadable_pins_are_errors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="pinned decision"):
        load_pins(path)
    with pytest.raises(ConfigError, match="can't be read"):
        load_pins(tmp_path / "absent.json")


def test_the_draft_role_can_be_overridden_alone() -> None:
    wishes = (prefer("alpha"), prefer("alpha", phase=Phase.DECODE))
    decision = run((A, B), request(draft="beta"), preferences=wishes)
    assert chosen(decision) == ("alpha", "alpha")
    assert decision.phase(Phase.DRAFT).backend == "beta"
    assert decision.phase(Phase.VERIFY).backend == "alpha"


def test_a_slow_choice_is_not_excused_by_others_when_a_better_one_passes() -> None:
    near = record("near", row(dtypes=("float32",)))
    verdict = run((A, near, reference()), request(backend="torch_native")).decode.verdict
    assert isinstance(verdict, Degraded)
    assert verdict.reason.hint == ""
    verdict = run((near, reference()), request(backend="torch_native")).decode.verdict
    assert isinstance(verdict, Degraded)
    assert verdict.reason.hint.startswith("nearest: near")


def test_who_would_do_is_listed_without_the_slow_ones_first() -> None:
    tiny, slow = record("tiny", row(dtypes=("float32",))), record("slow", row(degraded="slow"))
    with pytest.raises(SelectionError) as caught:
        run((slow, tiny, A), request(decode="tiny"), preferences=both("slow", "alpha"))
    assert caught.value.allowed == "alpha, slow"
