"""Buckets, tables, and tables from bench results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from measure_fakes import cell, result

from anyattn.cli.bench_write import read_result, write_table
from anyattn.core.facts import HostFacts
from anyattn.core.measure import (
    Bucket,
    MeasuredTable,
    Origin,
    Role,
    Shape,
    Timing,
    Workload,
    load_table,
    merge_tables,
    power_of_two,
)
from anyattn.core.measure.from_bench import from_bench
from anyattn.core.measure.shipped import file_name, shipped_tables, tables_for
from anyattn.core.measure.table import SCHEMA
from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.errors import ConfigError

TWO = {"triton": (480.0, 0.01), "fa3": (500.0, 0.02), "FA3": (490.0, 0.0)}
SHAPE = Shape(
    q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, dtype="bfloat16", kv_dtype="bfloat16"
)  # fmt: skip


def decode(**fields: int) -> Bucket:
    sizes = {"page": 16, "requests": 64, "kv_len": 8192} | fields
    return Bucket(role=Role.DECODE, shape=SHAPE, layout="NHD", run="graph", **sizes)


# --- buckets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "bucket"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (1023, 1024), (5792, 4096), (5794, 8192)],
)
def test_counts_go_to_the_nearest_power_of_two(count: int, bucket: int) -> None:
    assert power_of_two(count) == bucket


def test_steps_that_count_as_alike_are_one_bucket() -> None:
    assert decode(requests=60, kv_len=8191) == decode()
    assert decode(requests=16) != decode()


def test_the_shape_of_a_layer() -> None:
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    assert Shape.of(spec, "bfloat16", "bfloat16") == SHAPE
    window = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, sliding_window=1000)
    assert Shape.of(window, "bfloat16", "bfloat16").window == 1024
    latent = AttentionSpec(
        num_q_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128, scale=0.1, mla=MLASpec()
    )
    found = Shape.of(latent, "bfloat16", "bfloat16")
    assert (found.kv_heads, found.head_dim, found.v_head_dim, found.mla) == (1, 576, 512, True)


def test_shards_of_a_model_have_its_groups() -> None:
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    shard = Shape.of(spec, "bfloat16", "bfloat16")
    assert shard.is_sharded(SHAPE)
    assert not Shape.of(spec, "bfloat16", "float8_e4m3fn").is_sharded(SHAPE)
    other = AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=128)
    assert not Shape.of(other, "bfloat16", "bfloat16").is_sharded(SHAPE)


def test_distance_is_in_steps_of_two() -> None:
    assert decode().distance(64, 8000, None) == 0
    assert decode().distance(16, 4096, None) == 2
    assert decode().distance(None, None, None) == 0


def test_a_workload_counts_from_one() -> None:
    with pytest.raises(ConfigError, match=r"Workload\.kv_len"):
        Workload(kv_len=0)
    with pytest.raises(ConfigError, match="run of a bucket"):
        Bucket(role=Role.DECODE, shape=SHAPE, page=1, layout="NHD", run="cold", requests=1, kv_len=1)


# --- from a bench result -----------------------------------------------------------------------------


def test_a_result_becomes_a_table() -> None:
    table = from_bench(result(cell(TWO)))
    assert dict(table.entries) == {decode(): {"triton": Timing(480e-6, 0.01), "fa3": Timing(500e-6, 0.02)}}
    made = table.provenance
    assert (made.device, made.arch, made.date, made.commit) == (
        "Fake GPU",
        "cuda:x1",
        "2026-11-29",
        "abc1234",
    )
    assert (made.units, made.command) == (132, "anyattn bench --json out.json")
    assert made.versions["klib"] == "2.1"


def test_phases_come_from_the_kind_of_step() -> None:
    cells = [
        cell(TWO),
        cell(TWO, step="extend", prefix=0, new=8192, batch=1, mode="eager"),
        cell(TWO, step="verify", prefix=1000, new=8),
        cell(TWO, step="mixed", prefix=1000, new=64),
    ]
    roles = [bucket.role for bucket in from_bench(result(*cells)).entries]
    assert roles == [Role.DECODE, Role.PREFILL, Role.VERIFY, Role.MIXED]


def test_mixed_steps_are_told_apart_by_their_prompts() -> None:
    """Rows that decode, prompts beside them, and the prompts' chunks: not the mean over both."""
    chat = [[625, 1024], [3362, 1024], *[[2500, 1]] * 126]
    wide = cell(TWO, step="mixed", batch=128, prefix=2570, new=17, lengths=chat, mode="eager")
    long = [[4096, 2048], *[[4096, 1]] * 63]
    one = cell(TWO, step="mixed", batch=64, prefix=4096, new=33, lengths=long, mode="eager")
    first, second = from_bench(result(wide, one)).entries
    assert first.size == (128, 2048, 1024, 2)
    assert second.size == (64, 4096, 2048, 1)
    assert str(second) == "mixed 64 x 4096, 1 with 2048 new (eager, page 16)"
    assert Bucket.from_json(second.to_json()) == second
    with pytest.raises(ConfigError, match="prompts of a bucket; asked: 0 in mixed"):
        dataclasses.replace(second, prompts=0)
    with pytest.raises(ConfigError, match="prompts of a bucket; asked: 1 in decode"):
        dataclasses.replace(second, role=Role.DECODE)


