"""Settings and the command line: values are checked, paths and texts are taken literally."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from refusals import refused
from small_runs import CONFIGS, composed, one_line, rows, table

from minigpt import train
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.extras.playground.history import read_samples
from minigpt.model.config import GPTConfig
from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run_config import LITERAL_TEXTS, RunConfig, check_run, normalize
from minigpt.runs.trainer import instantiate_group
from minigpt.utils.errors import UserError

ODD = [
    "café.txt",
    "红楼梦.txt",
    "my text (1).txt",
    "a, b & #1; !='x'.txt",
    "'tis.txt",
    "[1].txt",
    "2024",
    "1e5",
    "true",
]
TEXTS = [
    "To be, or [not] to {be}?",
    '"Hello," she said',
    "[Enter ROMEO]",
    "it's\\",
    "'a'",
    "3",
    "café: 1=2",
]


def parsed(*overrides):
    """Return the value that Hydra has of the last override; of a sweep, a list of values."""
    parser = OverridesParser.create()
    override = parser.parse_override(complete_overrides(overrides)[len(overrides) - 1])
    if not override.is_sweep_override():
        return override.value()
    return [
        parser.parse_override(f"x={value}").value() for value in override.sweep_string_iterator()
    ]


@pytest.mark.parametrize(
    "key", ["data.path", "data.val_path", "init_from", "hydra.run.dir", "hydra.sweep.dir"]
)
def test_a_path_is_taken_literally_in_runs_and_sweeps(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ODD:
        assert parsed(f"{key}={name}") == parsed(f"++{key}={name}") == name
        (tmp_path / name).touch()  # a name with a comma is not a list if there is such a file
        assert parsed("-m", f"{key}={name}") == name


def test_a_home_folder_is_expanded_and_null_and_what_is_quoted_keep_their_meaning(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("data.path", "init_from", "resume", "hydra.run.dir", "data.folder"):
        assert parsed(f"{key}=~/a b.txt") == parsed(f"{key}='~/a b.txt'") == f"{tmp_path}/a b.txt"
        assert parsed(f"{key}=null") is None
    assert parsed("data.train_bin=[~/a.bin, b c.bin,'d.bin']") == [
        f"{tmp_path}/a.bin",
        "b c.bin",
        "d.bin",
    ]
    assert parsed("hydra.run.dir=my runs/${now:%Y}") == "my runs/${now:%Y}"
    assert parsed(r"data.separator=\n\n") == r"\n\n"
    assert parsed("data.separator=<|endoftext|>") == "<|endoftext|>"


def test_a_list_of_paths_is_swept_and_a_text_with_commas_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parsed("-m", "data.path=~/a.txt,my b.txt, 2024") == [
        f"{tmp_path}/a.txt",
        "my b.txt",
        "2024",
    ]
    assert parsed("-m", "data.path='a, b.txt','c.txt'") == ["a, b.txt", "c.txt"]
    assert parsed("-m", "resume=null,my run") == [None, "my run"]
    # Together longer than the name of a file may be
    many = [f"{'long ' * 20}{i}.txt" for i in range(50)]
    assert parsed("-m", f"data.path={','.join(many)}") == many
    for prompt in TEXTS[:4]:
        assert parsed("-m", f"callbacks.samples.prompt={prompt}") == prompt
    assert parsed("-m", "callbacks.samples.prompt='a, b','c'") == ["a, b", "c"]


def test_a_text_is_taken_literally():
    for key in (
        "callbacks.samples.prompt",
        "callbacks.attention.text",
        "logger.wandb.name",
        "+logger.wandb.notes",
    ):
        for text in TEXTS[:4] + TEXTS[5:]:
            assert parsed(f"{key}={text}") == text


REFERENCES = ["cost: ${seed}", "${oc.env:NOT_SET}", "a ${ b", "it's ${a b}} ${seed"]


def test_a_reference_in_a_text_is_text():
    # And an escaped one is the same, in YAML too; an override is recorded as it is composed
    for text in REFERENCES:
        keys = [key if "attention" not in key else f"+{key}" for key in LITERAL_TEXTS]
        for given in (text, text.replace("${", r"\${")):
            line = complete_overrides([f"{key}={given}" for key in keys])
            assert complete_overrides(line) == line
            parsed = OverridesParser.create().parse_overrides(line)
            values = {override.key_or_group: override.value() for override in parsed}
            if text == REFERENCES[0] and given == text:  # as a file of the user has them
                values = dict.fromkeys(values, text)
            cfg = OmegaConf.create({})
            for key, value in values.items():
                OmegaConf.update(cfg, key, value)
            normalize(cfg)
            for found in (cfg, OmegaConf.create(OmegaConf.to_yaml(cfg))):
                assert [OmegaConf.select(found, key) for key in LITERAL_TEXTS] == [text] * 3
        # Of a run are resolved already
        settings = {"one": {"_target_": "builtins.dict", "text": [text, rf"\{text}"]}}
        assert instantiate_group("callbacks", settings) == [{"text": [text, rf"\{text}"]}]


ASKING = "defaults: [default, _self_]\nsamples: {prompt: 'cost: ${seed}', max_new_tokens: 1}\n"


@pytest.mark.slow
def test_runs_and_sweeps_take_a_reference_in_a_prompt_and_a_separator_literally(
    call, text, tmp_path
):
    content = text.read_text(encoding="utf-8").replace("\n", "${seed}")
    (tmp_path / "texts.txt").write_text(content, encoding="utf-8")
    (tmp_path / "mine/callbacks").mkdir(parents=True)
    (tmp_path / "mine/callbacks/asking.yaml").write_text(ASKING, encoding="utf-8")
    # Command lines: a run in two jobs, one with a file of the user, and a sweep
    same = ["max_steps=2", "eval_every=1", "tokenizer=byte"]
    same += ["data.path=texts.txt", "data.separator=${seed}"]
    asked = [*same, "callbacks.samples.max_new_tokens=1", "callbacks.samples.prompt=cost: ${seed}"]
    of_file = ["--config-dir", "mine", "callbacks=asking", "callbacks.samples.top_k=3"]
    of_sweep = ["-m", "model.n_head=1,2", "hydra.sweep.dir=sweep", "hydra/launcher=basic"]
    lines = {
        "": [*asked, "pause_at=1", "hydra.run.dir=run"],
        "run": [*asked, "resume=auto", "hydra.run.dir=run"],
        "file": [*same, *of_file, "hydra.run.dir=file"],
        "sweep/n_head=2": [*asked, *of_sweep],
    }
    for name, line in lines.items():
        ended = call("train.py", *line)
        assert ended.returncode == 0, ended.stderr
        if not name:  # it paused
            continue
        # The samples and the checkpoint of the run
        folder = tmp_path / name
        samples = (folder / "samples.txt").read_text(encoding="utf-8")
        assert samples.count("\ncost: ${seed}") == 2
        config = read(folder / LAST)["minigpt"]["config"]
        assert config["data"]["separator"] == "${seed}"
        assert config["callbacks"]["samples"]["prompt"] == "cost: ${seed}"
    # The plan of the sweep, and the documents
    recorded = json.loads((tmp_path / "sweep/sweep.json").read_text(encoding="utf-8"))
    assert recorded["settings"]["data.separator"] == r"\${seed}"  # as OmegaConf reads it
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    assert json.loads(meta.read_text(encoding="utf-8"))["train"]["documents"] > 300


@pytest.mark.slow
def test_runs_of_texts_with_odd_names_train_resume_and_sweep(call, text, tmp_path, monkeypatch):
    # On the command line and in Python; what is printed can be pasted
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "a, b & #1; !='x'.txt"
    short = ["max_steps=2", "eval_every=2", "callbacks.samples=null", "callbacks.originality=null"]
    short += ["trainer=cpu", "model.n_layer=1", "model.n_embd=32", "model.block_size=16"]
    (tmp_path / "2024").mkdir()
    for copy in (name, "2024/a.txt", "my text (1).txt"):
        shutil.copy(text, tmp_path / copy)
    # A run, and samples with the command that it prints
    line = [*short, f"data.path=~/{name}"]
    done = call("train.py", *line, f"hydra.run.dir=~/runs of {name}", small=False)
    folder = tmp_path / f"runs of {name}"
    assert OmegaConf.load(folder / ".hydra/config.yaml").data.path == f"{tmp_path}/{name}"
    again = shlex.split(re.search("sample again(.*)", done.stdout)[1])
    assert call("sample.py", *again[2:], "--max-new-tokens", "2").returncode == 0
    # It resumes
    longer = [*line, f"hydra.run.dir={folder}", "max_steps=4", "resume=auto"]
    assert call("train.py", *longer, small=False).returncode == 0
    assert [row["step"] for row in table(folder / "metrics.csv") if row["val_loss"]] == ["2", "4"]
    # In Python
    odd = ["data.path=2024", "data.folder=it's", f"resume={folder}", "hydra.run.dir=1e5"]
    summary = train([*short, *odd, "max_steps=6"])
    assert (summary["corpus"], summary["steps"]) == ("2024", 6)
    # A sweep
    swept = [*short, "data.path=2024,my text (1).txt", "hydra.sweep.dir=~/x (1)"]
    assert call("train.py", "-m", *swept, small=False).returncode == 0
    paths = {row["data.path"] for row in table(tmp_path / "x (1)/runs.csv")}
    assert paths == {"'2024'", "'my text (1).txt'"}


def test_none_of_python_is_null_but_in_a_prompt():
    for key in (
        "eval_batches",
        "model.n_kv_head",
        "data.path",
        "init_from",
        "resume",
        "+logger.wandb.name",
    ):
        assert parsed(f"{key}=None") is None
        assert parsed(f"{key}='None'") == "None"
    assert parsed("callbacks.samples.prompt=None") == "None"


def test_what_the_agent_of_wandb_writes_is_taken(train, trained):
    nulls = [
        f"{key}=None"
        for key in ("eval_batches", "ema_decay", "model.n_kv_head", "trainer.gradient_clip_val")
    ]
    integers = [
        "data.eval_batch_size=2.0",
        "max_steps=20.0",
        "model.n_head=2.0",
        "seed=3.0",
        "trainer.devices=1.0",
    ]
    run = train(
        *nulls,
        *integers,
        "compile=False",
        "model.bias=True",
        "logger=None",
        "experiment=None",
        "resume=None",
    )
    typed = [
        "data.eval_batch_size=2",
        "seed=3",
        "model.bias=true",
        "trainer.gradient_clip_val=null",
    ]
    assert rows(run.folder) == rows(trained(*typed))
    config = OmegaConf.load(run.folder / ".hydra/config.yaml")
    assert repr([config.max_steps, config.model.n_head, config.eval_batches]) == "[20, 2, None]"


@pytest.mark.parametrize("group", ["callbacks", "logger", "experiment", "debug"])
def test_a_group_without_a_choice_is_none(group):
    for override in (f"~{group}", f"{group}=null", f"{group}=None", f"{group}=[]", f"{group}={{}}"):
        none = f"~{group}" if group in ("experiment", "debug") else f"{group}=none"
        assert complete_overrides([override, "seed=1"]) == [none, "seed=1"]
    config = composed(none)
    assert (
        [*config.callbacks.values()] == [None] * 4 if group == "callbacks" else config == composed()
    )


def test_a_run_without_callbacks_ends_and_a_resume_says_that_its_checkpoint_is_missing(
    train, trained, capsys
):
    run = train("~callbacks", "log_every=1")
    assert {path.name for path in run.folder.iterdir()} <= {
        ".hydra",
        ".lock",
        "metrics.csv",
        "log.txt",
        "summary.json",
        "code.diff",  # of a working tree with changes
    }
    assert (run.summary["status"], run.summary["checkpoint"]) == ("completed", None)
    assert rows(run.folder) == rows(trained("log_every=1"))
    assert f"validation loss  {run.loss:.4f} at step 20" in capsys.readouterr().out
    train("~callbacks", "log_every=1", "resume=auto", "max_steps=1")
    missing = f"warning: {run.folder} holds no checkpoint to resume from; the run starts at step 0"
    assert missing in capsys.readouterr().err.splitlines()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("given", ["oc.env:RATE", "oc.env:RATE,0.1"])
def test_the_advice_for_a_number_of_the_environment_can_be_pasted(
    given, call, tmp_path, monkeypatch
):
    monkeypatch.setenv("RATE", "0.25")
    line = one_line(call("train.py", f"optimizer.lr=${{{given}}}"))
    in_shell, in_file = re.search(
        "it is a text; write (.+) in a shell, or lr: (.+) in a file", line
    ).groups()
    words = subprocess.run(
        ["bash", "-c", f"printf '%s' {in_shell}"], capture_output=True, encoding="utf-8", check=True
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        f"# @package _global_\noptimizer:\n  lr: {in_file}\n", encoding="utf-8"
    )
    for overrides in ([words.stdout], [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]):
        assert composed(*complete_overrides(overrides)).optimizer.lr == 0.25


def test_a_finetuning_that_resumes_keeps_the_rates_that_it_began_with(tmp_path):
    line = ["init_from=openai-community/gpt2"]
    added = ["optimizer=adamw_finetune", "schedule.warmup_steps=0"]
    groups = ["model=pretrained", "tokenizer=pretrained"]
    assert complete_overrides(line) == [*line, *groups, *added]
    (tmp_path / ".hydra").mkdir()
    for began_with in ([], added[1:], added):
        (tmp_path / ".hydra/overrides.yaml").write_text(
            "".join(f"- {text}\n" for text in ["seed=1", *began_with]), encoding="utf-8"
        )
        given = [*line, f"hydra.run.dir={tmp_path}", "resume=auto"]
        assert complete_overrides(given)[3:] == groups + began_with


def test_flags_may_stand_between_settings():
    given = ["seed=1,2", "-m", "max_steps=3", "--config-dir", "mine", "~callbacks.samples"]
    assert complete_overrides(given) == [
        "-m",
        "--config-dir",
        "mine",
        "seed=1,2",
        "max_steps=3",
        "~callbacks.samples",
    ]


OWN_FILES = {
    "mine/model/nano.yaml": "defaults: [gpt2, _self_]\nn_head: 6\nn_embd: 30\n",
    "mine/experiment/fast_cpu.yaml": """# @package _global_
