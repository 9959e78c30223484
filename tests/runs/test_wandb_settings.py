"""Options of the command line, variables and files of Weights & Biases: which of them act."""

import os
import re
import socket

import pytest
from hydra.errors import InstantiationException
from small_runs import composed, wandb_records
from test_wandb import contents

from minigpt.runs.run_dir import PLAN
from minigpt.runs.trainer import instantiate_group
from minigpt.runs.wandb_logger import wandb_logger

pytestmark = pytest.mark.usefixtures("logged_out")
# Options of Lightning's logger, and of wandb.init, that the run sets
UNKNOWN = ("save_dir", "dir", "settings")


def logger_of(folder, *options):
    """Return the logger of a run with these options."""
    given = (option.replace("wandb.", "logger.wandb.", 1) for option in options)
    (logger,) = instantiate_group(
        "logger", composed("logger=wandb", f"logger.wandb.folder={folder}", *given).logger
    )
    return logger


def start_and_finish(folder, *options):
    """Return W&B's settings of a run with these options, which has ended."""
    logger = logger_of(folder, *options)
    logger.finish({})
    return logger.experiment.settings


def test_options_of_the_command_line_are_honored(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")  # which the command line overrides
    more = [
        "wandb.project=p",
        "wandb.entity=e",
        "wandb.group=g",
        "wandb.tags=[t]",
        "wandb.name=n",
        "wandb.timeout=20",
    ]
    for given in (
        [*more, "+wandb.id=fox-run-1", "+wandb.resume=must"],
        [],
    ):  # the id is that of the folder
        logger = logger_of(os.path.relpath(tmp_path), "+wandb.mode=offline", *given)
        found = logger.experiment.settings
        assert (found.run_id, found.resume, found.mode) == (
            "fox-run-1",
            "must" if given else "allow",
            "offline",
        )
        names = found.project, found.entity, found.run_group, found.run_tags, found.run_name
        assert names == (
            ("p", "e", "g", ("t",), "n") if given else ("minigpt", None, None, None, tmp_path.name)
        )
        waits = found.init_timeout, found.login_timeout, found.finish_timeout
        assert waits == pytest.approx((6, 6, 20) if given else (3, 3, 10))
        logger.finish({})
        monkeypatch.chdir(tmp_path.parent)  # wandb's own process stays where it was
    assert contents(wandb_records(tmp_path, -1), "exit")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            (f"+wandb.{name}=x", rf"logger\.wandb\.{name} is not an option; it takes .*, tags.*")
            for name in UNKNOWN
        ),
        (
            "+wandb.mode=off",
            r"logger\.wandb\.mode or WANDB_MODE must be one of online, offline, .*, got off",
        ),
        ("+wandb.mode=offline +wandb.resume=x", "Weights & Biases cannot start: [^\n]*$"),
    ],
)
def test_an_option_that_cannot_be_honored_is_refused_in_one_line(tmp_path, wrong, message):
    with pytest.raises(InstantiationException) as refused:
        logger_of(tmp_path, *wrong.split())
    assert re.match(message, str(refused.value.__cause__))


def test_variables_of_wandb_act_unless_the_command_line_says_otherwise(tmp_path, monkeypatch):
    def names(folder, *options):
        found = start_and_finish(tmp_path / folder, *options)
        fields = "run_name project entity run_group run_job_type run_notes run_tags run_id"
        return tuple(getattr(found, field) for field in fields.split())

    # These count as not set
    for name in ["MODE", "PROJECT", "NAME", "TAGS", "RUN_ID", "BASE_URL", "SILENT", "RUN_GROUP"]:
        monkeypatch.setenv(f"WANDB_{name}", "")
    (tmp_path / "wandb").mkdir()
    # Of `wandb init`
    (tmp_path / "wandb/settings").write_text("[default]\nproject = of-file\nentity = of-file\n")
    assert names("file")[:-1] == ("file", "of-file", "of-file", None, None, None, None)
    variables = {
        "NAME": "n",
        "PROJECT": "p",
        "ENTITY": "e",
        "RUN_GROUP": "g",
        "JOB_TYPE": "j",
        "NOTES": "o",
    }
    variables |= {"TAGS": "a,b", "RUN_ID": "fox"}
    for name, value in variables.items():  # though the client runs
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert names("variables") == ("n", "p", "e", "g", "j", "o", ("a", "b"), "fox")
    (record,) = contents(wandb_records(tmp_path / "variables"), "run")
    written = {
        "display_name": "n",
        "project": "p",
        "entity": "e",
        "run_group": "g",
        "job_type": "j",
        "notes": "o",
    }
    written |= {"tags": ["a", "b"], "run_id": "fox"}
    assert written == {name: record[name] for name in written}
    given = """
        wandb.name=N wandb.project=P wandb.entity=E wandb.group=G
        +wandb.job_type=J +wandb.notes=O wandb.tags=[c] +wandb.id=3
    """
    assert names("line", *given.split()) == ("N", "P", "E", "G", "J", "O", ("c",), "3")
    # The id of the variable, not that of the folder
    assert names("line", "wandb.tags=[]")[6:] == ((), "fox")

    other = {"RESUME": "must", "CONSOLE": "wrap", "SILENT": "false", "HOST": "h"}
    ignored = {"DIR": str(tmp_path / "elsewhere"), "USE_DOT_WANDB": "true", "INIT_TIMEOUT": "99"}
    for name, value in (other | ignored).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    found = start_and_finish(tmp_path / "other")
    assert (found.resume, found.console, found.silent, found.host) == ("must", "wrap", False, "h")
    assert (found.wandb_dir, found.init_timeout) == (str(tmp_path / "other/wandb"), 3)
    assert start_and_finish(tmp_path / "other", "+wandb.resume=never").resume == "never"


@pytest.mark.parametrize("mode", ["offline", "disabled"])
@pytest.mark.parametrize("source", ["file", "variable"])
def test_wandb_offline_and_disabled_overrule_a_key_and_contact_no_server(
    tmp_path, monkeypatch, mode, source
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        (tmp_path / "wandb").mkdir()
        if source == "file":  # as `wandb offline` and `wandb disabled` write it
            (tmp_path / "wandb/settings").write_text(
                f"[default]\nmode = {mode}\n", encoding="utf-8"
            )
        else:
            monkeypatch.setenv("WANDB_MODE", mode)
        logger = wandb_logger(tmp_path / "run", timeout=10)
        assert (tmp_path / "run/wandb").exists() == (mode == "offline")
        assert (logger is not None) == (mode == "offline")
        if logger:
            assert logger.experiment.offline
            logger.finish({})
        with pytest.raises(BlockingIOError):  # nobody waits
            server.accept()


def test_runs_of_a_sweep_have_its_group_and_tag_whatever_its_name(tmp_path, monkeypatch):
    name = "it's a b, c=[$HOME] é"
    for folder in (sweep := tmp_path / name, job := sweep / "seed=1"):
        folder.mkdir()
    (sweep / PLAN).touch()

    def names(folder, **options):
        logger = wandb_logger(folder, timeout=10, **options)
        logger.finish({})
        found = logger.experiment.settings
        return found.run_name, found.run_group, found.run_tags

    assert names(job, tags=[name]) == ("seed=1", name, (name, "sweep"))
    assert names(sweep, tags=[name])[1:] == (name, (name, "sweep", "summary"))
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_TAGS", "fox")
    assert names(job) == ("seed=1", "mine", ("fox", "sweep"))
    assert names(job, tags=[], group="yours", name="same") == ("same", "yours", ("sweep",))
