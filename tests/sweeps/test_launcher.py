"""Launchers, and sweeps in processes of their own: workers, jobs, failures, kills, signals."""

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from omegaconf import OmegaConf
from processes import Script, live_processes
from small_runs import ROOT, composed, one_line, rows, small_run, table, wait_until
from sweep_folders import read_table

from minigpt.extras.search.submitit_launcher import RequeuedJob
from minigpt.runs.run_config import check_run
from minigpt.runs.run_dir import read_summary, write_summary
from minigpt.sweeps.launcher import Joblib, visible_gpus
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.sweeps.results import COMPLETED, NATS, SKIPPED, Point, read_plan, read_sweep, refresh
from minigpt.utils.errors import RunError
from minigpt.utils.signals import Interrupted

JOB_WITHOUT_STREAMS = """
import sys
from pathlib import Path
from minigpt.sweeps.launcher import _output_to, _Worker
from minigpt.utils.terminal import replace_dead_output

def job():
    with _output_to(Path(sys.argv[1])):
        print("trained")

replace_dead_output(ends_script=False)
_Worker({}).submit(job).result()
"""


def test_a_sweep_without_standard_streams_writes_the_output_of_its_jobs(tmp_path):
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", JOB_WITHOUT_STREAMS.replace("sys.argv[1]", repr(str(log)))]
    subprocess.run(command, cwd=ROOT, preexec_fn=lambda: os.closerange(0, 3), check=True)
    assert log.read_text(encoding="utf-8") == "trained\n"


@pytest.mark.parametrize(
    ("jobs", "requested", "machine", "threads", "gpus"),
    [
        (2, {}, {"cores": 4}, 2, [None] * 2),
        (9, {"threads": 3}, {"cores": 4}, 3, [None] * 4),
        (9, {}, {"cores": 8, "gpus": "0,GPU-8f"}, 4, ["0", "GPU-8f"]),
        (9, {"n_jobs": 3}, {"cores": 6, "gpus": "2,5"}, 2, ["2", "5", "2"]),
        (9, {"devices": 2}, {"cores": 8, "gpus": "0,1"}, 8, [None]),
        (9, {"accelerator": "cpu"}, {"cores": 2, "gpus": "0"}, 1, [None] * 2),
    ],
)
def test_workers_share_cores_and_gpus(monkeypatch, jobs, requested, machine, threads, gpus):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.get("gpus", ""))
    monkeypatch.setattr("loky.cpu_count", lambda: machine["cores"])
    joblib = Joblib(requested.get("n_jobs"), requested.get("threads"))
    joblib.cfg = OmegaConf.create({"trainer": {"accelerator": "auto", "devices": 1} | requested})
    workers = [worker.env for worker in joblib.start(jobs)]
    assert [worker["OMP_NUM_THREADS"] for worker in workers] == [str(threads)] * len(gpus)
    assert [worker.get("CUDA_VISIBLE_DEVICES") for worker in workers] == gpus