defaults: [override /model: nano, override /hydra/launcher: basic, override /hydra/sweeper: optuna]
hydra:
  sweeper: {n_trials: 7}
seed: 7
""",
    "mine/data/shakespeare_char.yaml": "defaults: [text, _self_]\nname: mine\n",
    "mine/searching.yaml": "defaults: [train, _self_]\nhydra:\n  searchpath: [file://more]\n",
    "more/model/nano.yaml": "defaults: [gpt2, _self_]\nn_head: 5\nn_embd: 50\n",
    "whole/train.yaml": "seed: 99\nmodel: {n_head: 2}\n",
}


@pytest.fixture
def own_files(tmp_path):
    for name, content in OWN_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "heads"),
    [
        (["--config-dir", "mine"], 6),
        (["-cd", "mine", "-cn", "train"], 6),
        (["--config-dir=mine", "hydra.searchpath=[file://more]"], 6),  # as Hydra orders them
        (["hydra.searchpath=[file://more]", "--config-name=searching", "--config-dir=mine"], 6),
        (["hydra.searchpath=[more, 'file://mine']", "--config-name=prepare", "+model=nano"], 5),
        (["--config-dir=mine", "--config-name=searching.yaml", "model=nano"], 6),
        (["hydra.searchpath=['file://mine']"], 6),
        (["++hydra.searchpath=[mine]"], 6),
        (["experiment=fast_cpu", "hydra.searchpath=['file://mine']"], 6),
        (["hydra.searchpath=[nowhere]", "model.n_head=1"], 1),
        (["hydra.searchpath=[]"], 4),
    ],
)
@pytest.mark.filterwarnings("ignore:provider=")  # a folder that does not exist
@pytest.mark.usefixtures("own_files")
def test_a_file_of_the_user_is_taken_before_the_built_in_one_of_its_name(call, line, heads):
    shown = call("train.py", *line, "--cfg", "job", "--package", "model", small=False)
    assert (shown.returncode, OmegaConf.create(shown.stdout).n_head) == (0, heads)


@pytest.mark.usefixtures("own_files")
def test_a_primary_file_of_the_user_may_name_more_folders_and_replace_the_built_in_one(call):
    shown = call(
        "train.py", "--config-dir", "mine", "-cn", "searching", "--cfg", "hydra", small=False
    )
    sources = OmegaConf.create(shown.stdout).hydra.runtime.config_sources
    assert [Path(source.path).name for source in sources][1:4] == ["mine", "more", "configs"]
    shown = call(
        "train.py", "hydra.searchpath=[mine]", "--config-dir", "whole", "--cfg", "job", small=False
    )
    assert OmegaConf.create(shown.stdout) == {"seed": 99, "model": {"n_head": 2}}


@pytest.mark.usefixtures("own_files")
def test_a_file_that_extends_itself_is_refused(call, tmp_path):
    (tmp_path / "mine/model/nano.yaml").write_text("defaults: [nano, _self_]\nn_layer: 1\n")
    refused = one_line(call("train.py", "--config-dir", "mine", small=False))
    advice = "give a file that extends a built-in one another name"
    assert refused == f"error: a defaults list names its own file; {advice}"


@pytest.mark.usefixtures("own_files")
def test_train_of_python_and_prepare_take_the_files_of_the_user(train, call, text):
    line = ["--config-dir", "mine", f"data.path={text}", "--cfg", "job", "--package", "data"]
    assert OmegaConf.create(call("prepare.py", *line).stdout).name == "mine"
    run = ["experiment=fast_cpu", "model.n_head=3", "model.n_embd=33", "max_steps=1"]
    assert train("hydra.searchpath=[mine]", *run).summary["seed"] == 7


@pytest.mark.usefixtures("own_files")
def test_an_experiment_may_choose_and_set_what_is_of_hydra(call):
    line = ["--config-dir", "mine", "--cfg", "hydra", "experiment=fast_cpu"]
    hydra = OmegaConf.create(call("train.py", *line, small=False).stdout).hydra
    assert hydra.launcher._target_.endswith("BasicLauncher")
    assert (hydra.sweeper._target_, hydra.sweeper.n_trials) == (
        "hydra_plugins.minigpt_sweeps.Search",
        7,
    )
    hydra = OmegaConf.create(
        call("train.py", *line, "hydra/launcher=joblib", small=False).stdout
    ).hydra
    assert hydra.launcher._target_.endswith("Joblib")  # the command line has the last word


def test_train_of_python_sets_the_environment_of_hydra_for_the_run_alone(train, monkeypatch):
    monkeypatch.setenv("RATE", "0.5")
    rate = "optimizer.lr='${oc.decode:${oc.env:RATE}}'"
    folder = train(
        rate,
        "max_steps=1",
        "log_every=1",
        "schedule=constant",
        "schedule.warmup_steps=0",
        "+hydra.job.env_set.RATE=0.25",
    ).folder
    assert {row["learning_rate"] for row in table(folder / "metrics.csv")} - {""} == {"0.25"}
    assert os.environ["RATE"] == "0.5"


def test_nothing_is_imported_from_the_working_folder_unless_a_target_is_there(call, tmp_path):
    (tmp_path / "datasets.py").write_text("raise SystemExit('code of a folder ran')")
    assert call("train.py", "max_steps=1").returncode == 0
    assert str(tmp_path) not in sys.path


@pytest.mark.slow
@pytest.mark.ci
def test_a_target_in_the_working_folder_is_found_by_runs_and_sweeps(call, tmp_path):
    (tmp_path / "mine/optimizer").mkdir(parents=True)
    (tmp_path / "mine/optimizer/sgd.yaml").write_text("_target_: parts_of_a_test.sgd\nlr: 0.1\n")
    (tmp_path / "mine/schedule").mkdir()
    (tmp_path / "mine/schedule/flat.yaml").write_text("_target_: parts_of_a_test.flat\nto: 0.5\n")
    code = "import torch\ndef sgd(model, lr):\n    return torch.optim.SGD(model.parameters(), lr)\n"
    code += "def flat(step, *, max_steps, to):\n    return to\n"
    (tmp_path / "parts_of_a_test.py").write_text(code, encoding="utf-8")
    line = ["--config-dir", "mine", "optimizer=sgd", "schedule=flat", "max_steps=2"]
    assert call("train.py", *line, "hydra.run.dir=run").returncode == 0
    assert {
        float(row["learning_rate"])
        for row in table(tmp_path / "run/metrics.csv")
        if row["learning_rate"]
    } == {0.05}
    assert str(tmp_path) in sys.path
    swept = call("train.py", *line, "-m", "seed=1,2", "hydra.sweep.dir=sweep", "log_every=1")
    assert (swept.returncode, len(table(tmp_path / "sweep/runs.csv"))) == (0, 2)


def test_a_byte_order_mark_or_a_comment_hides_no_package_line(call, text, tmp_path):
    files = {
        "experiment/mine": "# Mine, a # @package line\n\n# @package _global_\nseed: 7\n"
        "optimizer:\n  lr: 0.5\n",
        "data/mine": f"# @package data\ndefaults: [text, _self_]\npath: {text}\n",
    }
    for name, content in files.items():
        file = tmp_path / f"conf/{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(content, encoding="utf-8-sig", newline="\r\n")
    chosen = ["experiment=mine", "data=mine"]
    shown = call("train.py", "--config-dir", "conf", *chosen, "--cfg", "job", small=False).stdout
    for cfg in (
        OmegaConf.create(shown),
        composed(f"hydra.searchpath=[file://{tmp_path}/conf]", *chosen),
    ):
        assert (cfg.seed, cfg.optimizer.lr, cfg.data.path, cfg.data.split) == (
            7,
            0.5,
            str(text),
            "fraction",
        )
    prepared = call("prepare.py", "--config-dir", "conf", "data=mine")
    assert (prepared.returncode, "fox.txt" in prepared.stdout) == (0, True)


WRONG = {
    "nope does not exist": ["nope=1"],
    "train takes a list of overrides such as": "max_steps=3",
    "without flags, got {'max_steps': 3}": {"max_steps": 3},
    "without flags, got ['-m', 'seed=1,2']": ["-m", "seed=1,2"],
    "model.n_head=2,4": ["model.n_head=2,4"],
    "Environment variable 'NOPE' not found": ["max_steps=${oc.env:NOPE}"],
}


@pytest.mark.parametrize("message", WRONG)
def test_train_of_python_raises_a_user_error(message):
    with pytest.raises(UserError, match=re.escape(message)):
        train(WRONG[message])


def test_names_of_before_in_a_users_file_train_as_those_of_today(train, trained):
    before = [
        "optimizer._target_=minigpt.optim.adamw",
        "schedule._target_=minigpt.schedules:cosine",
        "callbacks.samples._target_=minigpt.runs.callbacks.samples.Samples",
    ]
    short = "callbacks.samples.max_new_tokens=19"
    found = train(*before, short).folder
    assert rows(found) == rows(trained(short))
    assert read_samples(found) == read_samples(trained(short)) != []
    config = OmegaConf.load(found / ".hydra/config.yaml")
    assert config.callbacks.samples._target_.endswith(".SamplesCallback")


# Settings, of which the last is refused.
MODEL = """
    n_layer=0 n_layer=2.5 n_layer=true n_layer=null n_layer='12' vocab_size=0 n_head=0 n_embd=0
    layer_repeats=0 ngram_buckets=0 ngram_dim=0 rope_original_block_size=0 base_n_embd=64.5
    base_head_dim=0 block_size=1048577 n_kv_head=0 head_dim=0 n_inner=1.5 bias=1 bias=null
    qk_norm='no' qk_norm_weights=0 tie_embeddings=1 embed_norm=1 qkv_bias=1 ngram=1 ngram=-2
    smear=-1 dropout=1 dropout=-0.1 dropout=.nan ngram_dropout=1.0 rope_base=0 rope_base=.inf
    norm_eps=0 rope_low_freq_factor=0 rope_high_freq_factor=1.0 logit_softcap=0 rope_factor=0.5
    rope_factor=.inf norm=batchnorm position=alibi activation=GELU norm_position=sandwich
    parametrization=muP layer_repeats=3,n_layer=4 n_head=8,n_embd=100 n_kv_head=3,n_head=4
    position=rope,n_embd=36,head_dim=3 qk_norm_weights=true,qk_norm=false