def test_a_table_of_version_1_is_read_and_written_as_version_2(tmp_path: Path) -> None:
    table = from_bench(result(cell(TWO), cell(TWO, step="verify", prefix=1000, new=8)))
    data = table.to_json() | {"schema": "anyattn.measured/1"}
    for each in data["entries"]:
        each["bucket"]["phase"] = each["bucket"].pop("role")
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert load_table(path).entries == table.entries
    load_table(path).save(path)
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == SCHEMA == "anyattn.measured/2"
    with pytest.raises(ConfigError, match=r"measured/3.*allowed: anyattn.measured/2 or anyattn.measured/1"):
        MeasuredTable.from_json(data | {"schema": "anyattn.measured/3"})


def test_what_a_merge_keeps_says_which_run_it_is_of(tmp_path: Path) -> None:
    """A run that timed every bucket anew leaves nothing of an older one's commit and command."""
    runs = {"commit": "abc1234", "command": "anyattn bench --json a.json", "date": "2026-11-28T22:00Z"}
    one = from_bench(result(cell(TWO), cell(TWO, page=64), **runs))
    two = from_bench(result(cell(TWO, page=64), commit="def5678", command="anyattn bench --json b.json"))
    both = merge_tables(one, two)
    assert (both.provenance.commit, both.provenance.command) == ("def5678", "anyattn bench --json b.json")
    assert both.provenance.date == "2026-11-29"
    (old,), (new,) = set(one.entries) - set(two.entries), set(two.entries)
    assert both.kept == {old: Origin("2026-11-28", "abc1234", "anyattn bench --json a.json")}
    assert both.origin(new) == Origin("2026-11-29", "def5678", "anyattn bench --json b.json")
    both.save(tmp_path / "both.json")
    again = load_table(tmp_path / "both.json")
    assert (again.entries, again.kept) == (both.entries, both.kept)
    assert merge_tables(again, two).kept == both.kept, "of the run that timed it, whatever comes later"
    assert merge_tables(both, one).kept == {}


def test_where_an_entry_is_from_is_told_in_texts() -> None:
    data = from_bench(result(cell(TWO))).to_json()
    data["entries"][0]["commit"] = 6391051
    with pytest.raises(ConfigError, match="date, commit and command of an entry are texts"):
        MeasuredTable.from_json(data)


def test_latents_and_windows_are_shapes_of_their_own() -> None:
    latent = cell(TWO, num_q=16, num_kv=1, dim=576, v_dim=512, page=64)
    window = cell(TWO, window=4096)
    shapes = [bucket.shape for bucket in from_bench(result(latent, window)).entries]
    assert [(s.mla, s.window) for s in shapes] == [(True, None), (False, 4096)]


def test_cells_of_one_bucket_are_joined_by_geometric_means() -> None:
    one = cell({"triton": (400.0, 0.01), "fa3": (100.0, 0.03), "extra": (1.0, 0.0)})
    other = cell({"triton": (900.0, 0.05), "fa3": (100.0, 0.01)}, batch=60)
    (times,) = from_bench(result(one, other)).entries.values()
    assert set(times) == {"triton", "fa3"}, "only who ran in all of them compares"
    assert times["triton"].seconds == pytest.approx(600e-6)
    assert times["triton"].spread == 0.05


def test_a_cell_with_one_backend_compares_nothing() -> None:
    alone = cell({"triton": (1.0, 0.0), "FA3": (1.0, 0.0)})
    assert len(from_bench(result(cell(TWO), alone | {"mode": "eager"})).entries) == 1
    with pytest.raises(ConfigError, match="no cell compares two backends"):
        from_bench(result(alone))


@pytest.mark.parametrize(
    "broken", [{"schema": "anyattn.bench/9"}, {"versions": None}, {"cells": [{}]}, {"cells": 3}]
)
def test_a_result_that_does_not_fit_is_an_error(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="bench result"):
        from_bench(result(cell(TWO), **broken))
    with pytest.raises(ConfigError, match="bench result"):
        from_bench([])


# --- files -------------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    saved = tmp_path / "out.json"
    saved.write_text(json.dumps(result(cell(TWO), cell(TWO, batch=1))))
    table, path = write_table(read_result(saved), tmp_path)
    assert path.name == file_name(table.provenance) == "cuda-x1.fake-gpu.json"
    again = load_table(path)
    assert again == table
    assert len([line for line in path.read_text().splitlines() if '"bucket"' in line]) == 2, "an entry a line"
    assert MeasuredTable.from_json(table.to_json(), table.name) == table


