"""Tests of reproduce.py and what it stands on: which run is which, the results, the tables, the processes."""

import csv
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import records      # noqa: E402
import reproduce    # noqa: E402
import studies      # noqa: E402
import tables       # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_parser():
    """Build run.py's parser once, for these tests parse a thousand command lines."""
    import run
    own = run.flag_parser
    run.flag_parser = functools.cache(own)
    yield
    run.flag_parser = own


COLUMNS = "round,test_acc,test_loss,train_loss,gate,h_norm,gain,seconds"


def run_folder(root, flags, seed=0, accs=(90, 96, 97, 97.5), goal=97.0, config=(), **more):
    """A run folder as run.py leaves it, of settings that `flags` make, with the accuracies as its log."""
    folder = root / f"run-seed{seed}-{len(list(root.iterdir()))}"
    folder.mkdir()
    settings = records.resolve(flags) | {"seed": seed, "split": "0"} | more
    rows = "".join(f"{t},{acc},1.0,1.0,,,,0.5\n" for t, acc in enumerate(accs, 1))
    (folder / "log.csv").write_text(f"{COLUMNS}\n{rows}")
    made_with = dict(settings=settings, device="cpu", torch="2") | dict(config)
    (folder / "config.json").write_text(json.dumps(made_with))
    (folder / "summary.json").write_text(json.dumps(dict(target_acc=goal)))
    return folder


def lines_of(text):
    """The cells of the tables in a text, without heads."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [line for line in lines if line[0] != "method"]


def refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        reproduce.main(argv)
    err = capsys.readouterr().err
    assert err.startswith("reproduce.py: ") and err.count("\n") == 1
    return err


# ---- which run is which ----

def test_a_study_s_flags_are_those_of_its_runs():
    """Tables find a study's runs without run.py, so flags that its settings would not give back find none."""
    for name, s in studies.STUDIES.items():
        for label, flags in s["variants"].items():
            flags = f"{s['setting']} {flags}"
            settings = records.resolve(flags)
            assert settings and records.flags_of(settings) == records.key_of(flags)[0], (name, label)


def test_rows_of_older_versions_are_known_by_today_s_flags():
    """Each row of runs.csv has the hyper-parameters that run.py makes of its flags today."""
    with open(HERE / "results" / "runs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len({(row["flags"], row["contents"], row["seed"]) for row in rows}) >= 793
    for row in rows:
        settings = records.resolve(row["flags"])
        hyper = " ".join(f"{name}={value}" for name, value in settings["hyper"].items())
        assert hyper == row["hyper"] and records.flags_of(settings) == row["flags"]
        assert row["contents"] == studies.CONTENTS.get(settings["dataset"], "")


def test_every_row_has_its_curve():
    rows, columns = [row for its in records.measured(HERE / "results").values() for row in its.values()], {}
    for row in rows:
        name = f"{row['method']} {row['variant']}".strip() + f" seed {row['seed']}"
        columns.setdefault(row["setting"], {})[name] = row
    assert sorted(f"{setting}.csv" for setting in columns) == sorted(os.listdir(HERE / "results" / "curves"))
    for setting, its in columns.items():
        table = records.read_csv(HERE / "results" / "curves" / f"{setting}.csv", ("round",))
        assert table[0].keys() - {"round"} == its.keys()
        for name, row in its.items():
            curve = {int(line["round"]): line[name] for line in table if line[name]}
            assert curve[max(curve)] == row["last"] and max(curve) == int(row["played"])
    assert len(rows) == sum(map(len, columns.values()))


@pytest.mark.parametrize("flags, same", [
    ("--algo fedssg --form released --correction none", "--algo fedssg --form stable --correction none"),
    ("--algo fedssg --form stable --kappa 0.25", "--algo fedssg --form scaled"),
    ("--algo fedssg --form stateless --alignment inner", "--algo fedssg --form light"),
    ("--algo fedssg --form light --correction plain", "--algo fedssg --form scaled --gate-ratio off"),
    ("--algo fedssg --form light --kappa 0.1 --gate-ratio horizon --alignment server",
     "--algo fedssg --form scaled --kappa 0.1 --alignment server --correction none"),
    ("--algo feddc --alpha 0.1 --num-clients 100", "--algo feddc"),
    ("--algo feddc --lr-decay 1.0 --hidden 30 20", "--algo feddc --hidden 30 20 --lr-decay 1")])
def test_two_spellings_of_a_run_are_one(flags, same):
    found = records.flags_of(records.resolve(f"--dataset mnist {flags}"))
    assert found == records.in_order(f"--dataset mnist {same}")


def test_the_paper_s_row_is_of_its_own_setting_alone():
    key = "MNIST,100,15,DiD1"
    for flags, expected in {
            "--algo feddc": f"{key},feddc", "--algo feddc --lr-decay 1": "", "--algo feddc --alpha 0.3": "",
            "--algo feddc --dir-alpha 1 --participation 0.1": "MNIST,100,10,IID,feddc",
            "--algo fedssg --form main --alpha 0.05 --gate-shape clip": f"{key},fedssg",
            "--algo fedssg --form scaled": "", "--algo fedssg --form light": "",
            "--algo feddc --rounds 40": ""}.items():
        assert records.paper_key(f"--dataset mnist {flags}") == expected, flags
    jpeg = f"{studies.JPEG} --algo feddc --precision bf16"
    assert records.paper_key(jpeg) == ""
    assert records.paper_key(jpeg, "cifar10") == "CIFAR-10,100,10,DiD1,feddc"


def test_contents_of_a_data_file_make_another_run(tmp_path, capsys):
    """Two files of one name are two data sets, and neither is MNIST: in tables, results and curves."""
    (tmp_path / "runs").mkdir()
    for contents, accs in ("0a", (90, 91)), ("0b", (80, 81)):
        run_folder(tmp_path / "runs", "--algo feddc", accs=accs, dataset="mnist.npz", contents=contents,
                   rounds=2)
    reproduce.main([str(tmp_path / "runs"), "--table"])
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("**")]
    assert [title.split("-")[:2] for title in titles] == [["**mnist.npz", "0a"], ["**mnist.npz", "0b"]]
    results = tmp_path / "results"
    reproduce.main(["--harvest", str(tmp_path / "runs"), "--results", str(results)])
    rows = [row for its in records.measured(results).values() for row in its.values()]
    assert [records.curve_of(row, results) for row in rows] == [{1: 90, 2: 91}, {1: 80, 2: 81}]


