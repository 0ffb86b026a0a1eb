"""The store bench measures every case beside its baselines, names what it skips, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from kvstore.keys import SpaceId, space_id
from ops.bench import peers, results
from ops.bench.bars import small_blocks, standings
from ops.bench.baselines import Buffers, RawFile
from ops.bench.blocks import SPACE, base_payload, differing, names_of, stamp
from ops.bench.child import ChildFailed
from ops.bench.cli import app
from ops.bench.command import command_of
from ops.bench.echo import Echo, FilePair
from ops.bench.fio import seconds_of
from ops.bench.ground import BenchFailed, Settings, ground
from ops.bench.loads import Loads
from ops.bench.measure import Bar, Case, Contender, Measured, Result
from ops.bench.soak import growth
from ops.bench.store import GROUPS, Report, _run_group, settings_of

SPACE_ID: SpaceId = space_id(SPACE)
KIB = 1024
CASES: dict[str, set[str]] = {
    "get": {"get same host", "get network"},
    "put": {"put os same host", "put os same host, in place", "put os network"},
    "disk": {"put disk"},
    "cold": {"get cold", "get cold, bypass"},
    "beside": {"look-up beside 2 readers", "2 readers beside look-ups"},
    "mixed": {"mixed 90% reads", "mixed 50% reads"},
    "lookup": {"look-up present", "look-up absent"},
    "restart": {"restart after kill -9", "restart without the index"},
    "sweep": {"get beside a sweep"},
    "trace": set(),
}


def quietly(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """One quick run of everything: its JSON, its folder and what it told meanwhile."""
    folder = tmp_path_factory.mktemp("q")
    png = tmp_path_factory.mktemp("png") / "store.png"
    options = ["store", "--quick", "--sizes", "64KiB", "--peers", "files", "--data", str(folder), "--png", str(png)]
    options += ["--out", str(png.parent), "--soak", "1s"]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.stderr
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert list(folder.iterdir()) == []
    assert png.read_bytes().startswith(b"\x89PNG")
    written = {path.suffix: path for path in png.parent.iterdir() if path != png}
    assert set(written) == {".md", ".json", ".png"}
    assert len({path.stem for path in written.values()}) == 1
    assert json.loads(written[".json"].read_text()) == json.loads(done.stdout)
    assert "reprise bench store" in written[".md"].read_text() or "| bar |" in written[".md"].read_text()
    return json.loads(done.stdout), folder, done.stderr


def test_every_group_is_measured(quick_run: tuple[dict[str, Any], Path, str]) -> None:
    """Each group gives its cases; what a file system cannot do is named, not left out silently."""
    report = quick_run[0]
    names = {case["case"] for case in report["cases"]}
    for group in GROUPS:
        skipped = [reason for name, reason in report["skipped"].items() if group in name]
        assert CASES[group] <= names or (group == "cold" and "O_DIRECT" in skipped[0]), (group, report["skipped"])


def test_every_case_has_its_baseline_in_the_same_rounds(quick_run: tuple[dict[str, Any], Path, str]) -> None:
    """The store stands first, a limit is there, all have five rounds, and each ratio has its other."""
    for case in quick_run[0]["cases"]:
        kinds = [one["kind"] for one in case["results"]]
        assert kinds[0] == "store"
        assert "limit" in kinds[1:]
        assert {len(one["rates"]) for one in case["results"]} == {5}
        assert all(rate > 0 for one in case["results"] for rate in one["rates"])
        assert set(case["ratios"]) == {one["name"] for one in case["results"][1:]}
        assert case["limit"] in case["ratios"]
        moved = case["unit"] == "B"
        assert all((one["cpu_s_per_gb"] is not None) == moved for one in case["results"])


def test_a_run_says_where_and_how_it_was_made(quick_run: tuple[dict[str, Any], Path, str]) -> None:
    """Machine, versions, settings and memory go with the figures; the table goes to stderr beside JSON."""
    report, _, told = quick_run
    assert report["format"] == "reprise-bench-store-1"
    assert report["quick"] is True
    assert report["machine"]["cpus"] >= 1
    assert {"python", "numpy", "xxhash"} <= set(report["versions"])
    assert report["settings"]["sizes"] == [65536]
    assert report["memory"]["daemon"]["peak"] >= report["memory"]["daemon"]["anonymous"] > 0
    assert report["memory"]["many small blocks"]["blocks"] == 2048
    soaked = report["memory"]["soak"]
    assert soaked["samples"] >= 2
    assert soaked["recycled"] > 0
    assert soaked["found"] > 0.5
    assert {"growth", "anonymous_growth"} <= set(soaked)
    assert any(bar["what"] == "memory: resident over a soak" for bar in report["bars"])
    swept = report["sweeps"]
    assert swept["sweeps"] == 6
    assert swept["blocks"] == 6 * (2048 // 6)
    assert swept["segments_freed"] >= 6
    (replayed,) = report["traces"].values()
    assert 0.5 < replayed["hit_rate"] < 1.0
    assert "get same host" in told
    assert "ratios first" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "64"], "no unit"),
        (["--sizes", "65000B"], "multiples of 4 KiB"),
        (["--sizes", "1GiB"], "multiples of 4 KiB"),
        (["--sizes", ","], "multiples of 4 KiB"),
        (["--groups", "gets"], "there are no groups gets; there are get, put"),
        (["--peers", "mysql"], "there are no peers mysql; there are redis, valkey, lmcache, mooncake, files, rocksdb"),
        (["--soak", "long"], "long"),
        (["--data", "/nonexistent/folder"], "No such file"),
    ],
)
def test_bad_options_end_with_an_error_line(options: list[str], message: str) -> None:
    """Exit status 1 and one line that says what is wrong, before anything is started."""
    done = CliRunner().invoke(app, ["store", "--quick", *options])
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_disk_that_is_too_small_is_told_beforehand(tmp_path: Path) -> None:
    """The bench never fills a disk: it wants twice what it will write, and says so."""
    with (
        pytest.raises(ValueError, match="free, and the bench wants"),
        ground(Settings(put_capacity_bytes=1 << 60), tmp_path, quietly),
    ):
        pytest.fail("it began")
    assert list(tmp_path.iterdir()) == []


def a_case() -> Case:
    return Case("c", "B", (Contender("a", "store", 1.0, lambda: None), Contender("b", "limit", 1.0, lambda: None)))


def a_report(seconds_max: float = 60.0) -> Report:
    return Report("", Settings(rounds=5, sample_s=1e-6, seconds_max=seconds_max), True, {}, {})


def test_a_group_that_fails_is_named_and_ended() -> None:
    """What was measured before stays; the reason is in the report; what the group had open is closed."""
    closed: list[bool] = []

    def failing() -> Generator[Case]:
        try:
            yield a_case()
            raise BenchFailed("3 of 8 blocks came back with other bytes")
        finally:
            closed.append(True)

    report = a_report()
    _run_group(report, "get", failing, time.monotonic() + 60, quietly)
    assert report.skipped == {"get after 1 cases": "failed: 3 of 8 blocks came back with other bytes"}
    assert len(report.measured) == 1
    assert closed == [True]


def test_a_peer_that_fails_in_mid_run_is_left_out_and_named() -> None:
    """The case goes on without it and keeps the others' rounds; its bar is not compared, and it is not asked again."""
    calls: list[int] = []

    def failing() -> None:
        calls.append(1)
        if len(calls) > 4:
            raise ChildFailed("the client is gone")

    peer = Contender("valkey tcp", "peer", 1.0, failing, may_fail=peers.PEER_FAILURES)
    case = Case("c", "B", (*a_case().contenders, peer), (Bar("rate", 2.0, "valkey"),))
    report, forgotten = a_report(), list[str]()
    _run_group(
        report, "get", lambda: (one for one in (case, a_case())), time.monotonic() + 60, quietly, forgotten.append
    )
    assert report.skipped == {"valkey tcp from c 1": "failed: the client is gone"}
    assert forgotten == ["valkey tcp"]
    assert [[result.name for result in one.results] for one in report.measured] == [["a", "b"], ["a", "b"]]
    assert [len(result.rates) for result in report.measured[0].results] == [5, 5]
    assert [standing.word for standing in report.standings()] == ["not compared"]