def test_facts_of_this_host_fill_in_what_a_result_lacks(tmp_path: Path) -> None:
    bare = result(cell(TWO))
    for name in ("units", "command"):
        del bare[name]
    facts = HostFacts("cuda", "x1", device_name="Fake GPU", num_units=7)
    table, _ = write_table(bare, tmp_path / "t.json", facts=facts, command="anyattn bench")
    assert (table.provenance.units, table.provenance.command) == (7, "anyattn bench")
    where = bare | {"command": "anyattn bench --json /home/me/out.json --cells decode-64x8k-32/8*"}
    told = write_table(where, tmp_path / "t.json")[0].provenance.command
    assert told == "anyattn bench --json out.json --cells decode-64x8k-32/8*", "folders are somebody's own"
    plain, _ = write_table(bare | {"arch": "sm90"}, tmp_path / "t.json")
    assert plain.provenance.arch == "cuda:sm90"


def test_merging_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(result(cell(TWO), cell(TWO, batch=1)), path)
    slower = {"triton": (600.0, 0.0), "fa3": (500.0, 0.0)}
    table, _ = write_table(result(cell(slower)), path, merge=True)
    assert len(table.entries) == 2
    assert table.entries[decode()]["triton"].seconds == pytest.approx(600e-6)
    replaced, _ = write_table(result(cell(slower)), path)
    assert len(replaced.entries) == 1


def test_tables_of_other_devices_or_versions_do_not_merge() -> None:
    one = from_bench(result(cell(TWO)))
    with pytest.raises(ConfigError, match="two devices"):
        merge_tables(one, from_bench(result(cell(TWO), device="Other")))
    patch = {"torch": "2.13.9", "anyattn": "0.1.3", "klib": "2.1.5"}
    assert merge_tables(one, from_bench(result(cell(TWO), versions=patch))).provenance.versions == patch
    with pytest.raises(ConfigError, match=r"klib 2\.1 -> 2\.2"):
        merge_tables(one, from_bench(result(cell(TWO), versions=patch | {"klib": "2.2"})))


_EMPTY = (
    '{"schema": "anyattn.measured/1", "device": "d", "arch": "a", "entries": [{"bucket": {}, "times": {}}]}'
)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "anyattn.measured/2"}', _EMPTY])
def test_a_file_that_is_no_table_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="measured table"):
        load_table(path)
    with pytest.raises(ConfigError, match="measured table"):
        tables_for("cuda:x1", {"ANYATTN_MEASUREMENTS": str(path)})


def test_times_are_positive() -> None:
    with pytest.raises(ConfigError, match="a measured time"):
        Timing(0.0)
    with pytest.raises(ConfigError, match="a measured time"):
        Timing(1.0, -0.1)


# --- which tables ------------------------------------------------------------------------------------


def test_the_variable_names_tables_or_none(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        paths.append(str(tmp_path / f"t{number}.json"))
        write_table(result(cell(TWO, batch=1 << number)), paths[-1])
    found = tables_for("cuda:x1", {"ANYATTN_MEASUREMENTS": ":".join(paths)})
    assert [table.name for table in found] == ["t0", "t1"]
    assert tables_for("cuda:x1", {"ANYATTN_MEASUREMENTS": "none"}) == ()
    assert tables_for("cuda:x1", {}) == shipped_tables("cuda:x1") == ()


def test_every_table_that_ships_is_sound() -> None:
    folder = Path(__file__).parents[2] / "anyattn" / "data" / "measured"
    for path in sorted(folder.glob("*.json")):
        table = load_table(path)
        made = table.provenance
        assert path.name == file_name(made)
        assert table in shipped_tables(made.arch)
        assert {"torch", "anyattn"} <= set(made.versions)
        assert made.date >= "2026-01-01"
        assert made.commit and made.command and made.units  # noqa: PT018
        assert not any(part[0] in "/~." for part in made.command.split()), "a path of somebody's machine"
        assert all(len(times) > 1 for times in table.entries.values())


@pytest.mark.parametrize(
    "fields",
    [{"versions": None}, {"versions": [1]}, {"versions": {"torch": 2}}, {"arch": 7}, {"date": None},
     {"units": "132"}, {"stranger": 1}, {"entries": 3}],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_an_error(fields: dict[str, object]) -> None:
    data = from_bench(result(cell(TWO))).to_json()
    assert MeasuredTable.from_json(data).to_json() == data
    with pytest.raises(ConfigError, match=r"fields of a measured table.*Next: write it again"):
        MeasuredTable.from_json(data | fields)


@pytest.mark.parametrize("field", [{"kv_heads": 0}, {"page": "16"}, {"requests": 1.5}, {"kv_len": -1}])
def test_a_bucket_counts_in_whole_numbers(field: dict[str, object]) -> None:
    data = from_bench(result(cell(TWO))).to_json()
    data["entries"][0]["bucket"] |= field
    with pytest.raises(ConfigError, match="no whole number"):
        MeasuredTable.from_json(data)


def test_times_are_finite() -> None:
    with pytest.raises(ConfigError, match="a measured time"):
        Timing(float("inf"))
    with pytest.raises(ConfigError, match="a measured time"):
        Timing(1.0, float("nan"))