def test_a_folder_that_is_not_of_a_run(tmp_path, capsys):
    config = run_folder(tmp_path, "--algo feddc") / "config.json"
    whole = json.loads(config.read_text())
    for name in ("num_clients", "participation", "hyper", "lr"):        # another program's, or an old one
        lacking = {key: value for key, value in whole["settings"].items() if key != name}
        config.write_text(json.dumps(whole | {"settings": lacking}))
        assert "not a run folder of this version" in refused([str(config.parent), "--table"], capsys)
    for change in ({"algo": "unheard"}, {"seed": "x"}):      # edited by hand, or another's method
        config.write_text(json.dumps(whole | {"settings": whole["settings"] | change}))
        assert "not a run folder of this version" in refused([str(config.parent), "--table"], capsys)
    config.write_text(json.dumps(whole | {"settings": whole["settings"] | {"unheard_of": 1}}))
    assert "no flags for its settings" in refused([str(config.parent), "--table"], capsys)
    config.write_text(json.dumps(whole))
    (config.parent / "summary.json").write_text('{"target_acc": null}')
    assert "not a run folder of this version" in refused([str(config.parent), "--table"], capsys)


# ---- numbers ----

def test_t95_is_student_s():
    """The quantile within which 95 % of the t density lies, by Simpson's rule."""
    for freedom, t in enumerate(tables.T95, 1):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)

        def density(x):
            return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        n, step = 2000, t / 2000
        inner = sum(density(k * step) * (4 if k % 2 else 2) for k in range(1, n))
        assert abs(2 * step / 3 * (density(0) + inner + density(t)) - 0.95) < 2e-4, freedom


def test_paired_differences_by_hand():
    # differences -2, -1, 0: mean -1, sd 1, half-width 4.303 / sqrt(3) = 2.48; seed 3 has no partner
    ours, theirs = {0: 8, 1: 9, 2: 10, 3: 50}, {0: 10, 1: 10, 2: 10, 4: 1}
    assert tables.against(ours, theirs, 2) == ["-1.00", "-3.48 to +1.48"]
    assert tables.against({0: 8}, theirs, 2) == ["-", "-"]