def test_growth_is_the_second_half_beside_the_first() -> None:
    """The middle one of an odd number counts for neither; one look is no growth."""
    assert growth([10.0, 10.0, 99.0, 20.0, 22.0]) == 2.1
    with pytest.raises(BenchFailed, match="too short"):
        growth([1.0])


def test_fio_is_timed_by_itself() -> None:
    """The time is that of one pass, whatever was read in all; an answer without it fails, and ends no case."""
    read = {"io_bytes": 4 << 20, "runtime": 8}
    assert seconds_of("note: a warning" + json.dumps({"jobs": [{"read": read}]}), 1 << 20) == 0.002
    for answer in ("", "{}", json.dumps({"jobs": [{"read": {**read, "io_bytes": 0}}]})):
        with pytest.raises(ChildFailed):
            seconds_of(answer, 1 << 20)


def test_a_rate_that_is_enough_meets_its_bar() -> None:
    """Readers may fall behind what they reach alone if they are fast all the same; a peer goes by its first word."""
    mine = Result("reprise", "store", (6e9,), 1, 1.0, 1.0, 1.0)
    alone = Result("alone", "limit", (9e9,), 1, 1.0, 1.0, 1.0)
    valkey = Result("valkey tcp", "peer", (3e9,), 1, 2.0, 2.0, 2.0)
    bars = (Bar("rate", 0.8, "alone", enough=5e9), Bar("rate", 0.8, "alone", enough=7e9), Bar("p50_s", 0.6, "valkey"))
    case = Measured("readers", "B", 1 << 20, 64, (mine, alone, valkey), bars)
    assert [verdict.met for verdict in case.verdicts] == [True, False, True]
    assert bars[0].text == ">= 0.8 x alone or 5e+09/s"