@pytest.mark.parametrize(
    ("given", "threads"),
    [("4,2", 4), (" 3 , 1", 3), ("", 2), ("0", 2), ("auto", 2), (",4", 2), ("-1", 2)],
)
def test_workers_have_the_first_number_of_omp_num_threads_if_it_has_one(
    monkeypatch, given, threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("loky.cpu_count", lambda: 4)
    joblib = Joblib(n_jobs=2.0, threads=None)
    joblib.cfg = OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": 1}})
    assert [worker.env for worker in joblib.start(9)] == [{"OMP_NUM_THREADS": str(threads)}] * 2


def test_without_an_environment_variable_gpus_are_those_of_the_machine(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert visible_gpus() == ["0", "1"]


class TwoJobs(Joblib):
    """Two jobs at a time, which run until they were stopped so often.

    Signals arrive when the second one starts.
    """

    most_jobs = 2

    def __init__(self, signums, stops):
        self.executors = []
        self.configure = lambda *_: None
        self.signums = signums
        self.needed = stops
        self.submitted = []
        self.stops = []
        self.ended = []
        self.on_end = lambda *ended: self.ended.append(ended)

    def start(self, jobs):
        signums = self.signums

        class Executors(list):
            def pop(self):
                for signum in signums if len(self) == 1 else ():
                    signal.raise_signal(signum)
                return super().pop()

        return Executors([self] * jobs)

    def submit(self, job):
        self.submitted.append(job.point)
        return Future()

    def stop(self, futures, *, kill):
        self.stops.append(kill)
        for future in futures if len(self.stops) == self.needed else ():
            future.set_exception(BrokenExecutor("The exit codes of the workers are {SIGTERM(-15)}"))


SENT = {
    "SIGINT": [False],
    "SIGTERM SIGTERM": [False, True],
    "SIGHUP SIGHUP": [False],  # of the shell and of the system when a terminal closes
}


@pytest.mark.parametrize("sent", SENT)
def test_a_signal_as_a_job_starts_ends_the_running_jobs_and_starts_no_more(tmp_path, sent):
    signums = [signal.Signals[name] for name in sent.split()]
    launcher = TwoJobs(signums, len(SENT[sent]))
    launcher.points = [Point(tmp_path / str(number), {}) for number in range(4)]
    with pytest.raises(Interrupted) as ended:
        launcher.launch([[]] * 4, 0)
    assert ended.value.exit_code == 128 + signums[0]
    assert launcher.stops == SENT[sent]  # whether the jobs were killed
    # Resumed later, and not failed
    assert launcher.ended == [(point, "") for point in launcher.submitted]
    assert len(launcher.submitted) <= 2


def done():
    future = Future()
    future.set_result(None)
    return future


@pytest.fixture
def in_process(monkeypatch):
    """Let the launcher call a function of each job in this process, and write no report."""

    def use(run):
        submit = "minigpt.sweeps.launcher._Worker.submit"
        monkeypatch.setattr(submit, lambda worker, job: run(job) or done())

    monkeypatch.setattr("minigpt.sweeps.report.report", read_table)
    return use


def test_jobs_print_in_utf_8_whatever_the_encoding_of_the_terminal_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    command = [sys.executable, "-c", r"print('\u20bd \udcff', end='')"]
    printed = []

    class Printing(TwoJobs):
        def submit(self, job):
            printed.append(subprocess.check_output(command))
            return done()

    launcher = Printing([], 0)
    launcher.points = [Point(tmp_path / "job", {})]
    launcher.launch([[]], 0)
    assert printed == ["₽ \\udcff".encode()]
    assert os.environ["PYTHONIOENCODING"] == "cp1252"


def test_a_job_leaves_a_run_alone_that_another_command_has_completed_or_trains(
    trained, small, tmp_path
):
    folder = tmp_path / "sweep/seed=1337"
    shutil.copytree(trained(), folder)
    config = composed(*small, f"hydra.run.dir='{folder}'", return_hydra_config=True)
    job = RequeuedJob(Point(folder, {}, settings={"trainer.devices": 1}), config)
    before = (folder / "summary.json").read_bytes()
    job.checkpoint().function()  # resumed: it has nothing to do
    with pytest.raises(RunError, match="already holds a run"):
        job()
    assert (folder / "summary.json").read_bytes() == before
    write_summary(folder, {"status": "interrupted"})
    with FileLock(folder / ".lock"), pytest.raises(RunError, match="another run uses"):
        job()
    assert read_summary(folder) == {"status": "interrupted"}


OWN_FILES = {
    "mine/model/nano.yaml": "defaults: [gpt2, _self_]\n",
    "mine/experiment/fast_cpu.yaml": """# @package _global_
defaults: [override /schedule: constant]
optimizer: {lr: "${oc.decode:${oc.env:RATE}}"}
schedule: {warmup_steps: 0}
hydra:
  job: {env_set: {RATE: "0.25"}}
  launcher: {n_jobs: 1}
""",
    "mine/mytrain.yaml": "defaults: [train, _self_]\nseed: 77\nhydra:\n  searchpath: [more]\n",
    "more/optimizer/adamw.yaml": """_target_: minigpt.training.optim.adamw
lr: 0.1
weight_decay: 0
betas: [0.5, 0.75]
""",
}
OWN_LINE = [
    "-cd",
    "mine",
    "--config-name",
    "mytrain",
    "experiment=fast_cpu",
    "ema_decay=0.5,0.25",
    "-m",
]
OWN_LINE += ["max_steps=2", "eval_every=2", "log_every=1", "hydra.sweep.dir=sweep"]


@pytest.fixture
def own_files(tmp_path):
    for name, content in OWN_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")


def check_jobs_of_own_files(sweep):
    """Each job of `OWN_LINE` was composed of the user's files that its point was checked with."""
    points = read_plan(sweep)[1]
    assert [point.status for point in map(refresh, points)] == [COMPLETED] * 2
    for point, ema_decay in zip(points, (0.5, 0.25), strict=True):
        config = OmegaConf.load(point.folder / ".hydra/config.yaml")
        found = (config.seed, config.optimizer.betas, config.ema_decay)
        assert found == (77, [0.5, 0.75], ema_decay)
        # Without the rate, which the environment of a job has
        composed = {k: repr(v) for k, v in relevant_settings(config).items() if "${" not in str(v)}
        recorded = {key: repr(value) for key, value in point.settings.items()}
        assert recorded.items() >= composed.items()
        rates = {row["learning_rate"] for row in table(point.folder / "metrics.csv")}
        assert rates - {""} == {"0.25"}
        overrides = (point.folder / ".hydra/overrides.yaml").read_text(encoding="utf-8")
        assert f"ema_decay={ema_decay}" in overrides


@pytest.mark.usefixtures("own_files")
def test_a_job_is_composed_of_what_its_point_was_checked_with(
    call, tmp_path, monkeypatch, in_process
):
    # Files of the user change when the first job has started; jobs have an environment
    file = tmp_path / "mine/experiment/fast_cpu.yaml"
    changed = file.read_text(encoding="utf-8").replace("0.25", "0.125")
    jobs = []

    def run(job):
        file.write_text(f"{changed}seed: 5\n", encoding="utf-8")
        jobs.append(pickle.loads(pickle.dumps(job)))
        jobs[-1]()
        assert "RATE" not in os.environ

    monkeypatch.delenv("RATE", raising=False)
    in_process(run)
    swept = call("train.py", *OWN_LINE)
    assert swept.returncode == 0, swept.stderr
    assert "\n1 at a time with" in swept.stderr  # of hydra.launcher in the experiment
    check_jobs_of_own_files(tmp_path / "sweep")
    requeued = RequeuedJob(jobs[0].point, jobs[0].cfg).checkpoint().function  # by submitit
    assert (requeued.cfg.resume, requeued.cfg.seed) == ("auto", 77)
    requeued()
    check_jobs_of_own_files(tmp_path / "sweep")


def test_a_job_knows_the_choices_of_its_point(call, in_process):
    # As `logger.wandb.name=${hydra:runtime.choices.schedule}` reads them
    jobs = []
    in_process(lambda job: jobs.append(job.cfg.hydra))
    call("train.py", "hydra.mode=MULTIRUN", "schedule=cosine,linear")
    chosen = [hydra.runtime.choices.schedule for hydra in jobs]
    assert sorted(chosen) == ["cosine", "linear"]
    for hydra, schedule in zip(jobs, chosen, strict=True):
        assert f"schedule={schedule}" in hydra.overrides.task
        assert f"schedule={schedule}" in hydra.job.override_dirname.split(",")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "basic"])