def test_what_is_sent_and_kept():
    for label, vectors in {
            "fedavg": (2, 2, 0), "scaffold": (4, 3, 1), "feddyn": (2, 2, 1), "feddc": (4, 3, 2),
            "fedssg scaled": (4, 3, 2), "fedssg, phi = 2, no correction": (2, 2, 1), "fedssg prox": (2, 2, 1),
            "fedssg, memory on the server, phi = 2": (4, 3, 1), "fedssg, no alignment": (4, 3, 1),
            "fedssg light": (2, 2, 1), "fedssg stateless": (2, 2, 0)}.items():
        assert tables.vectors(studies.ROWS[label]) == vectors, label
    for flags, vectors in {
            "main": (2, 2, 1), "main --correction plain": (4, 3, 2), "appendix": (3, 3, 2),
            "appendix --kappa 0.1 --alignment server": (3, 3, 1), "scaled --correction last": (3, 3, 2),
            "stateless --correction plain": (4, 3, 1), "stateless --alignment inner": (2, 2, 1)}.items():
        assert tables.vectors(f"--algo fedssg --form {flags}") == vectors, flags


def result(results, name, label, seed, played=40, end="T", last50="", targets="95:20 97:30 98:>40"):
    """Add a row to results, as if a study's run had been measured."""
    flags, contents = records.key_of(f"{studies.STUDIES[name]['setting']} {studies.ROWS[label]}")
    row = dict.fromkeys(records.COLUMNS, "x") | dict(
        flags=flags, contents=contents, seed=str(seed), setting="s", to_targets=targets, last="97", end=end,
        last50_mean=str(last50), last50_std="0.1", played=str(played), seconds_per_round="1")
    records.keep(results, row, {})


def test_tuning_chooses_and_says_when_a_grid_ends(tmp_path):
    """By rounds; of whole runs by the last 50, where within 0.03 points the rounds decide."""
    labels, name = studies.CHOICES["feddc"], "tuned-500-tuning"
    for label, acc, rounds in zip(labels, (98, 98.21, 98.2, 98.19, 98.1), (50, 90, 80, 70, 60)):
        assert records.chosen(name, labels, records.measured(tmp_path)) is None
        result(tmp_path, name, label, 100, 600, last50=acc, targets=f"97:{rounds}")
    rows = records.measured(tmp_path)
    assert records.chosen(name, labels, rows) == "feddc, alpha 0.3"
    assert list(records.variants_of("tuned-500", rows)) == ["feddc, alpha 0.3"]
    assert set(studies.CHOICES) - set(records.untuned("tuned-500", rows)) == {"feddc"}
    wanted = [task[1:] for task in reproduce.missing(["tuned-500"], rows)]
    assert [(label, seed) for label, *_, seed in wanted] == [("feddc, alpha 0.3", seed) for seed in range(5)]
    for label, rounds in zip(labels, (30, 31, 29, 28, 27)):
        for seed in (100, 101) if rounds != 31 else (100,):
            result(tmp_path, "tuned-100-tuning", label, seed, rounds, "target", targets=f"97:{rounds}")
    written = tables.tuning_table("tuned-100-tuning", records.measured(tmp_path))
    line, = (cells for cells in lines_of("\n".join(written)) if cells[0] == "feddc")
    assert line[1:5] == ["alpha", "open", "0.01: 30.0", "0.03: 31.0 (1 of 2)"]
    result(tmp_path, "tuned-100-tuning", labels[1], 101, 120, "stopped", targets="97:>120")
    line, = (cells for cells in lines_of("\n".join(tables.tuning_table(
        "tuned-100-tuning", records.measured(tmp_path)))) if cells[0] == "feddc")
    assert line[1:5] == ["alpha", "0.7, the end of its grid", "0.01: 30.0", "0.03: not in 120"]


def test_kappa_s_regrets_by_hand(tmp_path):
    """Rounds fall short in units of 1.5, accuracies of 0.15; a seed that one kappa lacks does not count."""
    for label, rounds, acc in zip(studies.KAPPAS, (24, 22, 25, 23), (98.2, 98.05, 98.1, 98.0)):
        result(tmp_path, "kappa-100-tuning", label, 100, rounds, "target", targets=f"97:{rounds}")
        result(tmp_path, "kappa-500-tuning", label, 100, 600, last50=acc, targets="97:100")
    result(tmp_path, "kappa-100-tuning", studies.KAPPAS[0], 101, 300, targets="97:299")
    first, second, *_, worst = lines_of("\n".join(tables.kappa_tuning(records.measured(tmp_path))))[1:]
    assert first[2:] == ["1 of 2", "24.0 (2.0)", "22.0 (0.0)", "25.0 (3.0)", "23.0 (1.0)"]
    assert second[2:] == ["1", "98.20 (0.00)", "98.05 (0.15)", "98.10 (0.10)", "98.00 (0.20)"]
    assert worst[0] == "worst shortfall in 2 of 7 settings" and worst[3:] == ["1.3", "1.0", "2.0", "1.3"]