def test_a_group_for_which_no_time_is_left_is_named() -> None:
    """It is not begun."""
    report = a_report()
    _run_group(report, "get", lambda: pytest.fail("it began"), time.monotonic() - 1, quietly)
    assert "raise --minutes" in report.skipped["get"]


def test_a_missing_server_is_skipped_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are here are measured, the others say what they lack; nothing is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found, skipped, _ = peers.start(["redis", "files", "valkey"], tmp_path, sys.executable)
    for peer in found:
        peer.close()
    assert [peer.name for peer in found] == ["files"]
    assert [one.name for one in skipped] == ["redis", "valkey"]
    assert "apt-get install redis-server" in skipped[0].reason


def test_a_server_without_a_client_is_skipped_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the clients is named; the server does not stay."""
    server = tmp_path / "redis-server"
    server.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\n"
        "unix = socket.socket(socket.AF_UNIX)\nunix.bind(sys.argv[sys.argv.index('--unixsocket') + 1])\n"
        "time.sleep(60)\n"
    )
    server.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = {child.pid for child in psutil.Process().children()}
    found, skipped, _ = peers.start(["redis"], Path(), "/bin/false")
    assert found == []
    assert "requirements-peers.txt" in skipped[0].reason
    assert {child.pid for child in psutil.Process().children()} <= before


def test_lmcache_that_is_not_installed_is_named_with_what_to_install(tmp_path: Path) -> None:
    found, skipped, _ = peers.start(["lmcache"], tmp_path, "/bin/false")
    assert found == []
    assert [skip.name for skip in skipped] == ["lmcache"]
    assert "lmcache of ops/bench/requirements-peers.txt" in skipped[0].reason


def test_files_as_a_peer_give_back_what_was_written(tmp_path: Path) -> None:
    """One file a block, read into the same buffers."""
    files = peers.Files(tmp_path / "files")
    views = Buffers(4096, 3).views
    for at, view in enumerate(views):
        view[:] = bytes([at]) * 4096
    files.write(4096, views)
    for view in views:
        view[:] = bytes(4096)
    files.read(4096, views)
    assert [bytes(view) for view in views] == [bytes([at]) * 4096 for at in range(3)]
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_payloads_are_those_of_their_names_only() -> None:
    """A swapped block, a changed byte and a foreign key are all found."""
    names, base = names_of(SPACE_ID, 7, 4), base_payload(8192)
    views = Buffers(8192, 4, base).views
    puts = stamp(names, views)
    assert [put.name for put in puts] == names
    assert differing(names, views, base) == 0
    assert differing(names[::-1], views, base) == 4
    views[2][8000] ^= 1
    assert differing(names, views, base) == 1
    assert names_of(SPACE_ID, 7, 4) == names
    assert not {name.key for name in names_of(SPACE_ID, 8, 4)} & {name.key for name in names}


def test_the_raw_transfer_moves_every_byte() -> None:
    """Many views, more than one send takes: what was put comes back, and the far end is gone afterwards."""
    echo = Echo.start(1 << 20)
    try:
        views = Buffers(1024, 1024).views
        sent = [at.to_bytes(4, "little") * 256 for at in range(1024)]
        for view, content in zip(views, sent, strict=True):
            view[:] = content
        echo.put(views)
        for view in views:
            view[:] = bytes(1024)
        echo.get(views)
        assert [bytes(view) for view in views] == sent
        assert echo.congestion
    finally:
        echo.close()
    assert not psutil.pid_exists(echo.pids[0])


def test_two_files_side_by_side_fill_every_view() -> None:
    """From memory whose bytes are known, an odd number of views and one alone; both far ends are gone afterwards."""
    pair = FilePair.start(1 << 20)
    try:
        for count in (1, 5):
            views = Buffers(8192, count).views
            pair.get(views)
            assert all(any(view) for view in views)
        assert len(set(pair.pids)) == 2
    finally:
        pair.close()
    assert not any(psutil.pid_exists(pid) for pid in pair.pids)


def test_a_raw_file_reads_what_it_wrote_and_goes_round(tmp_path: Path) -> None:
    """Writes follow one another and begin again at the end; reads are of whole blocks."""
    raw = RawFile.create(tmp_path / "raw", 4 * 4096)
    views = Buffers(4096, 3).views
    for at, view in enumerate(views):
        view[:] = bytes([at + 1]) * 4096
    raw.write_on(views)
    raw.write_on(views, sync=True)
    content = (tmp_path / "raw").read_bytes()
    assert len(content) == 4 * 4096
    assert [content[at * 4096] for at in range(4)] == [2, 3, 3, 1]
    raw.close()
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_fails_tells_why(tmp_path: Path) -> None:
    """A client process that cannot do its work ends with an error that reaches the bench."""
    with pytest.raises(ChildFailed, match=r"ops\.bench\.load|Unavailable|No such file"):
        Loads.start([f"file:{tmp_path}/missing/raw"], 4096, 1, (0, 1), 1)


def test_loads_run_together_and_count_reads_and_writes(tmp_path: Path) -> None:
    """Every call is a read or a write, timed; the background stops when told."""
    loads = Loads.start([f"file:{tmp_path / name}" for name in ("a", "b")], 4096, 2, (0, 1), 1)
    try:
        done = loads.mix(20, 0.5)
        assert len(done.reads_s) + len(done.writes_s) == 40
        assert min(len(done.reads_s), len(done.writes_s)) > 0
        assert loads.mix(5, 1.0).writes_s == ()
        with loads.reading():
            pass
        assert loads.read(3).seconds > 0
    finally:
        loads.close()


def test_small_blocks_are_compared_with_those_of_a_mebibyte() -> None:
    """Only batches of the same case count."""

    def case(size: int, rate: float, batch: int = 64) -> Measured:
        result = Result("reprise", "store", (rate,), 1, 1.0, 1.0, 1.0)
        return Measured("get", "B", size, batch, (result,))

    assert small_blocks([case(1 << 16, 3.0), case(1 << 20, 4.0), case(1 << 16, 1.0, batch=1)]) == {"get": 0.75}
    assert small_blocks([case(1 << 16, 3.0)]) == {}


def test_settings_keep_what_is_given() -> None:
    """Sizes are read with units; a quick run is small; blocks given win."""
    settings = settings_of(sizes=["64KiB", "1MiB"], groups=["get"], blocks=4096, is_quick=True)
    assert settings.sizes == (64 * KIB, 1024 * KIB)
    assert settings.groups == ("get",)
    assert settings.blocks == 4096
    assert settings.population_bytes < Settings().population_bytes
    assert settings.rounds == 5


def test_bars_that_are_missed_say_by_how_much() -> None:
    """Shares are of the bound; a bar that nothing could be compared with is listed too."""
    result = Result("reprise", "store", (3.0,), 1, 1.0, 1.0, 1.0)
    other = Result("preadv", "limit", (5.0,), 1, 1.0, 1.0, 1.0)
    case = Measured("get", "B", 1 << 20, 64, (result, other), (Bar("rate", 0.8, "preadv"), Bar("rate", 2.0, "peer")))
    memory = {"many small blocks": {"blocks": 1e6, "presence_bytes_per_block": 50.0}, "soak": {"growth": 1.0}}
    words = [standing.word for standing in standings([case], memory, {0: case.label})]
    assert words == ["short by 25%", "not compared", "short by 25%", "met"]


def test_a_kept_result_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    """Of every path that a run was given, or failed at, only the last part is kept."""
    trace = tmp_path / "runs.jsonl"
    trace.touch()
    arguments = ["/usr/bin/reprise", "bench", "store", "--data", str(tmp_path / "volume"), f"--trace={trace}"]
    arguments += ["--out", "results/kept/", "--groups", "get,put", "--peers-python", str(tmp_path / "bin" / "python3")]
    command = command_of(arguments, "store")
    assert command == (
        "reprise bench store --data volume --trace=runs.jsonl --out kept --groups get,put --peers-python python3"
    )
    assert command_of(["pytest"], "store") == ""
    settings = settings_of(sizes=["64KiB"], trace=trace, peers_python=str(tmp_path / "bin" / "python3"))
    report = Report(command, settings, True, {"load_average_before": (0.0,)}, {})
    report.skipped["put"] = f"failed: [Errno 28] No space left on device: '{tmp_path}/volume/1.seg' (0.3 GB/s)"
    kept = json.dumps(report.to_json())
    assert str(tmp_path) not in kept
    assert "'1.seg' (0.3 GB/s)" in kept
    assert report.to_json()["settings"]["peers_python"] == "python3"
    assert str(tmp_path) not in results.page_of(report, "stem")