"""
RUN = """
    max_steps=0 max_steps=null eval_every=0 log_every=0 data.batch_size=0 data.eval_batch_size=-2
    optimizer.newton_schulz_steps=0 trainer.accumulate_grad_batches=0 pause_at=0 pause_at=300
    pause_at=1250 eval_batches=0 checkpoint_blocks=0 data.threads=0 threads=0
    callbacks.originality.characters=0 seed=-1
    seed=1.5 seed=18446744073709551616 data.overfit_batches=-1 schedule.warmup_steps=-1
    collective_timeout=0 optimizer.lr=0 optimizer.lr=fast optimizer.adam_lr=0
    trainer.gradient_clip_val=0 optimizer.weight_decay=-0.1 optimizer.momentum=1
    optimizer.ngram_weight_decay=-1 optimizer.betas=[0.9] optimizer.betas=null
    optimizer.betas=[2.0,0.99] data.val_fraction=0 data.val_fraction=1 ema_decay=1
    schedule.final_lr_frac=-1 trainer.strategy.compress=1 data.train_bin=[]
    data.val_bin=s3://a/b.bin data.source=ftp data.split=half data.separator=1 data.separator=''
    tokenizer.vocab_size=256 init_from=1 init_from='' resume=1 compile=maybe
"""
CASES = [*(f"model.{case.replace(',', ' model.')}" for case in MODEL.split()), *RUN.split()]


@cache
def run() -> DictConfig:
    return composed("optimizer=muon", "trainer=ddp", "tokenizer=bpe")


@pytest.mark.parametrize("overrides", CASES)
def test_an_invalid_value_raises_with_its_key_and_the_valid_values(overrides: str):
    given = OmegaConf.from_dotlist(overrides.split())
    key = overrides.split()[-1].partition("=")[0]
    refused(
        f"^{key} must be .+, got {re.escape(str(OmegaConf.select(given, key)))}(;|$)",
        check_run,
        OmegaConf.merge(run(), given),
    )


def test_a_run_with_a_value_at_its_limit_is_accepted():
    limits = """seed=0 optimizer.weight_decay=0 schedule.warmup_steps=0 pause_at=1000
        trainer.gradient_clip_val=null model.vocab_size=65 model.n_kv_head=2
        model.block_size=1048576"""
    for override in limits.split():
        check_run(OmegaConf.merge(run(), OmegaConf.from_dotlist([override])))


WHOLE = {
    "max_steps": "1e4",
    "eval_every": "5e1",
    "pause_at": "1e2",
    "seed": "1e18",
    "threads": "2.0",
    "callbacks.originality.characters": "1e3",
    "data.batch_size": "4.0",
    "data.overfit_batches": "0.0",
    "model.n_layer": "2.0",
    "model.n_kv_head": "1e0",
    "model.ngram": "3.0",
    "model.block_size": "6.4e1",
    "trainer.devices": "2.0",
    "trainer.accumulate_grad_batches": "2.",
    "schedule.warmup_steps": "1e1",
    "callbacks.checkpoint.save_top_k": "3.0",
    "callbacks.samples.max_new_tokens": "2e2",
    "callbacks.samples.top_k": "5e1",
    "callbacks.snapshots.count": "1e1",
}


def test_a_whole_number_in_any_notation_is_the_same_integer():
    others = ["optimizer.lr=1.0", "model.dropout=0.0", "minutes=null", "ema_decay=null"]
    runs = []
    for numbers in (WHOLE, {key: int(float(value)) for key, value in WHOLE.items()}):
        cfg = composed(*others, *(f"{key}={value}" for key, value in numbers.items()))
        run = RunConfig.from_hydra(cfg, in_job=False)
        runs.append((repr(run), OmegaConf.to_yaml(cfg)))
    assert runs[0] == runs[1]
    assert (run.settings["optimizer"]["lr"], run.settings["model"]["dropout"]) == (1.0, 0.0)
    assert "'lr': 1.0" in runs[0][0]  # what may be a fraction stays as it is
    assert f"'seed': {10**18}" in runs[0][0]
    for key in WHOLE:
        refused(
            rf"^{key} must be [^;]*, got 1\.5$",
            check_run,
            OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}=1.5"])),
        )


def test_a_run_has_typed_parts_and_keeps_the_settings_that_a_user_added():
    run = RunConfig.from_hydra(composed("+data.mine=1", "data.batch_size=4"), in_job=False)
    assert (run.data.batch_size, run.trainer.num_nodes) == (4, 1)
    assert run.settings["data"]["mine"] == 1


def test_swiglu_has_about_as_many_parameters_as_gelu_and_a_width_that_is_a_multiple_of_eight():
    for n_embd in (64, 100, 768):
        width = GPTConfig(n_embd=n_embd, n_head=1, activation="swiglu").inner_width
        assert width % 8 == 0
        assert 0 <= 3 * width - 2 * 4 * n_embd < 3 * 8


def test_a_configuration_equals_the_one_rebuilt_from_its_dictionary_which_is_checked():
    config = GPTConfig(
        n_layer=3, n_kv_head=4, dropout=0.25, position="rope", activation="swiglu", bias=False
    )
    assert GPTConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    for unknown, message in (
        ({"n_windows": 3, "n_layr": 2}, "n_layr, n_windows"),
        ({"dropout": 2}, "in .*, got 2"),
    ):
        refused(message, GPTConfig.from_dict, unknown)


def choices(group: str) -> list[str]:
    names = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    # That of experiment=finetune_gpt2
    return [f"{group}={name}" for name in names if name != "pretrained"]


SHARED = [
    *map(
        choices,
        ("model", "optimizer", "schedule", "trainer", "data", "tokenizer", "callbacks", "logger"),
    )
]


@pytest.mark.parametrize(
    "overrides",
    [*zip_longest(*SHARED), *zip(choices("experiment")), *zip(choices("debug"))],
    ids=str,
)
def test_every_file_in_configs_is_a_valid_run(overrides: tuple[str | None, ...]):
    check_run(composed(*filter(None, overrides)))