def test_kappa_beside_alpha_by_hand(tmp_path):
    """On the seeds that both have: 25 and 27 rounds against 24 and 30; the third seed has no partner. The
    seeds 0 to 2 were in first trials of this setting."""
    for label, met in ("fedssg scaled", (25, 27)), ("fedssg stable", (24, 30, 90, 20, 20)):
        for seed, rounds in enumerate(met):
            result(tmp_path, "kappa-100", label, seed, rounds, "target", targets=f"97:{rounds}")
    line = lines_of("\n".join(tables.kappa_test("", "fedssg scaled", records.measured(tmp_path))))[1]
    # -1 on average, 12.706 * 2.828 / sqrt(2) = 25.4
    assert line[2:] == ["2 of 10", "26.0 ± 1.4", "27.0 ± 4.2", "-1.0", "-26.4 to +24.4"]
    for seed, rounds in (3, 21), (4, 23):
        result(tmp_path, "kappa-100", "fedssg scaled", seed, rounds, "target", targets=f"97:{rounds}")
    fresh = tables.kappa_test("", "fedssg scaled", records.measured(tmp_path), fresh=True)
    # 1 and 3: 2 on average, 12.706 * 1.414 / sqrt(2) = 12.7
    assert lines_of("\n".join(fresh))[1][2:] == [
        "2 of 7", "22.0 ± 1.4", "20.0 ± 0.0", "+2.0", "-10.7 to +14.7"]


# ---- tables ----

def test_table_groups_by_all_that_differs(tmp_path, capsys):
    for flags in ("--algo feddc", "--algo feddc --lr-decay 1", "--algo feddc --lr-decay 1 --alpha 0.5",
                  "--algo feddc --alpha 0.5"):
        for seed in (0, 1):
            run_folder(tmp_path, flags, seed)
    run_folder(tmp_path, "--algo feddc", 2, accs=(90, 91))
    run_folder(tmp_path, "--algo scaffold", accs=(90, 91))
    reproduce.main([str(tmp_path), "--table", "--target", "96", "97"])
    out = capsys.readouterr().out
    heads = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| method")]
    # a column of which no row has anything is left out: the paper's of 96 %, and accuracy, for no run ended
    minus = ["minus feddc", "95 %"]
    assert [x.split(" (")[0] for x in max(heads, key=len)] == [
        "method", "seeds", "rounds to 96 %", *minus, "rounds to 97 %", "paper", *minus]
    rows = lines_of(out)
    own, = (row for row in rows if row[1] == "3")       # the paper's number is of its own setting
    assert own[2:] == ["2.0 ± 0.0; 1 of 3 not in 2", "-", "-", "3.0 ± 0.0; 1 of 3 not in 2", "31", "-", "-"]
    same = ["+0.0", "+0.0 to +0.0"]                     # `-` is for feddc itself, and for one pair alone
    assert sorted(row[3:] for row in rows if row is not own) == [
        [*same, "3.0 ± 0.0", *same], [*same, "3.0 ± 0.0", "-", *same], ["-", "-", "3.0 ± 0.0", "-", "-"],
        ["-", "-", "not in 2", "35", "-", "-"]]


def test_minus_takes_another_row(tmp_path, capsys):
    for seed in (0, 1):
        run_folder(tmp_path, "--algo feddc", seed)                             # round 3
        run_folder(tmp_path, "--algo feddyn --alpha 0.1", seed, (97,))         # not the row that is meant
    for seed, accs in enumerate([(97,), (90, 91, 92, 97)]):                    # fewer by 2, more by 1
        run_folder(tmp_path, "--algo feddyn", seed, accs)
    for base, row, mean in (("feddyn", "feddc", 0.5), ("feddc", "feddyn", -0.5)):
        reproduce.main([str(tmp_path), "--table", "--target", "97", "--minus", base])
        out = capsys.readouterr().out
        line, = (line for line in lines_of(out) if line[0] == row)
        assert f"minus {base}" in out
        assert line[-2:] == [f"{mean:+.1f}", f"{mean - 19.1:+.1f} to {mean + 19.1:+.1f}"]
    err = refused([str(tmp_path), "--table", "--minus", "fedxyz"], capsys)
    assert "--minus fedxyz: no such row; use one of feddc, feddyn, feddyn alpha=0.1" in err