@pytest.mark.usefixtures("own_files")
def test_every_launcher_composes_a_job_of_the_files_of_the_user(launch, tmp_path, launcher):
    if launcher == "basic":  # which has no n_jobs
        file = tmp_path / "mine/experiment/fast_cpu.yaml"
        content = file.read_text(encoding="utf-8").replace("  launcher: {n_jobs: 1}\n", "")
        file.write_text(content, encoding="utf-8")
    swept = launch("train.py", *OWN_LINE, f"hydra/launcher={launcher}", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    check_jobs_of_own_files(tmp_path / "sweep")


@pytest.mark.usefixtures("own_files")
def test_what_an_experiment_sets_of_hydra_is_refused_where_it_would_act_at_some_points_alone(
    call, tmp_path
):
    (tmp_path / "mine/experiment/other.yaml").write_text("# @package _global_\nmax_steps: 2\n")
    swept = call(
        "train.py", "--config-dir=mine", "experiment=fast_cpu,other", "model.n_head=3", "-m"
    )
    assert (
        "hydra.launcher.n_jobs must be the same at all points of a sweep; set it on the comman"
        in one_line(swept)
    )


@pytest.mark.slow
def test_runs_on_one_and_two_devices_in_one_worker_have_a_port_each(launch, tmp_path):
    swept = [
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=1,2",
        "hydra.launcher.n_jobs=1",
    ]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        env = {"MASTER_PORT": str(taken.getsockname()[1])}
        result = launch(
            "train.py", *swept, "max_steps=4", "hydra.mode=MULTIRUN", cwd=tmp_path, env=env
        )
    assert result.returncode == 0, result.stderr
    runs = read_sweep((tmp_path / "runs" / "sweeps" / "latest").resolve())
    assert [read_summary(run.folder)["world_size"] for run in runs] == [1, 2]
    # Variables of the first run
    assert "ignored" not in (runs[1].folder / "log.txt").read_text(encoding="utf-8")
    assert runs[0].loss(NATS) == pytest.approx(runs[1].loss(NATS))


def test_the_basic_launcher_refuses_several_devices(call):
    swept = [
        "hydra/launcher=basic",
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "seed=1,2",
    ]
    result = call("train.py", *swept, "hydra.mode=MULTIRUN")
    assert "failed: trainer.devices must be 1 with hydra/launcher=basic, got 2; " in result.stdout
    assert result.returncode == 1


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.usefixtures("own_files")
def test_a_job_on_two_processes_runs_once_in_its_own_folder_and_of_what_its_point_was_checked_with(
    launch, text, tmp_path
):
    shutil.copy(text, tmp_path / "été.txt")
    devices = [
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "max_steps=4",
        "eval_every=2",
    ]
    devices += ["--config-dir=mine", "-cn", "mytrain", "experiment=fast_cpu"]
    devices += ["log_every=1", "model.n_head=2,3", "hydra.mode=MULTIRUN", "data.path=été.txt"]
    swept = launch("train.py", *devices, cwd=tmp_path, env={"PYTHONIOENCODING": "cp1252"})
    assert swept.returncode == 0, swept.stderr
    assert "\n1 at a time with " in swept.stderr
    sweep = (tmp_path / "runs" / "sweeps" / "latest").resolve()
    ran, skipped = read_sweep(sweep)
    assert (ran.status, skipped.status) == (COMPLETED, SKIPPED)
    printed = (ran.folder / "log.txt").read_text(encoding="utf-8")
    assert (printed.count("step 4/4"), printed.count("rerun"), printed.count("été.txt")) == (
        1,
        0,
        1,
    )
    config = OmegaConf.load(ran.folder / ".hydra/config.yaml")
    assert (config.seed, config.optimizer.betas) == (77, [0.5, 0.75])
    assert {row["learning_rate"] for row in table(ran.folder / "metrics.csv")} - {""} == {"0.25"}
    assert [path.name for path in sweep.iterdir() if path.is_dir()] == [ran.folder.name]
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name != "sweeps"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_search_runs_through_submitit_and_reports_a_failed_job(launch, tmp_path):
    search = """
        hydra.mode=MULTIRUN hydra/sweeper=optuna hydra.sweeper.n_trials=2 optimizer.lr=1e-3,1e30
        hydra/launcher=submitit_local max_steps=10 schedule=short --config-dir=mine
    """
    (tmp_path / "mine/schedule").mkdir(parents=True)
    (tmp_path / "mine/schedule/short.yaml").write_text("defaults: [cosine]\nwarmup_steps: 1\n")
    swept = launch("train.py", *search.split(), cwd=tmp_path)
    assert swept.returncode == 1, swept.stderr
    lines = swept.stderr.splitlines()
    assert lines[0] == "2 of 2 to run"
    assert lines[-1] == "error: 1 of 2 runs failed; the table has the reasons"
    read = read_sweep((tmp_path / "runs/sweeps/latest").resolve())
    points = {point.overrides["optimizer.lr"]: point for point in read}
    assert (points["0.001"].status, points["1e+30"].status) == (COMPLETED, "failed")
    assert "the loss is nan at step" in swept.stdout
    assert "step 10/10" in (points["0.001"].folder / "log.txt").read_text(encoding="utf-8")


def test_the_sweep_file_of_weights_and_biases_has_valid_settings_and_the_metric_of_a_run(finished):
    file = yaml.safe_load((ROOT / "configs" / "sweep" / "wandb.yaml").read_text(encoding="utf-8"))
    *start, arguments = file["command"]
    assert (start[:5], arguments) == (
        ["${env}", "${interpreter}", "-m", "minigpt", "train"],
        "${args_no_hyphens}",
    )
    values = {
        name: of["values"][0] if "values" in of else of["max"]
        for name, of in file["parameters"].items()
    }
    check_run(composed(*start[5:], *(f"{name}={value}" for name, value in values.items())))
    assert file["metric"]["name"] in finished.summary


@pytest.fixture
def start(text, tmp_path):
    """Start a sweep in `sweep`: `start("seed=1,2", held="seed=1")`; `hold.Hold` holds the run."""
    sweeps = []

    def run(*arguments, held=""):
        (tmp_path / "held").unlink(missing_ok=True)
        (tmp_path / "hold").write_text(held, encoding="utf-8")
        env = {
            "WANDB_MODE": "offline",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        line = [
            *small_run(text, tmp_path / "data", *arguments),
            "+callbacks.hold._target_=hold.Hold",
        ]
        line += ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"]
        sweeps.append(Script("train.py", *line, output=tmp_path / "out", cwd=tmp_path, env=env))
        if held:
            assert sweeps[-1].wait_for((tmp_path / "held").exists), sweeps[-1].stderr
        return sweeps[-1]

    yield run
    for sweep in sweeps:
        sweep.kill()


def ended(sweep):
    code = sweep.wait()
    wait_until(lambda: not live_processes(sweep.pid))
    return code


@pytest.mark.slow
def test_a_sweep_reports_every_point_when_runs_fail_and_a_worker_is_killed(start, tmp_path, train):
    folder = tmp_path / "sweep"
    good = [f"n_embd=32,lr=0.001,seed={seed}" for seed in (1, 2)]
    bad = [f"n_embd=32,lr=1e+30,seed={seed}" for seed in (1, 2)]
    line = ["model.n_embd=31,32", "optimizer.lr=1e-3,1e30", "seed=1,2", "hydra.launcher.n_jobs=2"]
    sweep = start(*line, held=good[0])
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGKILL)
    assert ended(sweep) == 1, sweep.stderr
    killed = "its process was killed (SIGKILL), possibly out of memory"
    files = {f"sweep.{ending}" for ending in ("csv", "json", "md", "png")} | {"runs.csv", ".lock"}
    assert {path.name for path in folder.iterdir()} == {*good, *bad, *files}
    assert read_summary(folder / good[0]) == {"status": "failed", "reason": killed}
    points = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["points"]
    assert [point["status"] for point in points] == ["skipped"] * 4 + [
        "failed",
        "completed",
        "failed",
        "failed",
    ]

    # stderr has skipped points, the number of runs, one line per run, the failure, and no output of
    # jobs.
    lines = sweep.stderr.splitlines()
    assert lines[4:6] == ["4 of 8 to run", "2 at a time with OMP_NUM_THREADS=1"]
    results = dict(re.fullmatch(r"\d/4 (\S+) (.*)", line).groups() for line in lines[6:10])
    assert re.fullmatch(
        rf"failed, val loss \d\.\d{{4}} after \d+ s of training: {re.escape(killed)}",
        results[good[0]],
    )
    assert re.fullmatch(r"completed, val loss \d\.\d{4} after \d+ s of training", results[good[1]])
    assert all(results[name].startswith("failed: the loss is nan at step") for name in bad)
    assert lines[10:] == ["error: 3 of 8 runs failed; the table has the reasons"]

    # The output of a job is in its log, and a run of a sweep equals the same run outside of it.
    assert (folder / good[1] / "log.txt").read_text(encoding="utf-8").count("step 20/20") == 1
    assert rows(folder / good[1]) == rows(train("optimizer.lr=1e-3", "seed=2").folder)


@pytest.mark.slow
def test_a_second_sweep_is_refused_and_a_run_that_is_trained_by_hand_meanwhile_is_kept(
    start, launch, tmp_path, train
):
    folder = tmp_path / "sweep"
    line = ["seed=1,2,3", "hydra.launcher.n_jobs=1"]
    sweep = start(*line, held="seed=1")
    # A second sweep in the same folder, and a report of what it holds
    of_folder = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"]
    refused = "error: another sweep uses sweep; wait for it, or choose another folder"
    for more in ([], ["resume=auto"]):
        second = launch("train.py", *line, *more, *of_folder, cwd=tmp_path)
        assert one_line(second).startswith(refused)
    reported = launch("sweep_report.py", "sweep", cwd=tmp_path)
    assert (reported.returncode, reported.stderr) == (0, "")
    # A run by hand before the sweep comes to it
    by_hand = train("seed=2", folder=folder / "seed=2").summary
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGTERM)
    assert ended(sweep) == 1, sweep.stderr
    expected = ["interrupted", COMPLETED, COMPLETED]
    assert [point.status for point in read_sweep(folder)] == expected
    assert read_summary(folder / "seed=2").items() <= by_hand.items()
    assert [row["status"] for row in table(folder / "runs.csv")] == expected


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_and_an_interrupted_sweep_resume_and_complete(start, tmp_path, train):
    folder = tmp_path / "sweep"
    line = ["hydra.launcher.n_jobs=1", "resume=auto"]
    killed = start("seed=1,2", *line, held="seed=2")
    killed.signal(signal.SIGKILL)  # as when out of memory; workers save and exit
    assert ended(killed) == 128 + signal.SIGKILL
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted"]
    files = {
        path: path.stat().st_mtime_ns for path in (folder / "seed=1").rglob("*") if path.is_file()
    }

    interrupted = start("seed=range(1,4)", *line, held="seed=2")
    os.killpg(interrupted.pid, signal.SIGINT)  # Ctrl-C in a terminal
    assert ended(interrupted) == 128 + signal.SIGINT
    resume = "to resume, run the same command with hydra.sweep.dir=sweep resume=auto"
    assert interrupted.stderr.splitlines()[-2:] == [resume, "interrupted by SIGINT"]
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted", "waiting"]
    assert "interrupted" in interrupted.stdout  # the table is shown all the same

    sweep = start("seed=range(1,4)", *line)
    assert ended(sweep) == 0, sweep.stderr
    assert {
        path: path.stat().st_mtime_ns for path in files
    } == files  # completed runs are not touched
    assert [(row["seeds"], row["status"]) for row in table(folder / "sweep.csv")] == [
        ("3", COMPLETED)
    ]
    # A resumed run equals an uninterrupted one
    assert rows(folder / "seed=2") == rows(train("seed=2").folder)
    assert (folder / "seed=2" / "log.txt").read_text(encoding="utf-8").count(
        "step 10/20"
    ) == 1  # and did not begin anew