def test_tables_md_is_what_the_command_writes(tmp_path):
    """And what it writes in half a second, for it does not wait for torch."""
    (tmp_path / "curves").symlink_to(HERE / "results" / "curves")
    (tmp_path / "runs.csv").symlink_to(HERE / "results" / "runs.csv")
    code = ("import sys, reproduce; reproduce.main(['--tables', '--results', sys.argv[1]]); "
            "print('torch' in sys.modules)")
    words = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout == "False\n"
    own, written = HERE / "results" / "tables.md", tmp_path / "tables.md"
    assert own.read_bytes() == written.read_bytes(), "run python experiments/reproduce.py --tables"


def test_the_last_ten_evaluations_end_at_the_limit(tmp_path):
    accs = {t: t / 10 for t in range(5, 1001, 5)}
    row = {"method": "m", "variant": "", "seed": "0", "setting": "s"}
    records.write_csv(tmp_path / "curves" / "s.csv", ("round", "m seed 0"), list(accs.items()))
    assert tables.last_ten([row], 900, tmp_path) == "87.75"         # rounds 855, 860, ..., 900
    assert tables.last_ten([], 900, tmp_path) == "-"


# ---- harvest, dry run ----

def test_harvest_takes_what_is_finished(tmp_path, capsys, monkeypatch):
    runs, results = tmp_path / "runs", tmp_path / "results"
    runs.mkdir()
    flags = f"{studies.STUDIES['smoke']['setting']} --algo feddc"
    for seed, accs in enumerate([(10, 20, 30), (10, 10, 20)]):
        run_folder(runs, flags, seed, accs, config=[("commits", [None, "abc", "def+"])] if seed else ())
    running = run_folder(runs, f"{flags} --lr 0.2", 0, (10, 20), goal=90)
    at_target = run_folder(runs, f"{flags} --lr 0.3", 0, (10, 20), goal=20)
    limit = run_folder(runs, f"{studies.JPEG} --algo feddc", 0, range(150), goal=200, contents="c069ea35")
    other = run_folder(runs, f"{studies.JPEG} --algo feddc", 0, range(150), goal=200, contents="another")
    monkeypatch.setenv("HOME", str(tmp_path))
    reproduce.main(["--harvest", str(runs), "--results", "~/results", "--version", "v1"])
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {folder for folder, line in told.items() if line.startswith("left out, unfinished")} == {
        running.name, other.name}
    assert told[at_target.name].startswith("taken in") and told[limit.name].startswith("taken in")
    its = records.measured(results)[records.key_of(flags)]
    assert {seed: (row["version"], row["best"]) for seed, row in its.items()} == {
        0: ("v1", "30.00"), 1: ("abc def+", "20.00")}
    assert records.curve_of(its[0], results) == {1: 10.0, 2: 20.0, 3: 30.0}
    reproduce.main(["--harvest", str(runs), "--results", "~/results"])
    assert capsys.readouterr().out.count("there already") == 4
    assert "one at a time" in refused(["--harvest", str(runs), "--dry-run"], capsys)
    for more, left, row in (["--seeds", "1"], "2 runs", ["1", "2.0"]), ([], "4 runs", ["2", "2.5 ± 0.7"]):
        reproduce.main(["smoke", "--dry-run", "--results", str(results), *more])
        assert capsys.readouterr().out.splitlines()[-1].startswith(left)
        reproduce.main(["smoke", "--table", "--results", str(results), *more])
        line, = (line for line in lines_of(capsys.readouterr().out) if line[0] == "feddc")
        assert line[1:3] == row


def test_names_and_refusals(tmp_path, capsys):
    assert reproduce.find("cifar10") == ["cifar10"] and len(reproduce.find("memory")) == 2
    assert reproduce.find("epochs*") == ["epochs-1", "epochs-5", "epochs-10"]
    for argv, says in [
            ("nosuch", "no such study"), ("", "name a study"), ("form --workers 0", "1 or more"),
            ("form --table --target 96", "target 96: runs.csv has the rounds to 90, 95, 97, 98 %"),
            (f"form --table --results {tmp_path}", "has no runs.csv")]:
        assert says in refused(argv.split(), capsys)


# ---- processes ----

def test_the_command_of_a_run():
    args = SimpleNamespace(data_dir=Path("my data"), out=Path("runs"), threads=1)
    task = "cifar10-500", "feddc", "--dataset cifar10_jpeg.npz", None, 0
    command = reproduce.command(task, args)
    assert command[2:6] == ["--dataset", "my data/cifar10_jpeg.npz", "--stop-after", "900"]
    assert command[6:] == ["--seed", "0", "--out", "runs", "--data-dir", "my data"]
    command = reproduce.command(("gate", "", "", None, 3), args)
    assert command[2:5] == ["--stop-at-target", "--target-acc", "97"]


def test_a_run_that_ends_is_kept(tmp_path, capsys):
    args = SimpleNamespace(out=tmp_path / "runs", results=tmp_path / "results")
    args.out.mkdir()
    flags = f"{studies.STUDIES['smoke']['setting']} --algo feddc"
    run_folder(args.out, flags, 1, (10, 10, 20))
    (run_folder(args.out, "--algo fedavg", 1) / "config.json").write_text("{")      # another run's is broken
    task = "smoke", "feddc", flags, records.key_of(flags), 1
    assert reproduce.finish(SimpleNamespace(returncode=0), None, task, args) == 0
    assert records.measured(args.results)[task[3]][1]["best"] == "20.00"
    assert reproduce.finish(SimpleNamespace(returncode=0), None, (*task[:4], 7), args) == 1
    assert "no folder in" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_runs_end_with_whoever_started_them(how, tmp_path):
    """No run goes on by itself, and two at once have one thread each."""
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a child of its parent's death")
    child = ("import os, sys, time; open(sys.argv[1] + '/' + str(os.getpid()), 'w').write("
             "os.environ['OMP_NUM_THREADS']); time.sleep(60)")
    code = (f"import sys, reproduce; reproduce.command = lambda *_: [sys.executable, '-c', {child!r}, "
            f"{str(tmp_path)!r}]; sys.exit(reproduce.main(['smoke', '--workers', '2', '--results', "
            f"{str(tmp_path / 'results')!r}]))")
    # under nohup, or with &, it is ignored
    before = signal.signal(how, signal.SIG_DFL) if how != signal.SIGKILL else None
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stderr=subprocess.PIPE, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "7"})
    if how != signal.SIGKILL:
        signal.signal(how, before)
    until(lambda: sum(path.read_text() == "1" for path in tmp_path.iterdir()) == 2)
    runs = [int(path.name) for path in tmp_path.iterdir()]
    driver.send_signal(how)
    _, told = driver.communicate(timeout=20)
    assert driver.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert told.count("stopped") == (0 if how == signal.SIGKILL else 2)
    until(lambda: not any(map(alive, runs)))


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")          # a zombie has ended, too
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_an_error_of_the_driver_ends_its_runs(monkeypatch, tmp_path):
    started = []

    def start(words):
        if started:
            raise OSError("no second process")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0], None
    monkeypatch.setattr(reproduce, "start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = SimpleNamespace(workers=2, results=tmp_path, seeds=1, out=tmp_path, data_dir="data")
    with pytest.raises(OSError, match="no second process"):
        reproduce.play(["smoke"], args)
    assert started[0].poll() == -signal.SIGTERM


# ---- terminals ----

def test_an_ascii_terminal(tmp_path):
    """-OO takes docstrings away; LC_ALL=C and PYTHONIOENCODING leave ASCII alone."""
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0",
                        "PYTHONCOERCECLOCALE": "0"}
    for words in (["--help"], ["--list"], ["form", "--table"]):
        words = [sys.executable, "-OO", HERE / "reproduce.py", *words]
        done = subprocess.run(words, env=env, capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert b"24.8 ? 1.1" in done.stdout
    results = tmp_path / "\u00e4"
    code = ("import records, pathlib; p = pathlib.Path('x.csv'); records.write_csv(p, ['a'], [[chr(177)]]); "
            "assert records.read_csv(p, ['a']) == [{'a': chr(177)}]")
    results.mkdir()
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}"], env=env,
                   cwd=results, check=True)
    assert (results / "x.csv").read_bytes() == "a\n\u00b1\n".encode()


def test_without_the_packages_one_line_says_so():
    done = subprocess.run([sys.executable, "-S", HERE / "reproduce.py", "all", "--dry-run"], text=True,
                          stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert done.returncode == 2 and re.fullmatch("reproduce.py: No module named .*\n", done.stderr)
